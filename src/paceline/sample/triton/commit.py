# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""What follows the sampling of a decode step: acceptance, advance, and the counts of tokens.

Acceptance is ``sample/verify.py``, advance is ``DecodeState.advance``: the committed cut is the
scheduler's, this one only keeps a finished row from going on, by the same rules.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.sample import rows as row_flags
from paceline.sample.triton.row_tensors import (
    ACTIVE,
    FLAGS,
    IN_PROMPT,
    MAX_TOTAL,
    NUM_TOKENS,
    PROMPT_LEN,
    RowTensors,
    column_of,
)

STATUS_OK = 0
# The model cannot go on from the committed tokens; the row is inactive from here on.
STATUS_FAILED = 1
# The first logits are bad, and a draft may have spoilt them: nothing is committed and the row stays
# active. It must be computed again without drafts (k = 0), which tells.
STATUS_SPOILT = 2

_COUNTED = tl.constexpr(row_flags.COUNTED)
_FAILED = tl.constexpr(STATUS_FAILED)
_SPOILT = tl.constexpr(STATUS_SPOILT)
_COUNT_BLOCK = 4096


@triton.jit
def _accept_kernel(
    sampled,
    bad,
    rows,
    num_drafts,
    out_tokens,
    out_counts,
    out_status,
    columns,
    column_stride,
    history,
    history_stride,
    stop_ids,
    counts,
    counts_width,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    STOPS: tl.constexpr,
):
    entry = tl.program_id(0)
    row = tl.load(rows + entry)
    place = tl.arange(0, WIDTH)
    tokens = tl.load(sampled + entry * (K + 1) + place, mask=place <= K, other=-1)
    tl.store(out_tokens + entry * (K + 1) + place, tokens, mask=place <= K)
    if column_of(columns, column_stride, row, ACTIVE) == 0:
        tl.store(out_counts + entry, 0)
        tl.store(out_status + entry, 0)
        return
    start = column_of(columns, column_stride, row, NUM_TOKENS)
    run = history + row.to(tl.int64) * history_stride + start
    guesses = tl.load(run + place, mask=place < K, other=-1)
    accepted = (tokens == guesses) & (place < tl.load(num_drafts + entry))
    length = tl.min(tl.where(accepted, WIDTH, place), 0) + 1
    # What was sampled from bad logits, or behind them, does not count.
    broken = tl.load(bad + entry * (K + 1) + place, mask=place <= K, other=0) != 0
    length = tl.minimum(length, tl.min(tl.where(broken, place, WIDTH), 0))
    failed = (length == 0) & (K == 0)
    tl.store(out_counts + entry, length)
    tl.store(out_status + entry, tl.where(length > 0, 0, tl.where(failed, _FAILED, _SPOILT)))

    max_total = column_of(columns, column_stride, row, MAX_TOTAL)
    keep = tl.minimum(length, max_total - start)
    stops = tl.load(stop_ids + row.to(tl.int64) * STOPS + tl.arange(0, STOPS))
    is_stop = tl.max((tokens[:, None] == stops[None, :]).to(tl.int32), 1) != 0
    first_stop = tl.min(tl.where(is_stop & (place < keep), place, WIDTH), 0)
    stopped = first_stop < WIDTH
    keep = tl.where(stopped, first_stop + 1, keep)
    tl.store(run + place, tokens, mask=place < keep)
    tl.store(columns + NUM_TOKENS * column_stride + row, start + keep)
    ended = stopped | (start + keep >= max_total) | failed
    tl.store(columns + ACTIVE * column_stride + row, tl.where(ended, 0, 1))
    if counts is not None:  # noqa: SIM102 (known when the kernel is compiled, the next is not)
        if column_of(columns, column_stride, row, FLAGS) & _COUNTED != 0:
            target = counts + row.to(tl.int64) * counts_width + tokens
            tl.atomic_add(target, 1, mask=(place < keep) & (tokens < counts_width))


def accept_and_advance(
    sampled: torch.Tensor,
    bad: torch.Tensor,
    rows: torch.Tensor,
    num_drafts: torch.Tensor,
    state: RowTensors,
    *,
    k: int,
    out_tokens: torch.Tensor,
    out_counts: torch.Tensor,
    out_status: torch.Tensor,
) -> None:
    """Accept each entry's leading drafts that equal the target's samples, and advance its row.

    A run is the accepted drafts and one sample more. The row takes its tokens up to the first stop
    id or ``max_total``, and goes inactive there.

    Args:
        sampled, bad: [B * (k + 1)] int32, ``out`` and ``status`` of ``DeviceSampler.sample``.
        rows: [B] int32; an active row comes once.
        num_drafts: [B] int32 drafts behind the committed tokens of each, at most k.
        out_tokens: [B, k + 1] int32, gets ``sampled``.
        out_counts: [B] int32, gets the length of each run before the cut, 0 for inactive rows.
        out_status: [B] int32, gets one of ``STATUS_OK``, ``STATUS_FAILED``, ``STATUS_SPOILT``.
    """
    _accept_kernel[(rows.shape[0],)](
        sampled,
        bad,
        rows,
        num_drafts,
        out_tokens,
        out_counts,
        out_status,
        state.columns,
        state.columns.stride(0),
        state.history,
        state.history.stride(0),
        state.stop_ids,
        state.counts,
        0 if state.counts is None else state.counts.shape[1],
        k,
        triton.next_power_of_2(k + 1),
        state.stop_ids.shape[1],
        num_warps=1,
    )


@triton.jit
def _count_kernel(
    rows,
    columns,
    column_stride,
    history,
    history_stride,
    counts,
    counts_width,
    BLOCK: tl.constexpr,
):
    row = tl.load(rows + tl.program_id(0))
    lanes = tl.arange(0, BLOCK)
    target = counts + row.to(tl.int64) * counts_width
    for start in range(0, counts_width, BLOCK):
        tl.store(target + start + lanes, 0, mask=start + lanes < counts_width)
    tl.debug_barrier()  # zeros first, from all threads
    prompt_len = column_of(columns, column_stride, row, PROMPT_LEN)
    num_tokens = column_of(columns, column_stride, row, NUM_TOKENS)
    source = history + row.to(tl.int64) * history_stride
    for start in range(0, num_tokens, BLOCK):
        at = start + lanes
        token = tl.load(source + at, mask=at < num_tokens, other=-1)
        known = (token >= 0) & (token < counts_width)
        tl.atomic_or(target + token, IN_PROMPT, mask=known & (at < prompt_len))
        tl.atomic_add(target + token, 1, mask=known & (at >= prompt_len))


def count_tokens(rows: torch.Tensor, state: RowTensors) -> None:
    """Fill ``counts`` of rows that enter, from their history. rows: [N] int32, distinct."""
    if state.counts is None:
        raise ValueError("counts are not allocated")
    _count_kernel[(rows.shape[0],)](
        rows,
        state.columns,
        state.columns.stride(0),
        state.history,
        state.history.stride(0),
        state.counts,
        state.counts.shape[1],
        _COUNT_BLOCK,
        num_warps=8,
    )
