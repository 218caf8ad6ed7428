# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Prompt lookup on the device: ``spec/ngram.py`` for all rows of a batch in one launch.

One program does a row. Every earlier end of an n-gram gets a number by which the best one is the
largest: first how many of the last tokens it matches, then whether k tokens follow it, then the
later one of those where they do and the earlier one of those where they do not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.sample.triton.row_tensors import (
    ACTIVE,
    MAX_TOTAL,
    NUM_TOKENS,
    RowTensors,
    column_of,
)

_BLOCK = 2048  # tokens looked at together
_WARPS = 16
_PLACE_BITS = tl.constexpr(32)  # of a position in the number that ranks an end


@triton.jit
def _lookup_kernel(
    rows,
    wanted,
    num_drafts,
    columns,
    column_stride,
    history,
    history_stride,
    lookup_max,
    lookup_min,
    BLOCK: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    entry = tl.program_id(0)
    row = tl.load(rows + entry)
    length = column_of(columns, column_stride, row, NUM_TOKENS)
    tokens = history + row.to(tl.int64) * history_stride
    # As many as are wanted, and as the row may still commit before its own sample.
    k = tl.minimum(
        tl.load(wanted + entry), column_of(columns, column_stride, row, MAX_TOTAL) - length - 1
    )
    if (k <= 0) | (column_of(columns, column_stride, row, ACTIVE) == 0):
        tl.store(num_drafts + entry, 0)
        return
    lanes = tl.arange(0, BLOCK)
    ranks = tl.full([BLOCK], -1, tl.int64)
    longest = tl.minimum(lookup_max, length - 1)
    for start in range(0, length - 1, BLOCK):
        ends = start + lanes
        alive = ends < length - 1
        matched = tl.zeros([BLOCK], tl.int32)
        for back in range(longest):
            alive &= ends >= back
            token = tl.load(tokens + ends - back, mask=alive, other=-1)
            alive &= token == tl.load(tokens + length - 1 - back)
            matched += alive.to(tl.int32)
        full = ends + k < length
        place = tl.where(full, ends, length - ends) + tl.where(full, 1 << 30, 0)
        rank = (matched.to(tl.int64) << _PLACE_BITS) | place.to(tl.int64)
        ranks = tl.maximum(ranks, tl.where(matched >= lookup_min, rank, -1))
    best = tl.max(ranks, 0)
    place = (best & ((1 << 30) - 1)).to(tl.int32)
    after = tl.where(best & (1 << 30) != 0, place, length - place) + 1
    count = tl.where(best >= 0, tl.minimum(k, length - after), 0)
    offsets = tl.arange(0, DRAFTS)
    drafts = tl.load(tokens + after + offsets, mask=offsets < count, other=0)
    tl.store(tokens + length + offsets, drafts, mask=offsets < count)
    tl.store(num_drafts + entry, count)


def lookup_drafts(
    rows: torch.Tensor,
    wanted: torch.Tensor,
    num_drafts: torch.Tensor,
    state: RowTensors,
    *,
    max_k: int,
    lookup_max: int,
    lookup_min: int,
) -> None:
    """Write what ``find_continuation`` finds behind each row's committed tokens.

    Args:
        rows: [B] int32.
        wanted: [B] int32 drafts to look for, each at most max_k. A row that has room for fewer
            before ``max_total`` looks for fewer; an inactive one for none.
        num_drafts: [B] int32, gets the number written; may be ``wanted`` itself.
        lookup_max, lookup_min: n-gram sizes, 1 <= lookup_min <= lookup_max.
    """
    _lookup_kernel[(rows.shape[0],)](
        rows,
        wanted,
        num_drafts,
        state.columns,
        state.columns.stride(0),
        state.history,
        state.history.stride(0),
        lookup_max,
        lookup_min,
        _BLOCK,
        triton.next_power_of_2(max(max_k, 1)),
        num_warps=_WARPS,
    )
