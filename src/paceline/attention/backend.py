"""The attention seam: metadata, and what a backend must do.

A pass computes N query tokens of S sequences over paged KV. Sequence s owns query tokens
``query_start_loc[s]:query_start_loc[s + 1]``; the last of them sits at position ``seq_lens[s] -
1``, so a query token's position is known from these and it attends to all positions up to its own
(within the layer's window). K and V of the pass are written to their slots before anything reads
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(slots=True)
class AttentionMetadata:
    """One pass, built once and read by every layer; all tensors on the model's device."""

    query_start_loc: torch.Tensor  # [S + 1] int32
    seq_lens: torch.Tensor  # [S] int32: KV tokens of each sequence after this pass
    block_table: torch.Tensor  # [S, >= ceil(max_seq_len / block_size)] int32
    slot_mapping: torch.Tensor  # [N] int64: block id * block_size + offset; block 0 is never read
    block_size: int
    query_lens: list[int]  # [S] host copy
    seq_lens_list: list[int]  # [S] host copy
    prepared: Any = None  # what the backend derived in ``prepare``

    @property
    def max_query_len(self) -> int:
        return max(self.query_lens)

    @property
    def max_seq_len(self) -> int:
        return max(self.seq_lens_list)


class AttentionBackend(Protocol):
    """Chosen at start-up; stateless between passes."""

    name: str

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Derive what every layer of this pass shares into ``metadata.prepared``."""

    def forward(
        self,
        query: torch.Tensor,  # [N, num_heads, head_dim]
        key: torch.Tensor,  # [N, num_kv_heads, head_dim]
        value: torch.Tensor,  # [N, num_kv_heads, head_dim]
        key_cache: torch.Tensor,  # [num_blocks + 1, block_size, num_kv_heads, head_dim]
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Write K and V to their slots, then attend. Returns [N, num_heads, head_dim]."""
