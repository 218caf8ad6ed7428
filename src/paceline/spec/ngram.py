"""Prompt lookup: guess that what followed the last few tokens before will follow them again.

Saxena, "Prompt Lookup Decoding" (2023). Numpy only: this file must not know tensors, rows or the
target model.
"""

from __future__ import annotations

import numpy as np

from paceline.arrays import Int32Array


def find_continuation(history: Int32Array, k: int, lookup_max: int, lookup_min: int) -> Int32Array:
    """Tokens that followed an earlier occurrence of the longest matching n-gram at the end.

    n goes from lookup_max down to lookup_min; the first n whose last n tokens occurred before (they
    may overlap their earlier occurrence) decides. Among its occurrences the latest that k tokens
    follow is taken, else the earliest, which most tokens follow.

    Args:
        history: [N] token ids.
        k: how many tokens are wanted.
        lookup_max, lookup_min: n-gram sizes, 1 <= lookup_min <= lookup_max.

    Returns:
        [<= k] int32, a copy; empty if nothing matched.
    """
    length = len(history)
    longest = min(lookup_max, length - 1)
    if k <= 0 or longest < lookup_min:
        return np.zeros(0, np.int32)
    # ends[e]: an occurrence of the n-gram ends at e, for n = 1, 2, ... as far as there is one.
    ends = history[:-1] == history[-1]
    matched = ends if lookup_min == 1 else None
    for n in range(2, longest + 1):
        longer = ends.copy()
        longer[: n - 1] = False
        longer[n - 1 :] &= history[: length - n] == history[-n]
        if not longer.any():
            break
        ends = longer
        if n >= lookup_min:
            matched = ends
    if matched is None:
        return np.zeros(0, np.int32)
    return _continuation(history, np.flatnonzero(matched), k)


def _continuation(history: Int32Array, ends: np.ndarray, k: int) -> Int32Array:
    """Up to k tokens after the best of the ascending positions ``ends``."""
    if not len(ends):
        return np.zeros(0, np.int32)
    full = int(np.searchsorted(ends, len(history) - k, side="left"))  # those with e + k < N
    start = int(ends[full - 1 if full else 0]) + 1
    return history[start : start + k].astype(np.int32)
