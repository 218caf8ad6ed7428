"""The bounds of a median: extremes of few rounds, an exact interval of more."""

from __future__ import annotations

import random

import pytest

from paceline.bench.spread import Spread, bounds_name, spread


def test_few_rounds_show_their_extremes() -> None:
    assert spread([3.0]) == Spread(3.0, 3.0, 3.0)
    assert spread([5.0, 1.0, 2.0, 9.0]) == Spread(3.5, 1.0, 9.0)
    assert bounds_name(5) == "min to max"


@pytest.mark.parametrize(
    # Ranks of the order statistics, as tables of the sign test list them.
    ("count", "rank"),
    [(6, 1), (8, 1), (9, 2), (11, 2), (12, 3), (15, 4), (20, 6), (25, 8)],
)
def test_interval_of_order_statistics(count: int, rank: int) -> None:
    values = [float(i) for i in range(1, count + 1)]
    found = spread(random.Random(0).sample(values, count))
    assert (found.low, found.high) == (rank, count + 1 - rank)
    assert bounds_name(count) == "95% interval"


def test_one_round_has_no_bounds() -> None:
    found = spread([3.0])
    assert (found.low, found.median, found.high) == (3, 3, 3)
    assert bounds_name(1) == "spread unknown"


def test_the_interval_covers_the_median() -> None:
    rng = random.Random(1)
    hits = 0
    for _ in range(2000):
        found = spread([rng.expovariate(1) for _ in range(9)])
        hits += found.low <= 0.6931 <= found.high
    assert 0.95 <= hits / 2000 < 0.975  # 96.1% at 9 values
