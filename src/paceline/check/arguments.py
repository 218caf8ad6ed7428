"""Faults in the engine arguments alone: types, ranges, and arguments that exclude one another.

Must not look at files or at the machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from paceline.check.report import Fault
from paceline.engine_args import NGRAM, EngineArgs

_MAX_BLOCK_SIZE = 1024
# name -> smallest and largest value (None: no limit)
_INTEGERS: dict[str, tuple[int, int | None]] = {
    "seed": (-(2**63), 2**64 - 1),
    "max_model_len": (2, None),
    "max_num_seqs": (1, 65_536),
    "max_num_batched_tokens": (1, None),
    "block_size": (1, _MAX_BLOCK_SIZE),
    "kv_cache_memory_bytes": (1, None),
    "num_gpu_blocks_override": (1, None),
    "max_logprobs": (0, None),
    "num_speculative_tokens": (1, None),
    "speculative_max_model_len": (2, None),
    "ngram_prompt_lookup_max": (1, None),
    "ngram_prompt_lookup_min": (1, None),
    "speculative_disable_by_batch_size": (0, None),
}
# name -> smallest and largest value, and both in words; of what must be above 0 the next number
_NUMBERS = {
    "gpu_memory_utilization": (math.ulp(0), 1.0, "a number above 0 and at most 1"),
    "swap_space": (0.0, 1e6, "a number of GiB, 0 or more"),
}
_FLAGS = ("skip_tokenizer_init", "enable_prefix_caching", "enable_chunked_prefill", "enforce_eager")
_TEXTS = ("model", "tokenizer", "generation_config", "speculative_model")
_SPECULATIVE = (
    "num_speculative_tokens",
    "speculative_max_model_len",
    "ngram_prompt_lookup_max",
    "ngram_prompt_lookup_min",
    "speculative_disable_by_batch_size",
)
# (argument, value, why it cannot be had, way out)
_NOT_HERE = (
    (
        "spec_policy",
        "auto",
        "is not available in this version",
        "use 'fixed'; `speculative_disable_by_batch_size` stops drafting at high load",
    ),
)


def argument_faults(args: EngineArgs, known: Sequence[Fault] = ()) -> list[Fault]:
    """Every fault that needs no file and no machine to be seen.

    known: faults found before; arguments that they blame are not blamed again.
    """
    faults = [*_type_faults(args), *_choice_faults(args)]
    blamed = {fault.argument for fault in (*known, *faults)}
    if "speculative_model" not in blamed:
        # Of arguments that are wrong by themselves nobody knows how they would go together.
        rest = without_faulty(args, [*known, *faults])
        faults += [fault for fault in _speculative_faults(rest) if fault.argument not in blamed]
    return faults


def _type_faults(args: EngineArgs) -> list[Fault]:
    faults: list[Fault] = []
    for name, (low, high) in _INTEGERS.items():
        value = getattr(args, name)
        if value is None and _default(name) is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            faults.append(_wrong(name, "an integer", value))
        elif value < low or (high is not None and value > high):
            limits = f"at least {low}" if high is None else f"between {low} and {high}"
            faults.append(_wrong(name, limits, value))
    for name in _FLAGS:
        if not isinstance(getattr(args, name), bool):
            faults.append(_wrong(name, "True or False", getattr(args, name)))
    for name in _TEXTS:
        value = getattr(args, name)
        if not (value is None and _default(name) is None) and not (
            isinstance(value, str) and value
        ):
            faults.append(_wrong(name, "a non-empty string", value))
    return faults + _number_faults(args)


def _number_faults(args: EngineArgs) -> list[Fault]:
    faults: list[Fault] = []
    for name, (least, most, due) in _NUMBERS.items():
        value = getattr(args, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and least <= value <= most):
            faults.append(_wrong(name, due, value))
    return faults


def _wrong(name: str, due: str, value: object) -> Fault:
    default = _default(name)
    hint = f"the default is {default!r}"
    if name == "model":
        hint = "give a local directory or a hub id"
    elif default is None:
        hint = "correct it or leave it out"
    return Fault(f"`{name}` must be {due}, got {value!r}", hint, argument=name)


def _default(name: str) -> Any:
    return next(f.default for f in fields(EngineArgs) if f.name == name)


def without_faulty(args: EngineArgs, faults: Sequence[Fault]) -> EngineArgs:
    """A copy in which every argument to blame has its default."""
    names = {fault.argument for fault in faults} - {"", "model"}
    return replace(args, **{name: _default(name) for name in names})


def _choice_faults(args: EngineArgs) -> list[Fault]:
    faults: list[Fault] = []
    for f in fields(EngineArgs):
        choices, value = f.metadata.get("choices"), getattr(args, f.name)
        if not choices or (isinstance(value, str) and value in choices):
            continue
        cause = f"`{f.name}={value!r}` is unknown"
        if f.name == "device" and str(value).startswith("cuda:"):
            cause = f"`device={value!r}` names one of several GPUs; CUDA_VISIBLE_DEVICES does that"
        listed = ", ".join(repr(choice) for choice in choices)
        faults.append(Fault(cause, f"choose one of {listed}", argument=f.name))
    for name, value, why, hint in _NOT_HERE:
        if getattr(args, name) == value:
            faults.append(Fault(f"`{name}={value!r}` {why}", hint, argument=name))
    if args.skip_tokenizer_init is True and args.tokenizer is not None:
        faults.append(
            Fault(
                f"`tokenizer={args.tokenizer!r}` and `skip_tokenizer_init=True` exclude each other",
                "drop one of the two",
                argument="tokenizer",
            )
        )
    return faults


def _speculative_faults(args: EngineArgs) -> list[Fault]:
    """Arguments that the chosen way of drafting misses, or has no use for."""
    drafter = args.speculative_model
    if drafter is None:
        unused = list(_SPECULATIVE)
        if args.speculative_disable_by_batch_size == 0:  # "never" holds without a drafter too
            unused.remove("speculative_disable_by_batch_size")
        why, hint = "has no effect without a drafter", "set `speculative_model`, or leave it out"
    elif drafter == NGRAM:
        unused = ["speculative_max_model_len"]
        why, hint = "is for drafter models; prompt lookup has no context limit", "leave it out"
    else:
        unused = ["ngram_prompt_lookup_max", "ngram_prompt_lookup_min"]
        why = f"is for prompt lookup, but the drafter is `{drafter}`"
        hint = f'leave it out, or set `speculative_model="{NGRAM}"`'
    faults = [
        Fault(f"`{name}={getattr(args, name)}` {why}", hint, argument=name)
        for name in unused
        if getattr(args, name) is not None
    ]
    if drafter is not None and args.num_speculative_tokens is None:
        faults.append(
            Fault(
                f"`num_speculative_tokens` is missing for the drafter `{drafter}`",
                "5 is a good start",
                argument="num_speculative_tokens",
            )
        )
    low, high = lookup_lengths(args)
    if drafter == NGRAM and low > high:
        faults.append(
            Fault(
                f"`ngram_prompt_lookup_min` ({low}) is above `ngram_prompt_lookup_max` ({high})",
                "swap them",
            )
        )
    if drafter == "ngram":
        faults.append(
            Fault(
                "`speculative_model='ngram'` names a model called ngram",
                f'for prompt lookup set `speculative_model="{NGRAM}"`',
                argument="speculative_model",
            )
        )
    return faults


def lookup_lengths(args: EngineArgs) -> tuple[int, int]:
    """Shortest and longest n-gram looked up: 2 and 5, moved where only the other one is given."""
    low, high = args.ngram_prompt_lookup_min, args.ngram_prompt_lookup_max
    if low is None:
        low = 2 if high is None else min(2, high)
    if high is None:
        high = max(5, low)
    return low, high
