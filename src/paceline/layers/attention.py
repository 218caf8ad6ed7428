"""The attention block of a decoder layer: the products around an attention backend.

Everything between them, head norms and rotation included, is the backend's business.
"""

from __future__ import annotations

import torch

from paceline.attention.backend import AttentionBackend, AttentionMetadata, HeadShape
from paceline.config import ModelArch
from paceline.distributed.tp_group import TPGroup, divide
from paceline.layers.layer import Layer
from paceline.layers.linear import Linear
from paceline.layers.shard import WeightTarget, empty_parameter


class Attention(Layer):
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
        num_heads = divide(arch.num_attention_heads, tp, "num_attention_heads")
        num_kv_heads = divide(arch.num_kv_heads, tp, "num_key_value_heads")
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
            empty_parameter(num_heads + num_kv_heads, arch.head_dim, dtype=dtype, device=device)
            if arch.qk_norm
            else None
        )
        self.heads = HeadShape(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=arch.head_dim,
            scale=arch.head_dim**-0.5,
            sliding_window=arch.sliding_window[layer],
            head_norm=self.head_norm,
            eps=arch.rms_norm_eps,
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
            found["q_norm.weight"] = WeightTarget(self.head_norm[: self.heads.num_heads])
            found["k_norm.weight"] = WeightTarget(self.head_norm[self.heads.num_heads :])
        return found

    def forward(
        self,
        x: torch.Tensor,  # [N or more, hidden]; what is beyond the pass's N tokens is padding
        rotary: tuple[torch.Tensor, torch.Tensor],
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Attend; writes this pass's K and V to the cache. Returns a tensor like x."""
        attended = self.backend.attend(
            self.qkv(x), self.heads, rotary, kv_cache[0], kv_cache[1], metadata
        )
        out: torch.Tensor = self.output(attended)
        return out
