"""RMSNorm with its weight; the arithmetic is in ``ops``."""

from __future__ import annotations

import torch

from paceline import ops
from paceline.layers.layer import Layer
from paceline.layers.shard import WeightTarget, empty_parameter


class RMSNorm(Layer):
    """Normalises the last dimension of [N, size], with or without adding to the residual first."""

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size, dtype=dtype, device=device)

    def target(self) -> WeightTarget:
        """Where the checkpoint's weight goes."""
        return WeightTarget(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, size] -> normed, a new tensor."""
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x to residual in place; returns (normed sum, residual)."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)
