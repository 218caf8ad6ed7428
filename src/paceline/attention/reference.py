"""Attention as the formula says, one sequence and one query token at a time, in float32.

The oracle that faster backends are tested against; runs on any device, and slowly.
"""

from __future__ import annotations

import torch

from paceline.attention.backend import AttentionMetadata


class ReferenceAttention:
    """``softmax(q K^T * scale) V`` over each sequence's own slots and nothing else."""

    name = "reference"

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Nothing is shared between layers."""
        metadata.prepared = ()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        keys = key_cache.view(-1, *key_cache.shape[2:])  # [slots, kv_heads, head_dim]
        values = value_cache.view(-1, *value_cache.shape[2:])
        keys[metadata.slot_mapping] = key
        values[metadata.slot_mapping] = value
        group = query.shape[1] // key.shape[1]
        out = torch.zeros_like(query)
        token = 0
        for sequence, query_len in enumerate(metadata.query_lens):
            length = metadata.seq_lens_list[sequence]
            for position in range(length - query_len, length):
                first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
                seen = torch.arange(first, position + 1, device=query.device)
                blocks = metadata.block_table[sequence].long()[seen // metadata.block_size]
                slots = blocks * metadata.block_size + seen % metadata.block_size
                k = keys[slots].float().repeat_interleave(group, dim=1)  # [seen, heads, head_dim]
                v = values[slots].float().repeat_interleave(group, dim=1)
                scores = torch.einsum("hd,shd->hs", query[token].float(), k) * scale
                out[token] = torch.einsum("hs,shd->hd", scores.softmax(dim=-1), v).to(out.dtype)
                token += 1
        return out
