"""Lengths of synthetic prompts and outputs: a distribution as text, drawn by seed.

parse_lengths("mix:0.75=32-64,0.25=512").draw(rng, 256)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn, Protocol

import numpy as np

from paceline.arrays import Int64Array
from paceline.errors import ConfigError

FORMS = "128, 32-64, normal:MEAN,STD or mix:0.75=32-64,0.25=512"


class Lengths(Protocol):
    """A distribution of token counts, all at least 1."""

    def draw(self, rng: np.random.Generator, count: int) -> Int64Array:
        """[count] lengths."""


@dataclass(frozen=True)
class Uniform:
    """Any length from low to high, both included."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator, count: int) -> Int64Array:
        return rng.integers(self.low, self.high + 1, count)


@dataclass(frozen=True)
class Normal:
    """Rounded, and 1 where it would be less."""

    mean: float
    std: float

    def draw(self, rng: np.random.Generator, count: int) -> Int64Array:
        rounded = np.rint(rng.normal(self.mean, self.std, count)).astype(np.int64)
        lengths: Int64Array = np.maximum(rounded, 1)
        return lengths


@dataclass(frozen=True)
class Mix:
    """Shares of other distributions, in random order. Shares are met to one request."""

    parts: tuple[tuple[float, Uniform], ...]

    def draw(self, rng: np.random.Generator, count: int) -> Int64Array:
        ends = np.rint(np.cumsum([share for share, _ in self.parts]) * count).astype(np.int64)
        sizes = np.diff(ends, prepend=0).tolist()
        drawn = [part.draw(rng, size) for (_, part), size in zip(self.parts, sizes, strict=True)]
        return rng.permutation(np.concatenate(drawn))


def parse_lengths(text: str) -> Lengths:
    """A distribution from its text: one of ``FORMS``.

    Raises:
        ConfigError: another form, a length below 1, or shares that do not sum to 1.
    """
    kind, colon, rest = text.strip().partition(":")
    if not colon:
        return _uniform(text, text)
    if kind == "normal":
        return _normal(text, rest)
    if kind == "mix":
        return _mix(text, rest)
    _refuse(text, f"there is no distribution `{kind}`")


def _refuse(text: str, why: str) -> NoReturn:
    raise ConfigError(f"lengths `{text}`: {why}. hint: write {FORMS}")


def _uniform(text: str, part: str) -> Uniform:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
    if match is None:
        _refuse(text, f"`{part}` is neither a number nor a range")
    low = int(match[1])
    high = int(match[2] or low)
    if low < 1 or high < low:
        _refuse(text, f"`{part}` must run from 1 or more upwards")
    return Uniform(low, high)


def _normal(text: str, rest: str) -> Normal:
    try:
        mean, std = (float(number) for number in rest.split(","))
    except ValueError:
        _refuse(text, f"`{rest}` is not a mean and a standard deviation")
    if not (1 <= mean < float("inf") and 0 <= std < float("inf")):
        _refuse(text, "the mean must be at least 1 and the standard deviation at least 0")
    return Normal(mean, std)


def _mix(text: str, rest: str) -> Mix:
    parts: list[tuple[float, Uniform]] = []
    for entry in rest.split(","):
        match = re.fullmatch(r"\s*(\d*\.?\d+)=(.*)", entry)
        if match is None:
            _refuse(text, f"`{entry}` is not of the form SHARE=LENGTHS")
        parts.append((float(match[1]), _uniform(text, match[2])))
    total = sum(share for share, _ in parts)
    if any(share == 0 for share, _ in parts) or abs(total - 1) > 1e-6:
        _refuse(text, f"shares must be above 0 and sum to 1, not to {total:g}")
    return Mix(tuple(parts))
