"""Attention on a GPU: Triton kernels over paged KV, for decode passes and for prefill passes.

A decode pass takes positions, slots and lengths from the rows on the device (``DecodeMetadata``),
so that a captured graph serves any lengths; a prefill pass takes them from ``AttentionMetadata``.
Under Triton's interpreter it runs on CPU tensors too, slowly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from paceline.attention.backend import AttentionMetadata, HeadShape
from paceline.attention.triton_decode import paged_decode_attention
from paceline.attention.triton_prefill import paged_prefill_attention
from paceline.ops.triton import rotary_kv_decode, rotary_kv_prefill


@dataclass(slots=True)
class DecodeMetadata:
    """A pass of ``query_len`` tokens an entry, the first at ``num_tokens[row] + offset``."""

    rows: torch.Tensor  # [B] int32
    num_tokens: torch.Tensor  # [R + 1] int32 committed tokens of each row
    active: torch.Tensor  # [R + 1] int32: rows that are not are computed for nothing
    block_table: torch.Tensor  # [R + 1, max_blocks] int32
    query_len: int
    offset: int
    num_splits: int  # parts of a row's keys, see ``num_splits_for``
    workspace: torch.Tensor | None  # float32 scratch, see ``workspace_size``
    prepared: Any = ()


class TritonAttention:
    """See the file's docstring."""

    name = "triton"
    takes_tables = False

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Nothing is shared between layers."""
        metadata.prepared = ()

    def attend(
        self,
        qkv: torch.Tensor,
        heads: HeadShape,
        rotary: tuple[torch.Tensor, torch.Tensor],
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata | DecodeMetadata,
    ) -> torch.Tensor:
        """See ``AttentionBackend.attend``; rotary is (frequencies [D / 2], positions [N]).

        A decode pass does not read the positions.
        """
        frequencies, positions = rotary
        weight, eps = heads.head_norm, heads.eps
        if isinstance(metadata, DecodeMetadata):
            rows = (metadata.rows, metadata.num_tokens, metadata.active, metadata.block_table)
            query_len, offset = metadata.query_len, metadata.offset
            query = rotary_kv_decode(
                qkv,
                key_cache,
                value_cache,
                frequencies,
                weight,
                eps,
                *rows,
                query_len=query_len,
                offset=offset,
            )
            out = paged_decode_attention(
                query,
                key_cache,
                value_cache,
                *rows,
                query_len=query_len,
                offset=offset,
                scale=heads.scale,
                sliding_window=heads.sliding_window,
                num_splits=metadata.num_splits,
                workspace=metadata.workspace,
            )
        else:
            query = rotary_kv_prefill(
                qkv[: metadata.slot_mapping.shape[0]],
                key_cache,
                value_cache,
                frequencies,
                weight,
                eps,
                positions,
                metadata.slot_mapping,
            )
            out = paged_prefill_attention(
                query,
                key_cache,
                value_cache,
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.block_table,
                max_query_len=metadata.max_query_len,
                scale=heads.scale,
                sliding_window=heads.sliding_window,
            )
        attended = out.flatten(1)
        padding = qkv.shape[0] - attended.shape[0]
        return F.pad(attended, (0, 0, 0, padding)) if padding else attended
