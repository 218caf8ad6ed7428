"""What backends have in common whose attention is torch code and nothing more.

Head norms and rotation go through ``ops``, K and V to their slots, each token's side by side; the
backend itself only attends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from paceline import ops
from paceline.attention.backend import AttentionMetadata, HeadShape
from paceline.ops.cpu_linear import pad_rows


class UnfusedAttention(ABC):
    """An ``AttentionBackend`` that is asked for the attention alone."""

    takes_tables = True

    def attend(
        self,
        qkv: torch.Tensor,
        heads: HeadShape,
        rotary: tuple[torch.Tensor, torch.Tensor],
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """See ``AttentionBackend.attend``; rotary: what ``ops.rotary`` takes."""
        count = metadata.slot_mapping.shape[0]
        rotated = heads.num_heads + heads.num_kv_heads
        fused = qkv[:count].view(count, rotated + heads.num_kv_heads, heads.head_dim)
        query_key = fused[:, :rotated]
        if heads.head_norm is not None:
            query_key = ops.rms_norm(query_key, heads.head_norm, heads.eps)
        query_key = ops.rotary(query_key, *rotary)
        keys = key_cache.view(-1, heads.num_kv_heads, heads.head_dim)
        values = value_cache.view(-1, heads.num_kv_heads, heads.head_dim)
        keys.index_copy_(0, metadata.slot_mapping, query_key[:, heads.num_heads :])
        values.index_copy_(0, metadata.slot_mapping, fused[:, rotated:])
        attended = self.attend_heads(query_key[:, : heads.num_heads], keys, values, heads, metadata)
        attended = attended.reshape(count, heads.num_heads * heads.head_dim)
        rows = qkv.shape[0]
        return pad_rows(attended, rows) if rows > count else attended

    @abstractmethod
    def attend_heads(
        self,
        query: torch.Tensor,  # [N, num_heads, head_dim]
        keys: torch.Tensor,  # [slots, num_kv_heads, head_dim], this pass's tokens among them
        values: torch.Tensor,
        heads: HeadShape,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Attention of every query token, [N, num_heads, head_dim]."""
