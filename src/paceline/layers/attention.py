"""The attention block of a decoder layer: fused q, k, v; head norms; rotary; output product.

How K and V are stored and read is the backend's business.
"""

from __future__ import annotations

import torch
from torch import nn

from paceline import ops
from paceline.attention.backend import AttentionBackend, AttentionMetadata
from paceline.config import ModelArch
from paceline.distributed.tp_group import TPGroup, divide
from paceline.layers.linear import Linear
from paceline.layers.shard import WeightTarget, empty_parameter


class Attention(nn.Module):
    """Grouped-query self-attention over paged KV (Ainslie et al., "GQA", 2023)."""

    def __init__(
        self,
        arch: ModelArch,
        layer: int,
        backend: AttentionBackend,
        tp: TPGroup,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.backend = backend
        self.num_heads = divide(arch.num_attention_heads, tp, "num_attention_heads")
        self.num_kv_heads = divide(arch.num_kv_heads, tp, "num_key_value_heads")
        self.head_dim = arch.head_dim
        self.scale = arch.head_dim**-0.5
        self.sliding_window = arch.sliding_window[layer]
        self.eps = arch.rms_norm_eps
        query = arch.num_attention_heads * arch.head_dim
        kv = arch.num_kv_heads * arch.head_dim
        self.qkv = Linear(
            arch.hidden_size,
            (query, kv, kv),
            split="out",
            bias=arch.qkv_bias,
            tp=tp,
            dtype=dtype,
            device=device,
        )
        self.output = Linear(
            query,
            (arch.hidden_size,),
            split="in",
            bias=arch.o_bias,
            tp=tp,
            dtype=dtype,
            device=device,
        )
        # q and k heads are normalised in one go: each carries its copy of q's or k's weight.
        self.head_norm = (
            empty_parameter(
                self.num_heads + self.num_kv_heads, arch.head_dim, dtype=dtype, device=device
            )
            if arch.qk_norm
            else None
        )

    def targets(self) -> dict[str, WeightTarget]:
        """Checkpoint names below ``self_attn.`` and where they go."""
        found = {}
        for name, linear, part in (
            ("q_proj", self.qkv, 0),
            ("k_proj", self.qkv, 1),
            ("v_proj", self.qkv, 2),
            ("o_proj", self.output, 0),
        ):
            found.update({f"{name}.{leaf}": t for leaf, t in linear.targets(part).items()})
        if self.head_norm is not None:
            found["q_norm.weight"] = WeightTarget(self.head_norm[: self.num_heads])
            found["k_norm.weight"] = WeightTarget(self.head_norm[self.num_heads :])
        return found

    def forward(
        self,
        x: torch.Tensor,  # [N, hidden]
        cos: torch.Tensor,  # [N, 1, head_dim]
        signed_sin: torch.Tensor,  # [N, 1, head_dim]
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Attend; writes this pass's K and V to the cache. Returns [N, hidden]."""
        rotated = self.num_heads + self.num_kv_heads
        fused: torch.Tensor = self.qkv(x)
        heads = fused.view(x.shape[0], rotated + self.num_kv_heads, self.head_dim)
        query_key = heads[:, :rotated]
        if self.head_norm is not None:
            query_key = ops.rms_norm(query_key, self.head_norm, self.eps)
        query_key = ops.rotary(query_key, cos, signed_sin)
        attended = self.backend.forward(
            query_key[:, : self.num_heads],
            query_key[:, self.num_heads :],
            heads[:, rotated:],
            kv_cache[0],
            kv_cache[1],
            metadata,
            self.scale,
            self.sliding_window,
        )
        out: torch.Tensor = self.output(attended.reshape(x.shape[0], -1))
        return out
