"""Interleaved rounds: every variant runs once a round, in an order that rotates.

A machine that grows slower or busier then hits all variants alike, and the ratio of two variants
can be taken within a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from paceline.bench.engines import EngineSet
from paceline.bench.figures import Figures, figures_of
from paceline.bench.prepare import EnginePlan
from paceline.bench.variants import Variant

T = TypeVar("T")


def run_rounds(
    engines: EngineSet,
    plans: Sequence[EnginePlan],
    variants: Sequence[Variant],
    count: int,
    on_run: Callable[[int, Variant, Figures], None] = lambda number, variant, figures: None,
) -> Iterator[list[Figures]]:
    """Yield each round's figures, in the order of the variants.

    Draft lengths of one engine run next to one another; both they and the engines rotate. The first
    run of all is the first variant's; its outputs are what the others' are compared with.
    on_run: told of each run as it ends; rounds are counted from 0.
    """
    by_engine = [[v for v in variants if v.engine == i] for i in range(len(plans))]
    expected: list[list[int]] | None = None
    for number in range(count):
        done: dict[Variant, Figures] = {}
        for group in _rotated(by_engine, number):
            engine = engines.get(group[0].engine)
            budget = plans[group[0].engine].config.scheduler.max_num_batched_tokens
            for variant in _rotated(group, number):
                run = engine.run(variant.k)
                expected = run.token_ids if expected is None else expected
                done[variant] = figures_of(run, budget, expected)
                on_run(number, variant, done[variant])
        yield [done[variant] for variant in variants]


def _rotated(items: Sequence[T], places: int) -> list[T]:
    start = places % len(items)
    return [*items[start:], *items[:start]]
