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
_LONGEST = 10**9  # beyond any model, and far from where 64-bit integers end
_NUMBER = r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+"


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
        ConfigError: another form, a length below 1 or above 10**9, or shares that do not sum to 1.
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
    match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part.strip())
    if match is None:
        _refuse(text, f"`{part}` is neither a number nor a range")
    low = _bounded(text, match[1])
    high = _bounded(text, match[2] or match[1])
    if low < 1 or high < low:
        _refuse(text, f"`{part}` must run from 1 or more upwards")
    return Uniform(int(low), int(high))


def _bounded(text: str, number: str) -> float:
    # As a float first: Python refuses to convert thousands of digits to an int.
    value = float(number)
    if value > _LONGEST:
        _refuse(text, f"{number} is more than {_LONGEST} tokens")
    return value


def _normal(text: str, rest: str) -> Normal:
    match = re.fullmatch(rf"\s*({_NUMBER})\s*,\s*({_NUMBER})\s*", rest)
    if match is None:
        _refuse(text, f"`{rest}` is not a mean and a standard deviation such as 200,50")
    mean, std = _bounded(text, match[1]), _bounded(text, match[2])
    if mean < 1:
        _refuse(text, f"the mean must be at least 1, got {match[1]}")
    return Normal(mean, std)


def _mix(text: str, rest: str) -> Mix:
    parts: list[tuple[float, Uniform]] = []
    for entry in rest.split(","):
        match = re.fullmatch(rf"\s*({_NUMBER})=(.*)", entry)
        if match is None:
            _refuse(text, f"`{entry}` is not of the form SHARE=LENGTHS")
        parts.append((float(match[1]), _uniform(text, match[2])))
    total = sum(share for share, _ in parts)
    if any(share == 0 for share, _ in parts) or abs(total - 1) > 1e-6:
        _refuse(text, f"shares must be above 0 and sum to 1, not to {total:g}")
    return Mix(tuple(parts))
