# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""From the fused q, k, v product to rotated queries and cached K and V, in one pass over it.

Optional RMS norms of the q and k heads, rotary in the half-split layout of Llama checkpoints, K and
V straight to their slots. Everything after the norm is float32 and rounded once. Cosines and sines
are computed where they are used: a table would be one more dependent load, and as large as many
prompts' KV.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.ops.triton.rows import token_row, token_slot

_HEADS = 8  # heads a program


@triton.jit
def _normalise(low, high, weight, places, valid, eps, HEAD_DIM: tl.constexpr):
    """RMS norm of heads given as two halves, rounded where ``ops.reference`` rounds."""
    first, second = low.to(tl.float32), high.to(tl.float32)
    squares = tl.sum(first * first + second * second, 1)
    scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    low_weight = tl.load(weight + places, mask=valid, other=0.0).to(tl.float32)
    high_weight = tl.load(weight + places + HEAD_DIM // 2, mask=valid, other=0.0).to(tl.float32)
    first = (first * scale).to(low.dtype).to(tl.float32) * low_weight
    second = (second * scale).to(low.dtype).to(tl.float32) * high_weight
    return first.to(low.dtype), second.to(low.dtype)


@triton.jit
def _rotate_and_store(
    qkv,
    out,
    key_cache,
    value_cache,
    frequencies,
    head_norm,
    token,
    position,
    slot,
    stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Some of one token's heads: q to ``out``, k and v to ``slot`` of the caches."""
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
    dims = tl.arange(0, HALF)[None, :]  # [1, HALF], HALF >= HEAD_DIM / 2
    in_half = dims < HEAD_DIM // 2
    valid = (heads < NUM_HEADS + 2 * NUM_KV_HEADS) & in_half
    places = heads * HEAD_DIM + dims
    source = qkv + token * stride + places
    low = tl.load(source, mask=valid, other=0.0)
    high = tl.load(source + HEAD_DIM // 2, mask=valid, other=0.0)
    is_query = (heads < NUM_HEADS) & in_half
    is_key = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS) & in_half
    is_value = (heads >= NUM_HEADS + NUM_KV_HEADS) & valid
    normed_low, normed_high = low, high
    if head_norm is not None:
        normed_low, normed_high = _normalise(
            low, high, head_norm, places, is_query | is_key, eps, HEAD_DIM
        )
    angle = position.to(tl.float32) * tl.load(frequencies + dims, mask=in_half, other=0.0)
    cos, sin = tl.cos(angle), tl.sin(angle)
    first, second = normed_low.to(tl.float32), normed_high.to(tl.float32)
    turned_low = (first * cos - second * sin).to(low.dtype)
    turned_high = (second * cos + first * sin).to(low.dtype)
    target = out + token * (NUM_HEADS * HEAD_DIM) + places
    tl.store(target, turned_low, mask=is_query)
    tl.store(target + HEAD_DIM // 2, turned_high, mask=is_query)
    place = slot * (NUM_KV_HEADS * HEAD_DIM) + places
    target = key_cache + place - NUM_HEADS * HEAD_DIM
    tl.store(target, turned_low, mask=is_key)
    tl.store(target + HEAD_DIM // 2, turned_high, mask=is_key)
    target = value_cache + place - (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM
    tl.store(target, low, mask=is_value)
    tl.store(target + HEAD_DIM // 2, high, mask=is_value)


@triton.jit(do_not_specialize=["table_stride", "max_blocks", "offset"])
def _decode_kernel(
    qkv,
    out,
    key_cache,
    value_cache,
    frequencies,
    head_norm,
    rows,
    num_tokens,
    active,
    block_table,
    table_stride,
    max_blocks,
    offset,
    stride,
    eps,
    QUERY_LEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0)
    row, position = token_row(token, rows, num_tokens, offset, QUERY_LEN)
    slot = token_slot(row, position, active, block_table, table_stride, max_blocks, BLOCK_SIZE)
    _rotate_and_store(
        qkv,
        out,
        key_cache,
        value_cache,
        frequencies,
        head_norm,
        token.to(tl.int64),
        tl.maximum(position, 0),
        slot,
        stride,
        eps,
        NUM_HEADS,
        NUM_KV_HEADS,
        HEAD_DIM,
        HEADS,
        HALF,
    )


@triton.jit
def _prefill_kernel(
    qkv,
    out,
    key_cache,
    value_cache,
    frequencies,
    head_norm,
    positions,
    slot_mapping,
    stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0)
    _rotate_and_store(
        qkv,
        out,
        key_cache,
        value_cache,
        frequencies,
        head_norm,
        token.to(tl.int64),
        tl.load(positions + token),
        tl.load(slot_mapping + token).to(tl.int64),
        stride,
        eps,
        NUM_HEADS,
        NUM_KV_HEADS,
        HEAD_DIM,
        HEADS,
        HALF,
    )


def rotary_kv_decode(
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    frequencies: torch.Tensor,
    head_norm: torch.Tensor | None,
    eps: float,
    rows: torch.Tensor,
    num_tokens: torch.Tensor,
    active: torch.Tensor,
    block_table: torch.Tensor,
    *,
    query_len: int,
    offset: int,
) -> torch.Tensor:
    """Norm, rotate and cache a decode pass whose tokens stand where their rows say.

    qkv: [B * query_len, (heads + 2 * kv_heads) * D], rows contiguous; key_cache, value_cache:
    [num_blocks + 1, block_size, kv_heads, D] contiguous; frequencies: [D / 2] float32, angle per
    position; head_norm: [heads + kv_heads, D], one weight a q and k head, or None; rows: [B] int32;
    num_tokens, active: [R] int32; block_table: [R, max_blocks] int32. Positions and slots as in
    ``rows``. Returns the queries, [B * query_len, heads, D].
    """
    out, sizes = _outputs(qkv, key_cache)
    _decode_kernel[_grid(qkv, key_cache)](
        qkv,
        out,
        key_cache,
        value_cache,
        frequencies,
        head_norm,
        rows,
        num_tokens,
        active,
        block_table,
        block_table.stride(0),
        block_table.shape[1],
        offset,
        qkv.stride(0),
        eps,
        query_len,
        key_cache.shape[1],
        *sizes,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out


def rotary_kv_prefill(
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    frequencies: torch.Tensor,
    head_norm: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Norm, rotate and cache a pass whose positions and slots are given.

    positions: [N] int32 or int64; slot_mapping: [N] int64; the rest as in ``rotary_kv_decode``.
    Returns the queries, [N, heads, D].
    """
    out, sizes = _outputs(qkv, key_cache)
    _prefill_kernel[_grid(qkv, key_cache)](
        qkv,
        out,
        key_cache,
        value_cache,
        frequencies,
        head_norm,
        positions,
        slot_mapping,
        qkv.stride(0),
        eps,
        *sizes,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out


def _outputs(
    qkv: torch.Tensor, key_cache: torch.Tensor
) -> tuple[torch.Tensor, tuple[int, int, int, int, int]]:
    """The empty queries, and the kernels' last five arguments."""
    num_kv_heads, head_dim = key_cache.shape[2:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    half = triton.next_power_of_2(head_dim // 2)
    out = qkv.new_empty(qkv.shape[0], num_heads, head_dim)
    return out, (num_heads, num_kv_heads, head_dim, _HEADS, half)


def _grid(qkv: torch.Tensor, key_cache: torch.Tensor) -> tuple[int, int]:
    return qkv.shape[0], triton.cdiv(qkv.shape[1] // key_cache.shape[3], _HEADS)
