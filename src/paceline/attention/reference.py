"""Attention as the formula says, one sequence and one query token at a time, in float32.

The oracle that faster backends are tested against; runs on any device, and slowly.
"""

from __future__ import annotations

import torch

from paceline.attention.backend import AttentionMetadata, HeadShape
from paceline.attention.unfused import UnfusedAttention


class ReferenceAttention(UnfusedAttention):
    """``softmax(q K^T * scale) V`` over each sequence's own slots and nothing else."""

    name = "reference"

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Nothing is shared between layers."""
        metadata.prepared = ()

    def attend_heads(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        heads: HeadShape,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """See ``UnfusedAttention.attend_heads``."""
        group = query.shape[1] // keys.shape[1]
        window = heads.sliding_window
        out = torch.zeros_like(query)
        token = 0
        for sequence, query_len in enumerate(metadata.query_lens):
            length = metadata.seq_lens_list[sequence]
            for position in range(length - query_len, length):
                first = 0 if window is None else max(0, position - window + 1)
                seen = torch.arange(first, position + 1, device=query.device)
                blocks = metadata.block_table[sequence].long()[seen // metadata.block_size]
                slots = blocks * metadata.block_size + seen % metadata.block_size
                k = keys[slots].float().repeat_interleave(group, dim=1)  # [seen, heads, head_dim]
                v = values[slots].float().repeat_interleave(group, dim=1)
                scores = torch.einsum("hd,shd->hs", query[token].float(), k) * heads.scale
                out[token] = torch.einsum("hs,shd->hd", scores.softmax(dim=-1), v).to(out.dtype)
                token += 1
        return out
