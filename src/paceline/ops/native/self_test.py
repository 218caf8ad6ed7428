"""Whether freshly compiled kernels compute what the plain torch operations do. Tiny inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from paceline.ops import reference

if TYPE_CHECKING:
    from paceline.ops.native.library import NativeKernels

_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def wrong_results(kernels: NativeKernels) -> list[str]:
    """Names of the kernels whose results differ from the reference by more than rounding."""
    wrong = []
    for dtype, limit in _LIMITS.items():
        for name, found, expected in _cases(kernels, dtype):
            if not torch.allclose(found.float(), expected.float(), atol=limit, rtol=limit):
                wrong.append(f"{name} ({str(dtype).removeprefix('torch.')})")
    return wrong


def _cases(
    kernels: NativeKernels, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, residual, weight = noise(3, 70), noise(3, 70), noise(70)
    yield "rms_norm", kernels.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6)
    found = kernels.add_rms_norm(x, residual.clone(), weight, 1e-6)
    expected = reference.add_rms_norm(x, residual.clone(), weight, 1e-6)
    yield "add_rms_norm", torch.cat(found), torch.cat(expected)
    yield "silu_mul", kernels.silu_mul(x), reference.silu_mul(x)
    yield "attend", *_attention(kernels, noise(7, 8, 24), noise(7, 1, 24), noise(7, 1, 24))


def _attention(
    kernels: NativeKernels, fused: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Four query heads on two KV heads over a new sequence, against torch's attention."""
    count, _, size = fused.shape
    query_key = reference.rotary(fused[:, :6], cos, sin)
    query, key, value = (
        part.transpose(0, 1).float() for part in (query_key[:, :4], query_key[:, 4:], fused[:, 6:])
    )
    expected = F.scaled_dot_product_attention(
        query[None], key[None], value[None], is_causal=True, scale=0.2, enable_gqa=True
    )[0].transpose(0, 1)
    heads = kernels.describe_heads((4, 2, size), 0.2, None, None, 1e-6, fused.dtype)
    block_size = 4
    table = torch.tensor([[2, 1]], dtype=torch.int32)
    positions = torch.arange(count)
    slots = table[0].long()[positions // block_size] * block_size + positions % block_size
    plan = kernels.plan_pass(
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([count], dtype=torch.int32),
        table,
        slots,
        block_size,
    )
    caches = (fused.new_zeros(3, block_size, 2, size), fused.new_zeros(3, block_size, 2, size))
    found = kernels.attend(heads, plan, fused.reshape(count, -1).clone(), (cos, sin), caches)
    return found, expected.reshape(count, -1)
