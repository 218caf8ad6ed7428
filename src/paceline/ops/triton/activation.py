# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""The gate of the feed-forward block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # values a program: 8 a thread


@triton.jit
def _silu_mul_kernel(gate_up, out, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    dims = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < SIZE
    source = gate_up + row * stride + dims
    gate = tl.load(source, mask=inside, other=0.0)
    up = tl.load(source + SIZE, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)  # rounded, as in ops.reference
    product = (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(out + row * SIZE + dims, product, mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half times the second half.

    gate_up: [N, 2 * I] with rows contiguous; returns a new [N, I].
    """
    rows, width = gate_up.shape
    size = width // 2
    out = gate_up.new_empty(rows, size)
    grid = (triton.cdiv(size, _BLOCK), rows)
    _silu_mul_kernel[grid](
        gate_up, out, gate_up.stride(0), size, _BLOCK, num_warps=4, enable_fp_fusion=True
    )
    return out
