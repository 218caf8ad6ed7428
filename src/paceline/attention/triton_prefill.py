# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Attention of prompt chunks over paged KV: flash attention with a causal edge.

(Dao, "FlashAttention-2", 2023.) A program takes a tile of one sequence's query tokens with all
heads of a KV head's group, walks the keys that every query of the tile sees without a mask, and
then the rest with one. Keys of earlier chunks and of cached prefixes lie in the same blocks.
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


def prefill_tile(max_query_len: int, group: int, head_dim: int, itemsize: int, card: Card) -> Tile:
    """The tile for chunks of at most ``max_query_len`` tokens."""
    if itemsize == 4:
        tile = Tile(64, 32, 8, 2)
    else:
        rows = 128 if max_query_len * group > 64 else 64
        tile = Tile(rows, 64, rows // 16, 2 if head_dim >= 128 else 3)  # two programs on an SM
    return tile.fit(head_dim, itemsize, card)


@triton.jit
def _find_sequence(tile, query_start_loc, num_sequences, TOKENS: tl.constexpr, SCAN: tl.constexpr):
    """The sequence a tile belongs to, its first query token, and the tile's first among its own.

    Sequence s owns the tiles from ``query_start_loc[s] // TOKENS + s`` on: at least as many as it
    needs, and the count of all is known without its lengths.
    """
    found = 0
    for base in range(0, num_sequences, SCAN):
        sequences = base + tl.arange(0, SCAN)
        exists = sequences < num_sequences
        starts = tl.load(query_start_loc + sequences, mask=exists, other=0)
        before = exists & (starts // TOKENS + sequences <= tile)
        found += tl.sum(before.to(tl.int32), 0)
    sequence = found - 1
    start = tl.load(query_start_loc + sequence)
    return sequence, start, (tile - start // TOKENS - sequence) * TOKENS


@triton.jit
def _key_ranges(position, TOKENS: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr):
    """Where a tile's keys start, and the range that all its queries see; multiples of KEYS.

    ``position`` is that of the tile's first query.
    """
    low = 0
    everywhere = 0
    edge = (position + 1) // KEYS * KEYS
    if WINDOW is not None:
        low = tl.maximum(position - WINDOW + 1, 0) // KEYS * KEYS
        everywhere = tl.cdiv(tl.maximum(position + TOKENS - WINDOW, 0), KEYS) * KEYS
        everywhere = tl.maximum(everywhere, low)
        edge = tl.maximum(edge, everywhere)
    return low, everywhere, edge


@triton.jit(do_not_specialize=["table_stride", "num_sequences"])
def _prefill_kernel(
    query,
    key_cache,
    value_cache,
    out,
    query_start_loc,
    seq_lens,
    block_table,
    table_stride,
    num_sequences,
    scale_log2,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
):
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest walks of a sequence first
    sequence, start, first = _find_sequence(tile, query_start_loc, num_sequences, TOKENS, 256)
    query_len = tl.load(query_start_loc + sequence + 1) - start
    if first >= query_len:
        return
    position = tl.load(seq_lens + sequence) - query_len + first  # of the tile's first query
    places = tl.arange(0, ROWS)
    tokens = places // GROUP
    valid = (tokens < TOKENS) & (first + tokens < query_len)
    heads = (start + first + tokens).to(tl.int64) * (NUM_KV_HEADS * GROUP)
    heads += kv_head * GROUP + places % GROUP
    dims = tl.arange(0, DIMS)
    queries = load_queries(query, valid, heads * HEAD_DIM, dims, HEAD_DIM)
    positions = position + tokens
    table = block_table + sequence.to(tl.int64) * table_stride
    stop = position + tl.minimum(TOKENS, query_len - first)
    low, everywhere, edge = _key_ranges(position, TOKENS, WINDOW, KEYS)
    total, peak, acc = no_keys_yet(ROWS, DIMS)
    if WINDOW is not None:
        total, peak, acc = attend(
            total, peak, acc, queries, positions, key_cache, value_cache, table, kv_head,
            low, tl.minimum(everywhere, stop), stop, scale_log2,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, KEYS, DIMS, True,
        )  # fmt: skip
    total, peak, acc = attend(
        total, peak, acc, queries, positions, key_cache, value_cache, table, kv_head,
        everywhere, edge, stop, scale_log2,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, KEYS, DIMS, False,
    )  # fmt: skip
    total, peak, acc = attend(
        total, peak, acc, queries, positions, key_cache, value_cache, table, kv_head,
        edge, stop, stop, scale_log2,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, KEYS, DIMS, True,
    )  # fmt: skip
    result = weighted_mean(total, acc).to(out.dtype.element_ty)
    inside = valid[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out + heads[:, None] * HEAD_DIM + dims[None, :], result, mask=inside)


def paged_prefill_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    max_query_len: int,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Causal attention of each sequence's last query tokens over its paged KV.

    query: [N, heads, D] contiguous; key_cache, value_cache: [num_blocks + 1, block_size, kv_heads,
    D] contiguous, the pass's own K and V written; query_start_loc: [S + 1] int32, sequence s owns
    query tokens query_start_loc[s] to query_start_loc[s + 1], at most ``max_query_len``; seq_lens:
    [S] int32, KV tokens after this pass; block_table: [S, >= ceil(longest / block_size)] int32.
    Returns a new tensor like query.
    """
    num_queries, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    tile = prefill_tile(max_query_len, group, head_dim, query.itemsize, card_of(query.device))
    num_sequences = seq_lens.shape[0]
    tiles = num_queries // (tile.rows // group) + num_sequences
    out = torch.empty_like(query)
    _prefill_kernel[(num_kv_heads, tiles)](
        query, key_cache, value_cache, out,
        query_start_loc, seq_lens, block_table, block_table.stride(0), num_sequences,
        scale * math.log2(math.e),
        group, num_kv_heads, head_dim, block_size, sliding_window,
        tile.rows, tile.keys, padded_dims(head_dim),
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out
