"""Truncation as one number a row: the smallest logit/T that top_k, top_p and min_p keep.

The definitions need no sort and treat equal tokens equally:

- min_p keeps a token if its probability is at least min_p times the largest;
- top_k keeps it if fewer than k tokens are strictly more probable;
- top_p keeps it if the mass of strictly more probable tokens, among those kept so far and
  renormalised, is below p.

Each keeps all tokens down to some value, hence the threshold. Masses are sums in float64 of float32
exponentials. ``reference_thresholds`` runs on any device and is the oracle; ``row_threshold`` gives
the same for one row on a CPU without sorting the vocabulary. This file must not know noise.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from paceline.arrays import Float32Array

_BLOCK = 64  # tokens a block when bounding the k-th largest from below
_SORT_BELOW = 4096  # sizes up to this are sorted whole
_BUCKETS = 4096
_BUCKETS_PER_LOGIT = 64


def reference_thresholds(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Smallest value kept in each row.

    Args:
        scaled: [M, V] float32 logits over temperature.
        top_k: [M] int64, 0 keeps all.
        top_p: [M] float32 in (0, 1], 1 keeps all.
        min_p: [M] float32 in [0, 1], 0 keeps all.

    Returns:
        [M] float32, at most the row's maximum; a row with NaN may get NaN.
    """
    vocab = scaled.shape[1]
    values = scaled.sort(dim=1, descending=True).values
    largest = values[:, :1]
    last = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab) - 1
    floor = torch.maximum(largest + min_p[:, None].log(), values.gather(1, last[:, None]))
    kept = values >= floor
    mass = torch.where(kept, (values - largest).exp(), 0.0).double()
    above = mass.cumsum(1) - mass
    target = top_p[:, None].double() * mass.sum(1, keepdim=True)
    # The last value short of the target is the threshold; later ones equal to it pass it too.
    kept &= (above < target) | (top_p[:, None] >= 1)
    return values.gather(1, (kept.sum(1, keepdim=True) - 1).clamp(min=0)).squeeze(1)


def row_threshold(
    scaled: torch.Tensor, largest: float, top_k: int, top_p: float, min_p: float
) -> float:
    """``reference_thresholds`` of one row, -inf where nothing is cut.

    Args:
        scaled: [V] float32 on a CPU.
        largest: its maximum; a row where this is not finite is not truncated.
    """
    if not math.isfinite(largest):
        return -math.inf
    values: Float32Array = scaled.numpy()
    floor = np.float32(-np.inf)
    if min_p > 0.0:
        # As the reference: float32 throughout, by the same logarithm.
        floor = np.float32((torch.tensor(min_p).log() + largest).item())
    if 0 < top_k < len(values):
        floor = max(floor, _kth_largest(values, top_k))
    if top_p < 1.0:
        kept = scaled if floor == -np.inf else torch.from_numpy(values[values >= floor])
        floor = max(floor, _top_p_threshold(kept, largest, top_p))
    return float(floor)


def _kth_largest(values: Float32Array, k: int) -> np.float32:
    """k-th largest of [V]. k block maxima are k tokens, so the least of them is a lower bound."""
    blocks = len(values) // _BLOCK
    if 4 * k <= blocks:
        maxima = values[: blocks * _BLOCK].reshape(_BLOCK, blocks).max(axis=0)
        bound = np.partition(maxima, blocks - k)[blocks - k]
        values = values[values >= bound]
    kth: np.float32 = np.partition(values, len(values) - k)[len(values) - k]
    return kth


def _top_p_threshold(scaled: torch.Tensor, largest: float, top_p: float) -> np.float32:
    """Smallest value of [n] kept by top_p.

    Tokens below (1 - p) / n of the mass have less than 1 - p of it together, so the threshold is
    not among them. If many remain they are bucketed by distance from the maximum: whole buckets
    are summed, and only the bucket in which the mass reaches its target is sorted.
    """
    values: Float32Array = scaled.numpy()
    weights: Float32Array = torch.exp(scaled - largest).numpy()
    total = float(weights.sum(dtype=np.float64))  # numpy's sum depends on no number of threads
    target = top_p * total
    before = 0.0
    if len(values) > _SORT_BELOW:
        # The factor leaves room for rounding.
        inside = np.flatnonzero(weights >= np.float32(0.99 * (1.0 - top_p) * total / len(values)))
        values, weights = values[inside], weights[inside]
    if len(values) > _SORT_BELOW:
        scale = (np.float32(largest) - values) * np.float32(_BUCKETS_PER_LOGIT)
        buckets = np.minimum(scale, np.float32(_BUCKETS - 1)).astype(np.int64)
        sums = np.bincount(buckets, weights=weights, minlength=_BUCKETS).cumsum()
        bucket = min(int(np.searchsorted(sums, target)), _BUCKETS - 1)
        before = float(sums[bucket - 1]) if bucket else 0.0
        inside = np.flatnonzero(buckets == bucket)
        values, weights = values[inside], weights[inside]
    order = np.argsort(-values, kind="stable")
    values = values[order]
    cumulative = weights[order].astype(np.float64).cumsum()
    above = np.concatenate(([0.0], cumulative[:-1])) + before
    # Later values equal to the last one short of the target pass the threshold too, as they should.
    count = max(int(np.searchsorted(above, target)), 1)
    return np.float32(values[count - 1])
