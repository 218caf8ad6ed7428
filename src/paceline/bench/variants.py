"""What is compared: engines, and the draft lengths that each of them serves.

A variant is one row of the result. Variants are the product of the sides of an A/B, of batching and
of draft lengths; those that differ in draft length alone share an engine. Knows arguments by name
only; whether they can work is for ``paceline.check`` to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.engine_args import EngineArgs
from paceline.errors import ConfigError

# Engine arguments that decide what --k decides.
_DRAFT_LENGTH = ("num_speculative_tokens", "spec_policy", "speculative_disable_by_batch_size")


@dataclass(frozen=True)
class EngineSpec:
    """An engine to open. max_k: its draft length is set from outside, up to this; None: its own."""

    name: str
    arguments: dict[str, Any]
    max_k: int | None


@dataclass(frozen=True)
class Variant:
    """One row of the result."""

    name: str
    engine: int  # place of its engine
    k: int | None  # None leaves the draft length to the engine


@dataclass(frozen=True)
class Comparison:
    """Variants by engine, in the order of the result; ratios are against the first."""

    engines: list[EngineSpec]
    variants: list[Variant]


def make_comparison(
    common: Mapping[str, Any],
    sides: Mapping[str, Mapping[str, Any]],
    batchings: Sequence[str],
    ks: Sequence[int],
) -> Comparison:
    """The product of sides, batchings and draft lengths. Empty ones do not take part.

    common: engine arguments of all. sides: name -> engine arguments of that side, which win over
    the common ones.

    Raises:
        ConfigError: unknown arguments, a setting that is given twice, or a draft length without a
            drafter.
    """
    if any(not batching.strip() for batching in batchings):
        raise ConfigError("`--batching` has an empty entry. hint: such as static,continuous")
    _refuse_repeats("--batching", batchings)
    _refuse_repeats("--k", ks)
    engines: list[EngineSpec] = []
    variants: list[Variant] = []
    for side, settings in (sides or {"": {}}).items():
        if batchings:
            _refuse_twice(settings, ["batching"], f"--{side}", "--batching")
        for batching in batchings or [""]:
            arguments = {**common, **settings}
            if batching:
                arguments["batching"] = batching
            name = f"{side} {batching}".strip()
            engine = _engine(name, arguments, ks)
            if not ks:
                variants.append(Variant(name or "engine", len(engines), None))
            for k in ks:
                variants.append(Variant(f"{name} k={k}".strip(), len(engines), k))
            engines.append(engine)
    return Comparison(engines, variants)


def _engine(name: str, arguments: dict[str, Any], ks: Sequence[int]) -> EngineSpec:
    args = EngineArgs.from_kwargs(**arguments)  # refuses unknown names
    if not ks:
        return EngineSpec(name, arguments, None)
    _refuse_twice(arguments, _DRAFT_LENGTH, "an engine argument", "--k")
    if args.speculative_model is not None:
        # Even for k = 0 alone: then the drafter is loaded and idle.
        return EngineSpec(name, {**arguments, "num_speculative_tokens": max(*ks, 1)}, max(ks))
    if max(ks) > 0:
        raise ConfigError(
            f"draft length k = {max(ks)} without a drafter{name and f' in variant {name}'}. hint: "
            "name one with --speculative-model, a smaller model of the same family or [ngram], or "
            "leave --k out"
        )
    return EngineSpec(name, arguments, 0)


def _refuse_repeats(flag: str, values: Sequence[object]) -> None:
    repeated = [value for place, value in enumerate(values) if value in values[:place]]
    if repeated:
        raise ConfigError(f"`{flag}` names {repeated[0]} twice. hint: name it once")


def _refuse_twice(
    arguments: Mapping[str, Any], names: Sequence[str], first: str, second: str
) -> None:
    for name in names:
        if arguments.get(name) is not None:
            raise ConfigError(
                f"`{name}={arguments[name]!r}` is set by {first}, and {second} sets the same for "
                "each variant. hint: keep one of the two"
            )
