"""Rotary position angles: frequencies once a model, cosines and sines once a pass.

Understands the default, linear and llama3 rope types; ``models.hf_config`` has refused any other.
"""

from __future__ import annotations

import math

import torch

from paceline.config import ModelArch
from paceline.layers.layer import Layer


def inverse_frequencies(arch: ModelArch) -> torch.Tensor:
    """Angle per position of each rotated pair, [head_dim / 2] float32.

    llama3 scaling keeps short wavelengths, divides long ones by ``factor`` and blends in between
    (Llama 3.1 model card and reference configuration).
    """
    exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.float32) / arch.head_dim
    frequencies: torch.Tensor = torch.pow(arch.rope_theta, exponents).reciprocal()
    scaling = arch.rope_scaling
    if scaling is None:
        return frequencies
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return frequencies.div(factor)
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 1: as trained, 0: stretched by factor
    return frequencies.mul(kept + (1.0 - kept) / factor)


class RotaryEmbedding(Layer):
    """Positions to the two tables that ``ops.rotary`` takes."""

    def __init__(self, arch: ModelArch, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.dtype = dtype
        half = inverse_frequencies(arch)
        self.frequencies = half.to(device)  # [head_dim / 2]
        self.both_halves = torch.cat((half, half)).to(device)
        self.sign = torch.cat((-torch.ones_like(half), torch.ones_like(half))).to(device)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: [N] int64 -> (cos, signed_sin), each [N, 1, head_dim]; angles in float32."""
        angles = (positions[:, None].float() * self.both_halves).unsqueeze(1)  # [N, 1, head_dim]
        return angles.cos().to(self.dtype), angles.sin().mul_(self.sign).to(self.dtype)
