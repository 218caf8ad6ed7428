"""Medians of rounds, with the spread that a few rounds can honestly show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

ROUNDS_FOR_INTERVAL = 6
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with bounds around it: see ``spread``."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """The median of one value a round, and its bounds.

    With 6 rounds or more the bounds are a 95% confidence interval of the median made of order
    statistics, which assumes no distribution; with fewer there is none, and they are the extremes.
    """
    ordered = sorted(values)
    skipped = _skipped(len(ordered))
    return Spread(statistics.median(ordered), ordered[skipped], ordered[-1 - skipped])


def bounds_name(num_rounds: int) -> str:
    """What the bounds of ``spread`` are, in words."""
    if num_rounds == 1:
        return "spread unknown"
    return "95% interval" if num_rounds >= ROUNDS_FOR_INTERVAL else "min to max"


def _skipped(count: int) -> int:
    """Values that may be left out at each end while the rest holds the median with 95%.

    The true median lies below the j + 1 smallest of n values with probability
    P(Binomial(n, 1/2) <= j).
    """
    outside, skipped = 2 / 2**count, 0
    while outside + 2 * math.comb(count, skipped + 1) / 2**count <= 1 - _CONFIDENCE:
        skipped += 1
        outside += 2 * math.comb(count, skipped) / 2**count
    return skipped
