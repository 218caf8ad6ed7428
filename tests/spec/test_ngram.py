"""Prompt lookup against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.spec.ngram import find_continuation


def brute_force(history: list[int], k: int, lookup_max: int, lookup_min: int) -> list[int]:
    length = len(history)
    for n in range(min(lookup_max, length - 1), lookup_min - 1, -1):
        suffix = history[length - n :]
        starts = [i for i in range(length - n) if history[i : i + n] == suffix]
        if starts:
            full = [i for i in starts if length - (i + n) >= k]
            best = full[-1] if full else starts[0]
            return history[best + n : best + n + k]
    return []


@settings(max_examples=600, deadline=None)
@given(
    history=st.integers(1, 4).flatmap(
        lambda top: st.lists(st.integers(0, top), min_size=1, max_size=60)
    ),
    k=st.integers(0, 8),
    lookup_min=st.integers(1, 4),
    extra=st.integers(0, 4),
)
def test_against_brute_force(history: list[int], k: int, lookup_min: int, extra: int) -> None:
    array = np.array(history, np.int32)
    got = find_continuation(array, k, lookup_min + extra, lookup_min)
    expected = brute_force(history, k, lookup_min + extra, lookup_min) if k else []
    assert got.tolist() == expected
    assert got.dtype == np.int32
    assert array.tolist() == history


@pytest.mark.parametrize(
    ("history", "k", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], 2, [8, 1]),  # the latest occurrence
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], 5, [9, 1, 2, 3, 8]),  # the latest with k to follow
        ([1, 2, 3, 9, 1, 2, 3], 9, [9, 1, 2, 3]),  # else the one with most to follow
        ([7, 7, 7, 7], 2, [7]),  # overlapping its own continuation
        ([5, 1, 2, 4, 1, 3, 4, 1, 2], 1, [4]),
        ([1, 2, 3], 3, []),
        ([1], 3, []),
        ([4, 4], 3, []),
    ],
)
def test_examples(history: list[int], k: int, expected: list[int]) -> None:
    assert find_continuation(np.array(history, np.int32), k, 3, 2).tolist() == expected


def test_empty_history() -> None:
    assert find_continuation(np.zeros(0, np.int32), 3, 3, 1).tolist() == []


def test_result_is_a_copy() -> None:
    history = np.array([1, 2, 3, 1], np.int32)
    got = find_continuation(history, 2, 2, 1)
    got[:] = 0
    assert history.tolist() == [1, 2, 3, 1]


@pytest.mark.parametrize("vocab", [2, 50, 100_000])
def test_long_history(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    history = rng.integers(0, vocab, 32_000).astype(np.int32)
    history[-4:] = history[20_000:20_004]
    got = find_continuation(history, 5, 5, 2)
    assert got.tolist() == brute_force(history.tolist(), 5, 5, 2)
