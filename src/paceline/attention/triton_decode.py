# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Attention of a decode pass: few query tokens a row, keys split among programs.

Each split of a row's keys goes to a program of its own, and a second kernel weighs their results
("Flash-Decoding", Dao et al., 2023). The grid knows batch size, query length and number of splits,
and no lengths: programs read those from the rows, so a captured graph serves contexts of any
length. What comes out for a row depends on its own length and that number, never on other rows.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from paceline.ops.triton.attend import (
    Tile,
    attend,
    load_queries,
    no_keys_yet,
    padded_dims,
    weighted_mean,
)
from paceline.ops.triton.card import Card, card_of

_MAX_ROWS = 128  # query tokens times heads of a group in one program
_KEYS = 64  # keys of a tile; a split is a whole number of tiles


def num_splits_for(batch: int, num_kv_heads: int, num_sms: int, max_model_len: int) -> int:
    """How many programs share the keys of a KV head: enough that two are on each multiprocessor.

    A power of two, and no more than the tiles of the longest context.
    """
    wanted = min(2 * num_sms // (batch * num_kv_heads), 32, max_model_len // _KEYS)
    return 1 << max(wanted, 1).bit_length() - 1


def workspace_size(num_tokens: int, num_heads: int, head_dim: int, num_splits: int) -> int:
    """float32 values that ``paged_decode_attention`` needs for that many query tokens."""
    return num_tokens * num_heads * num_splits * (head_dim + 1) if num_splits > 1 else 0


def decode_tile(rows: int, head_dim: int, itemsize: int, card: Card, programs: int) -> Tile:
    """The tile for ``rows`` query tokens times heads of a group, in a grid of ``programs``."""
    rows = min(max(triton.next_power_of_2(rows), 16), _MAX_ROWS)
    keys = _KEYS if itemsize == 2 else _KEYS // 2
    # Of many programs more fit a multiprocessor with a stage less: 3 to 5% faster at 256 rows; few
    # are 15% slower with it.
    stages = 2 if programs > 4 * card.num_sms else 3
    return Tile(rows, keys, 4, stages).fit(head_dim, itemsize, card)


@triton.jit
def _row_keys(
    row,
    num_tokens,
    active,
    offset,
    max_keys,
    QUERY_LEN: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The first query's position and the keys [first, end) of a row; none when it is inactive."""
    position = tl.load(num_tokens + row) + offset
    end = tl.maximum(tl.minimum(position + QUERY_LEN, max_keys), 0)
    end = tl.where(tl.load(active + row) != 0, end, 0)
    first = 0
    if WINDOW is not None:
        first = tl.minimum(tl.maximum(position - WINDOW + 1, 0) // KEYS * KEYS, end)
    return position, first, end


@triton.jit(do_not_specialize=["table_stride", "max_keys", "offset"])
def _split_kernel(
    query,
    key_cache,
    value_cache,
    out,
    log_weights,
    rows,
    num_tokens,
    active,
    block_table,
    table_stride,
    max_keys,
    offset,
    scale_log2,
    QUERY_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """One split of a row's keys for one KV head; the only one if there are no ``log_weights``."""
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    entry = tl.program_id(1)
    split = tl.program_id(2)  # slowest, so that programs without keys are launched last
    num_splits = tl.num_programs(2)
    places = tl.program_id(0) // NUM_KV_HEADS * ROWS + tl.arange(0, ROWS)
    valid = places < QUERY_LEN * GROUP
    tokens = entry * QUERY_LEN + places // GROUP
    heads = tokens.to(tl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + places % GROUP
    dims = tl.arange(0, DIMS)
    queries = load_queries(query, valid, heads * HEAD_DIM, dims, HEAD_DIM)
    row = tl.load(rows + entry)
    position, first, end = _row_keys(
        row, num_tokens, active, offset, max_keys, QUERY_LEN, WINDOW, KEYS
    )
    size = tl.cdiv(tl.cdiv(end - first, num_splits), KEYS) * KEYS
    start = tl.minimum(first + split * size, end)
    stop = tl.minimum(start + size, end)
    parts = heads * num_splits + split
    if log_weights is not None and start >= stop:
        tl.store(log_weights + parts, tl.full([ROWS], float("-inf"), tl.float32), mask=valid)
        return
    total, peak, acc = no_keys_yet(ROWS, DIMS)
    total, peak, acc = attend(
        total, peak, acc, queries, tl.maximum(position + places // GROUP, 0),
        key_cache, value_cache, block_table + row.to(tl.int64) * table_stride, kv_head,
        start, stop, stop, scale_log2,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, KEYS, DIMS, True,
    )  # fmt: skip
    result = weighted_mean(total, acc).to(out.dtype.element_ty)
    inside = valid[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out + parts[:, None] * HEAD_DIM + dims[None, :], result, mask=inside)
    if log_weights is not None:
        logs = peak + tl.log2(tl.where(total == 0.0, 1.0, total))
        tl.store(log_weights + parts, logs, mask=valid)


@triton.jit
def _combine_kernel(
    out,
    partial,
    log_weights,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Weigh the splits' results for one head of one token; NUM_SPLITS is a power of two."""
    head = tl.program_id(0).to(tl.int64)
    parts = head * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, DIMS)
    inside = dims < HEAD_DIM
    logs = tl.load(log_weights + parts)
    results = tl.load(
        partial + parts[:, None] * HEAD_DIM + dims[None, :], mask=inside[None, :], other=0.0
    )  # [NUM_SPLITS, DIMS]
    highest = tl.max(logs, 0)
    weights = tl.exp2(logs - tl.where(highest == float("-inf"), 0.0, highest))
    results = tl.where((weights > 0.0)[:, None], results, 0.0)  # of splits without keys: anything
    total = tl.sum(weights, 0)
    result = tl.sum(results * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + head * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=inside)


def paged_decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    rows: torch.Tensor,
    num_tokens: torch.Tensor,
    active: torch.Tensor,
    block_table: torch.Tensor,
    *,
    query_len: int,
    offset: int,
    scale: float,
    sliding_window: int | None,
    num_splits: int,
    workspace: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention of ``query_len`` tokens an entry, the first at ``num_tokens[row] + offset``.

    query: [B * query_len, heads, D] contiguous, entry by entry; key_cache, value_cache:
    [num_blocks + 1, block_size, kv_heads, D] contiguous, the pass's own K and V written; rows: [B]
    int32; num_tokens, active: [R] int32; block_table: [R, max_blocks] int32; num_splits: a power of
    two; workspace: at least ``workspace_size(...)`` float32 values, None when that is 0, free again
    afterwards.

    Inactive rows give zeros and read nothing. A token at a negative position counts as at 0, one
    beyond the block table sees the keys that the table reaches. Returns a new tensor like query.
    """
    tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    dims = padded_dims(head_dim)
    programs = rows.shape[0] * num_kv_heads * num_splits
    card = card_of(query.device)
    tile = decode_tile(query_len * group, head_dim, query.itemsize, card, programs)
    out = torch.empty_like(query)
    partial, log_weights = out, None
    if num_splits > 1:
        assert workspace is not None  # its size is not 0
        partial = workspace
        log_weights = workspace[tokens * num_heads * num_splits * head_dim :]
    query_tiles = triton.cdiv(query_len * group, tile.rows)
    _split_kernel[(query_tiles * num_kv_heads, rows.shape[0], num_splits)](
        query, key_cache, value_cache, partial, log_weights,
        rows, num_tokens, active, block_table, block_table.stride(0),
        block_table.shape[1] * block_size, offset, scale * math.log2(math.e),
        query_len, group, num_kv_heads, head_dim, block_size, sliding_window,
        tile.rows, tile.keys, dims,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
    )  # fmt: skip
    if num_splits > 1:
        _combine_kernel[(tokens * num_heads,)](
            out, partial, log_weights, head_dim, num_splits, dims,
            num_warps=max(1, num_splits // 8), enable_fp_fusion=True,
        )  # fmt: skip
    return out
