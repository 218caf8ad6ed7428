"""Plain torch versions of the fused element-wise operations: they run anywhere and are the oracle.

Faster versions for one device stand beside this file and are tested against it. Nothing here knows
of layers, sequences or caches. Big temporaries are avoided (in-place steps), because on a CPU a
fresh allocation of megabytes costs more than the arithmetic.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square normalisation over the last dimension, statistics in float32.

    x: [..., D] any float dtype; weight: [D], or any shape that broadcasts against x (one weight a
    head). Returns a new tensor like x. (Zhang and Sennrich, "Root Mean Square Layer Normalization",
    2019.)
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.addcmul(_scalar(eps, x.device), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    # Computed in float32, rounded once, then scaled by the weight in x's dtype, as models do.
    return torch.mul(x, scale, out=torch.empty_like(x)).mul_(weight)


@functools.lru_cache
def _scalar(value: float, device: torch.device) -> torch.Tensor:
    """A float32 scalar on the device, made once."""
    return torch.tensor(value, dtype=torch.float32, device=device)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to the residual stream (in place) and normalise the sum.

    x, residual: [N, D] of one dtype; weight: [D]. Returns (normed, residual).
    """
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def rotary(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head's halves against each other by its token's angles.

    x: [N, heads, D] with D even; cos: [N, 1, D] (both halves alike); signed_sin: [N, 1, D], its
    first half negated, so that the rotation is one roll and one multiply-add. Returns a new tensor
    like x. (Su et al., "RoFormer", 2021, in the half-split layout of Llama checkpoints.)
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half times the second half. gate_up: [N, 2 * I]; returns [N, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
