"""Truncation thresholds: the definitions, and the fast row against the reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sample.truncation import reference_thresholds, row_threshold


def slow_kept(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """By the definitions, in float64, tokens compared pair by pair. True, False, or nan if within
    rounding of a border."""
    probs = np.exp(scaled.astype(np.float64) - scaled.max())
    probs /= probs.sum()
    kept = probs >= min_p * probs.max()
    unsure = np.abs(probs - min_p * probs.max()) < 1e-6 * probs.max() if min_p else kept & False
    more = (scaled[None, :] > scaled[:, None]).sum(1)
    if top_k:
        kept &= more < top_k
    if top_p < 1:
        kept_probs = np.where(kept, probs, 0.0)
        kept_probs /= kept_probs.sum()
        above = (kept_probs[None, :] * (scaled[None, :] > scaled[:, None])).sum(1)
        unsure |= np.abs(above - top_p) < 1e-6
        kept &= above < top_p
    if unsure.any() and min_p:
        unsure |= True  # what min_p drops changes the mass of all
    result = kept.astype(float)
    result[unsure] = math.nan
    return result


def both(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> tuple[float, float]:
    values = torch.from_numpy(scaled.astype(np.float32))
    reference = reference_thresholds(
        values[None],
        torch.tensor([top_k]),
        torch.tensor([top_p], dtype=torch.float32),
        torch.tensor([min_p], dtype=torch.float32),
    )
    fast = row_threshold(
        values,
        float(values.max()),
        top_k,
        float(np.float32(top_p)),
        float(np.float32(min_p)),
    )
    return float(reference[0]), fast


TOP_K = st.sampled_from([0, 1, 2, 3, 7, 50, 1000, 10**9])
TOP_P = st.sampled_from([1.0, 0.999999, 0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 1e-6])
MIN_P = st.sampled_from([0.0, 1e-9, 0.01, 0.05, 0.25, 0.5, 1.0])


@st.composite
def rows(draw: st.DrawFn, sizes: tuple[int, ...]) -> np.ndarray:
    """Logits of several shapes: coarse ones have many ties, some are masked."""
    vocab = draw(st.sampled_from(sizes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scaled = rng.normal(0, draw(st.sampled_from([0.0, 0.01, 1.0, 4.0, 30.0])), vocab)
    step = draw(st.sampled_from([0.0, 0.25, 1.0]))
    if step:
        scaled = np.round(scaled / step) * step
    if draw(st.booleans()):
        scaled[rng.random(vocab) < 0.3] = -np.inf
        scaled[rng.integers(vocab)] = 1.0
    return scaled.astype(np.float32)


@settings(max_examples=200, deadline=None)
@given(rows(sizes=(1, 2, 5, 40, 300)), TOP_K, TOP_P, MIN_P)
def test_definitions(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> None:
    expected = slow_kept(scaled, top_k, top_p, min_p)
    for threshold in both(scaled, top_k, top_p, min_p):
        assert threshold <= scaled.max()
        kept = (scaled >= threshold) & np.isfinite(scaled)
        sure = ~np.isnan(expected) & np.isfinite(scaled)
        assert (kept[sure] == expected[sure].astype(bool)).all()


@settings(max_examples=150, deadline=None)
@given(rows(sizes=(64, 1000, 5000, 40_000)), TOP_K, TOP_P, MIN_P)
def test_fast_row_equals_reference(
    scaled: np.ndarray, top_k: int, top_p: float, min_p: float
) -> None:
    reference, fast = both(scaled, top_k, top_p, min_p)
    assert ((scaled >= reference) == (scaled >= fast)).all()


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 3.0])
def test_long_flat_rows_use_the_buckets(top_p: float, spread: float) -> None:
    scaled = np.random.default_rng(1).normal(0, spread, 150_000).astype(np.float32)
    reference, fast = both(scaled, 0, top_p, 0.0)
    assert reference == fast
    probs = np.exp(scaled.astype(np.float64) - scaled.max())
    probs /= probs.sum()
    assert probs[scaled >= fast].sum() >= top_p - 1e-6
    assert probs[scaled > fast].sum() < top_p + 1e-6


def test_ties_are_kept_or_dropped_together() -> None:
    scaled = np.log(np.array([0.4, 0.2, 0.2, 0.2], np.float32))
    for threshold in both(scaled, 2, 1.0, 0.0):
        assert (scaled >= threshold).tolist() == [True] * 4
    for threshold in both(scaled, 1, 1.0, 0.0):
        assert (scaled >= threshold).tolist() == [True, False, False, False]
    for threshold in both(scaled, 0, 0.3, 0.0):
        assert (scaled >= threshold).tolist() == [True, False, False, False]
    for threshold in both(scaled, 0, 0.5, 0.0):
        assert (scaled >= threshold).tolist() == [True] * 4


def test_top_p_counts_what_min_p_and_top_k_left() -> None:
    scaled = np.log(np.array([0.5, 0.2, 0.15, 0.1, 0.05], np.float32))
    # Of 0.5, 0.2 and 0.15 (top_k 3) the first two hold 0.82 of the mass.
    for threshold in both(scaled, 3, 0.8, 0.0):
        assert (scaled >= threshold).sum() == 2
    for threshold in both(scaled, 0, 0.8, 0.0):
        assert (scaled >= threshold).sum() == 3
    for threshold in both(scaled, 0, 0.8, 0.29):
        assert (scaled >= threshold).sum() == 2


def test_mass_exactly_at_top_p_is_enough() -> None:
    scaled = np.array([0.0, -math.log(2), -math.log(2)], np.float32)
    assert torch.from_numpy(scaled).exp().tolist() == [1.0, 0.5, 0.5]
    for threshold in both(scaled, 0, 0.5, 0.0):
        assert (scaled >= threshold).tolist() == [True, False, False]


def test_rows_that_are_not_finite_are_left_alone() -> None:
    for bad in (math.nan, math.inf):
        values = torch.tensor([0.0, bad, 1.0])
        assert row_threshold(values, bad, 2, 0.5, 0.1) == -math.inf
    assert row_threshold(torch.full((3,), -math.inf), -math.inf, 2, 0.5, 0.1) == -math.inf
