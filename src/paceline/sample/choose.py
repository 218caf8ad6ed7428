"""Gumbel-max choice: the token with the largest logit/T + noise among those kept.

Two ways to the same ids, bit for bit. ``choose_full`` computes the noise of every token, on any
device; it is the oracle. ``choose_pruned`` (CPU) computes it only where it can matter. Both take
the lowest id on ties. This file must not know rows or requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from paceline.arrays import BoolArray, Float32Array, Int64Array
from paceline.sample.noise import (
    COARSE_BITS,
    COARSE_NOISE,
    MAX_NOISE,
    UInt32Array,
    finish_hash,
    hash_rounds_host,
    hash_to_noise,
    neg_log_exponential,
    noise_at,
    split_keys,
)
from paceline.sample.truncation import reference_thresholds, row_threshold

_CHUNK = 1 << 18  # logits scored at a time, so that temporaries stay in the cache
_HASH_SHARE = 8  # above 1/8 of the tokens in reach, hashing all of them in order is cheaper


@dataclass(slots=True)
class Choice:
    """What the choice at S positions depends on beside the logits.

    keys: [S] int64 noise keys. temperature, top_p, min_p: [S] float32. top_k: [S] int64, 0 is off.
    truncated: [S] whether top_k, top_p and min_p are looked at.
    """

    keys: Int64Array
    temperature: Float32Array
    top_k: Int64Array
    top_p: Float32Array
    min_p: Float32Array
    truncated: BoolArray


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Lowest id of the largest logit: [M, V] -> [M] int64. A row with NaN gives any id."""
    if logits.device.type == "cpu":
        # About ten times faster than torch's.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(-1)


def choose_full(logits: torch.Tensor, choice: Choice, mix: torch.Tensor) -> torch.Tensor:
    """Sample every row of [S, V] float32 logits, unpruned. Returns [S] int64."""
    device = logits.device
    scaled = logits / torch.from_numpy(choice.temperature).to(device)[:, None]
    noise = neg_log_exponential(torch.from_numpy(choice.keys).to(device), scaled.shape[1], mix)
    scores = scaled + noise
    cut = np.flatnonzero(choice.truncated)
    if cut.size:
        index = torch.from_numpy(cut).to(device)
        top_k, top_p, min_p = (
            torch.from_numpy(values[cut]).to(device)
            for values in (choice.top_k, choice.top_p, choice.min_p)
        )
        thresholds = reference_thresholds(scaled[index], top_k, top_p, min_p)
        dropped = scaled[index] < thresholds[:, None]
        scores[index] = scores[index].masked_fill(dropped, -torch.inf)
    return argmax(scores)


def choose_pruned(
    logits: torch.Tensor, indices: Int64Array, best: Int64Array, choice: Choice, mix: torch.Tensor
) -> Int64Array:
    """Sample some rows of CPU logits, computing noise only where it can matter.

    The most probable token is never truncated and its score is known at once. Any other token must
    beat it, so its logit/T must reach that score less the largest noise there is, and unless the
    top bits of its hash are zero, that score less COARSE_NOISE.

    Args:
        logits: [M, V] float32.
        indices: [S] which rows to sample.
        best: [S] argmax of each of these rows.
        mix: ``token_mix(V)``.

    Returns:
        [S] token ids; of a row with NaN or +inf, any id.
    """
    temperature = torch.from_numpy(choice.temperature)
    keys = torch.from_numpy(choice.keys)
    best_index = torch.from_numpy(best)
    largest = logits[torch.from_numpy(indices), best_index] / temperature
    best_scores = largest + noise_at(keys, mix[best_index])
    # At a tiny temperature a float32 step is large: a few steps of room keep the bounds strict.
    room = best_scores.abs() * 2.0**-21
    reach = (best_scores - MAX_NOISE - room).numpy()
    near = (best_scores - COARSE_NOISE - room).numpy()
    low, high = (half.numpy().view(np.uint32) for half in split_keys(keys))
    host_mix = mix.numpy().view(np.uint32)
    result = best.copy()
    values: Float32Array = logits.numpy()
    step = max(1, _CHUNK // logits.shape[1])
    for start in range(0, len(indices), step):
        part = slice(start, start + step)
        picked = indices[part]
        # One row as a view: a copy of [1, V] would cost as much as a pass over it.
        source = values[picked[0] : picked[0] + 1] if len(picked) == 1 else values[picked]
        with np.errstate(over="ignore"):
            scaled: Float32Array = source / choice.temperature[part, None]
        for i in np.flatnonzero(choice.truncated[part]):
            j = start + i
            kept = row_threshold(
                torch.from_numpy(scaled[i]),
                float(largest[j]),
                int(choice.top_k[j]),
                float(choice.top_p[j]),
                float(choice.min_p[j]),
            )
            reach[j] = max(reach[j], kept)
        owners, ids, scores = _score_candidates(
            scaled, reach[part], near[part], low[part], high[part], host_mix
        )
        _take_best(owners, ids, scores, result[part])
    return result


def _score_candidates(
    scaled: Float32Array,
    reach: Float32Array,
    near: Float32Array,
    low: UInt32Array,
    high: UInt32Array,
    mix: UInt32Array,
) -> tuple[Int64Array, Int64Array, Float32Array]:
    """Owner row, token id and score of every token of [C, V] that may win, in this order.

    Args:
        reach: [C] values below it lose.
        near: [C] values below it lose unless the top bits of their hash are zero.
        low, high: [C] halves of the noise keys. mix: [V].
    """
    vocab = scaled.shape[1]
    mask: BoolArray = scaled >= reach[:, None]
    hash_all = np.count_nonzero(mask) * _HASH_SHARE > scaled.size
    if hash_all:
        every = hash_rounds_host(low[:, None], high[:, None], mix)
        candidate = every < np.uint32(1 << (32 - COARSE_BITS))
        candidate |= scaled >= near[:, None]
        mask &= candidate
    flat = np.flatnonzero(mask)
    owners = flat // vocab
    ids = flat - owners * vocab
    if hash_all:
        rounds = every.reshape(-1)[flat]
    else:
        rounds = hash_rounds_host(low[owners], high[owners], mix[ids])
    noise = hash_to_noise(finish_hash(torch.from_numpy(rounds.view(np.int32))))
    return owners, ids, scaled.reshape(-1)[flat] + noise.numpy()


def _take_best(
    owners: Int64Array, ids: Int64Array, scores: Float32Array, result: Int64Array
) -> None:
    """Write the first id of the largest score of each owner into result [C]."""
    if not len(ids):
        return
    if len(result) == 1:
        result[0] = ids[scores.argmax()]
        return
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    largest = np.maximum.reduceat(scores, starts)
    winners = np.flatnonzero(scores == np.repeat(largest, np.diff(starts, append=len(scores))))
    winner_owners, first = np.unique(owners[winners], return_index=True)
    result[winner_owners] = ids[winners[first]]
