"""Logits processing before temperature: grammar masks, min_tokens, bias, penalties.

Each feature gathers, changes and scatters only the few entries it concerns, for all rows in one go.
The k + 1 verify positions of a row see what token-by-token decoding would have seen: the context of
the token at position p is ``history[row, :p]``, drafts before it included. This file must not know
temperature, truncation or noise.
"""

from __future__ import annotations

import numpy as np
import torch

from paceline.arrays import Float32Array, Int32Array, Int64Array
from paceline.sample import rows as row_flags
from paceline.sample.rows import SamplingRows


def process_logits(
    logits: torch.Tensor, rows: Int64Array, positions: Int64Array, state: SamplingRows
) -> None:
    """Apply min_tokens, logit_bias and penalties of flagged rows, in this order and in place.

    Args:
        logits: [M, V] float32.
        rows: [M] row of each; a row may come several times.
        positions: [M] absolute position of the token to be sampled.
    """
    flags = state.flags[rows]
    too_short = positions - state.prompt_len[rows] < state.min_tokens[rows]
    forbidden = np.flatnonzero((flags & row_flags.MIN_TOKENS).astype(bool) & too_short)
    if forbidden.size:
        _mask_stop_ids(logits, rows, forbidden, state)
    biased = np.flatnonzero(flags & row_flags.BIASED)
    if biased.size:
        _add_bias(logits, rows, biased, state)
    counted = np.flatnonzero(flags & row_flags.COUNTED)
    if counted.size:
        order = counted[np.lexsort((positions[counted], rows[counted]))]
        _apply_penalties(logits, rows, positions, order, state)


def mask_disallowed(logits: torch.Tensor, indices: Int64Array, words: Int32Array) -> None:
    """Put -inf where a grammar allows no token, in place.

    Args:
        logits: [M, V] float32.
        indices: [A] which of the M.
        words: [A, >= ceil(V / 32)]: bit i % 32 of word i // 32 says whether id i may be sampled.
    """
    vocab = logits.shape[1]
    as_bytes = np.ascontiguousarray(~words, "<i4").view(np.uint8)
    bits = np.unpackbits(as_bytes, axis=1, count=vocab, bitorder="little")
    forbidden = torch.from_numpy(bits.view(np.bool_)).to(logits.device)
    for place, index in enumerate(indices.tolist()):
        logits[index].masked_fill_(forbidden[place], -torch.inf)


def _scatter_index(
    logits: torch.Tensor, indices: Int64Array, ids: list[Int64Array]
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Flat index pair of (indices[i], every id of ids[i]), and which of the ids lie inside V.

    A drafter's vocabulary may be padded less than the target's, so ids beyond it are left out.
    """
    flat_ids = np.concatenate(ids)
    owners = np.repeat(indices, [len(x) for x in ids])
    inside = flat_ids < logits.shape[1]
    device = logits.device
    return (
        torch.from_numpy(owners[inside]).to(device),
        torch.from_numpy(flat_ids[inside]).to(device),
        inside,
    )


def _mask_stop_ids(
    logits: torch.Tensor, rows: Int64Array, indices: Int64Array, state: SamplingRows
) -> None:
    ids = [state.stop_ids[int(row)] for row in rows[indices]]
    owners, columns, _ = _scatter_index(logits, indices, ids)
    logits[owners, columns] = -torch.inf


def _add_bias(
    logits: torch.Tensor, rows: Int64Array, indices: Int64Array, state: SamplingRows
) -> None:
    pairs = [state.bias[int(row)] for row in rows[indices]]
    owners, columns, inside = _scatter_index(logits, indices, [ids for ids, _ in pairs])
    values = np.concatenate([values for _, values in pairs])[inside]
    logits[owners, columns] += torch.from_numpy(values).to(logits.device)


def _apply_penalties(
    logits: torch.Tensor,
    rows: Int64Array,
    positions: Int64Array,
    order: Int64Array,
    state: SamplingRows,
) -> None:
    """Repetition (CTRL: Keskar et al., 2019), then frequency and presence, as vLLM does.

    Args:
        order: indices of the flagged entries, sorted by row, then position.
    """
    owners, columns, counts, in_prompt = [], [], [], []
    starts = np.flatnonzero(np.diff(rows[order])) + 1
    for group in np.split(order, starts):
        ids, group_counts, known = _count_group(
            int(rows[group[0]]), positions[group], logits.shape[1], state
        )
        owners.append(np.repeat(group, len(ids)))
        columns.append(np.tile(ids, len(group)))
        counts.append(group_counts.ravel())
        in_prompt.append(np.tile(known, len(group)))
    device = logits.device
    owner_array = np.concatenate(owners)
    owner_rows = rows[owner_array]
    index = (
        torch.from_numpy(owner_array).to(device),
        torch.from_numpy(np.concatenate(columns).astype(np.int64)).to(device),
    )

    def per_entry(parameter: Float32Array) -> torch.Tensor:
        return torch.from_numpy(parameter[owner_rows]).to(device)

    count = torch.from_numpy(np.concatenate(counts)).to(device)
    in_output = count > 0
    seen = in_output | torch.from_numpy(np.concatenate(in_prompt)).to(device)
    value = logits[index]
    repetition = per_entry(state.repetition_penalty)
    penalised = torch.where(value > 0, value / repetition, value * repetition)
    value = torch.where(seen, penalised, value)
    value = value - per_entry(state.frequency_penalty) * count
    logits[index] = value - per_entry(state.presence_penalty) * in_output


def _count_group(
    row: int, positions: Int64Array, vocab: int, state: SamplingRows
) -> tuple[Int32Array, Int64Array, np.ndarray]:
    """Token counts of one row at J ascending positions: counted once, then the drafts added.

    Returns:
        ids [n] distinct tokens of output and (if a repetition penalty needs it) prompt; counts
        [J, n] in the output before each position; in_prompt [n], all False without that penalty.
    """
    prompt_len = int(state.prompt_len[row])
    lengths = np.maximum(positions - prompt_len, 0)
    output = state.tokens(row, prompt_len, prompt_len + int(lengths[-1]))
    ids, inverse = np.unique(output, return_inverse=True)
    # The token at output index t counts from the first position whose length is above t.
    first = np.searchsorted(lengths, np.arange(len(output)), side="right")
    cells = np.bincount(first * len(ids) + inverse, minlength=len(positions) * len(ids))
    counts = cells.reshape(len(positions), len(ids)).cumsum(axis=0)
    in_prompt = np.zeros(len(ids), np.bool_)
    if state.repetition_penalty[row] != 1.0:
        prompt = state.prompt_ids(row)
        slots = np.minimum(np.searchsorted(prompt, ids), max(len(prompt) - 1, 0))
        if len(prompt):
            in_prompt = prompt[slots] == ids
        prompt_only = np.ones(len(prompt), np.bool_)
        prompt_only[slots[in_prompt]] = False
        extra = prompt[prompt_only]
        ids = np.concatenate((ids, extra))
        counts = np.pad(counts, ((0, 0), (0, len(extra))))
        in_prompt = np.pad(in_prompt, (0, len(extra)), constant_values=True)
    inside = (ids >= 0) & (ids < vocab)
    return ids[inside], counts[:, inside], in_prompt[inside]
