"""The gated feed-forward block: one fused product up, one down."""

from __future__ import annotations

import torch

from paceline import ops
from paceline.config import ModelArch
from paceline.distributed.tp_group import TPGroup
from paceline.layers.layer import Layer
from paceline.layers.linear import Linear
from paceline.layers.shard import WeightTarget


class GatedMLP(Layer):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(
        self, arch: ModelArch, tp: TPGroup, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        hidden, inner, bias = arch.hidden_size, arch.intermediate_size, arch.mlp_bias
        self.gate_up = Linear(
            hidden, (inner, inner), split="out", bias=bias, tp=tp, dtype=dtype, device=device
        )
        self.down = Linear(
            inner, (hidden,), split="in", bias=bias, tp=tp, dtype=dtype, device=device
        )

    def targets(self) -> dict[str, WeightTarget]:
        """Checkpoint names below ``mlp.`` and where they go."""
        found = {}
        for name, linear, part in (
            ("gate_proj", self.gate_up, 0),
            ("up_proj", self.gate_up, 1),
            ("down_proj", self.down, 0),
        ):
            found.update({f"{name}.{leaf}": t for leaf, t in linear.targets(part).items()})
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, hidden] -> [N, hidden]."""
        out: torch.Tensor = self.down(ops.silu_mul(self.gate_up(x)))
        return out
