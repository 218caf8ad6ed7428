# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Embeddings of a decode pass's tokens, looked up from the rows' token histories."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.ops.triton.rows import token_row

_BLOCK = 1024  # values a program: 8 a thread


@triton.jit(do_not_specialize=["offset"])
def _embed_rows_kernel(
    weight,
    out,
    history,
    rows,
    num_tokens,
    history_stride,
    history_len,
    vocab_rows,
    vocab_start,
    offset,
    QUERY_LEN: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(1)
    row, position = token_row(token, rows, num_tokens, offset, QUERY_LEN)
    position = tl.minimum(tl.maximum(position, 0), history_len - 1)
    index = tl.load(history + row.to(tl.int64) * history_stride + position) - vocab_start
    dims = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < SIZE
    value = tl.zeros([BLOCK], weight.dtype.element_ty)
    if (index >= 0) & (index < vocab_rows):
        value = tl.load(weight + index.to(tl.int64) * SIZE + dims, mask=inside, other=0.0)
    tl.store(out + token.to(tl.int64) * SIZE + dims, value, mask=inside)


def embed_rows(
    history: torch.Tensor,
    rows: torch.Tensor,
    num_tokens: torch.Tensor,
    weight: torch.Tensor,
    *,
    query_len: int,
    offset: int,
    vocab_start: int = 0,
) -> torch.Tensor:
    """Embeddings of ``query_len`` tokens an entry, the first at ``num_tokens[row] + offset``.

    history: [R, L] int32 token ids; rows: [B] int32; num_tokens: [R] int32; weight: [V, hidden]
    contiguous, the embeddings of ids from ``vocab_start`` on (one rank's share). Positions are
    clamped into the history; ids outside the share give zeros. Returns [B * query_len, hidden].
    """
    size = weight.shape[1]
    tokens = rows.shape[0] * query_len
    out = weight.new_empty(tokens, size)
    _embed_rows_kernel[(triton.cdiv(size, _BLOCK), tokens)](
        weight,
        out,
        history,
        rows,
        num_tokens,
        history.stride(0),
        history.shape[1],
        weight.shape[0],
        vocab_start,
        offset,
        query_len,
        size,
        _BLOCK,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out
