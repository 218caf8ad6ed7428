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


@dataclass(frozen=True, slots=True, eq=False)
class HeadShape:
    """What a layer's attention is besides its tensors of a pass; made once a layer.

    Compared by identity, so that a backend can keep what it derives from one.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None
    # [num_heads + num_kv_heads, head_dim]: weights of an RMS norm of each q and k head, or None.
    head_norm: torch.Tensor | None
    eps: float


class AttentionBackend(Protocol):
    """Chosen at start-up; stateless between passes.

    How K and V lie within the blocks of the cache is the backend's own business. Whole blocks may
    be copied by others.
    """

    name: str
    # Whether rotary is (cos, signed_sin) of the pass's tokens, as ``ops.rotary`` takes it; else it
    # is (frequencies [head_dim / 2] float32, positions [N]).
    takes_tables: bool

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Derive what every layer of this pass shares into ``metadata.prepared``."""

    def attend(
        self,
        qkv: torch.Tensor,  # [N or more, (num_heads + 2 * num_kv_heads) * head_dim]
        heads: HeadShape,
        rotary: tuple[torch.Tensor, torch.Tensor],  # see ``takes_tables``
        key_cache: torch.Tensor,  # [num_blocks + 1, block_size, num_kv_heads, head_dim]
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Norm and rotate q and k, write K and V to their slots, attend.

        qkv may be changed. Its rows beyond the pass's N tokens are padding. Returns as many rows,
        [N or more, num_heads * head_dim], zeros for the padding.
        """
