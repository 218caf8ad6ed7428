# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""RMS normalisation, with or without adding to the residual stream first: one program a row.

A row is read once and kept in registers. Values are rounded where ``ops.reference`` rounds them:
the residual sum, the normalised value, and its product with the weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    inside = dims < SIZE
    scales = tl.load(weight + dims, mask=inside, other=0.0)
    value = tl.load(x + row * x_stride + dims, mask=inside, other=0.0)
    if residual is not None:
        stream = residual + row * residual_stride + dims
        before = tl.load(stream, mask=inside, other=0.0)
        value = (value.to(tl.float32) + before.to(tl.float32)).to(value.dtype)
        tl.store(stream, value, mask=inside)
    wide = value.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = normed.to(value.dtype).to(tl.float32) * scales.to(tl.float32)
    tl.store(out + row * SIZE + dims, normed.to(value.dtype), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square normalisation over the last dimension, statistics in float32.

    x: [..., D], its last dimension contiguous, any float dtype; weight: [D]. Returns a new tensor.
    """
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    _launch(rows, None, weight, out, eps)
    return out.view(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to the residual stream (in place) and normalise the sum.

    x, residual: [N, D] of one dtype, last dimension contiguous; weight: [D]. Returns (normed,
    residual).
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, residual, weight, out, eps)
    return out, residual


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
) -> None:
    size = x.shape[1]
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(x.shape[0],)](
        x,
        residual,
        weight,
        out,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        size,
        block,
        num_warps=min(max(block // 256, 1), 8),  # 8 values a thread are one load
        enable_fp_fusion=True,
    )
