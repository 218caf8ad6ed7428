"""Attention on a CPU by the compiled kernels: one call a layer, between two matrix products.

Queries read K and V where they lie, so nothing is gathered, padded or masked in memory, and any mix
of query lengths is the same code. A token's result is the same bits alone, in a batch, decoded,
verified or prefilled. Within a block K lies transposed (see ``ops/native/kernels.c``).
"""

from __future__ import annotations

import torch

from paceline.attention.backend import AttentionMetadata, HeadShape
from paceline.ops.native import Heads, NativeKernels


class NativeAttention:
    """See the file's docstring. Keeps what it derived from each layer's shape, and no more."""

    name = "cpu-native"
    takes_tables = True

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels
        self._layers: dict[HeadShape, Heads] = {}

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Cut the pass into tiles of query tokens."""
        metadata.prepared = self._kernels.plan_pass(
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            metadata.slot_mapping,
            metadata.block_size,
        )

    def attend(
        self,
        qkv: torch.Tensor,
        heads: HeadShape,
        rotary: tuple[torch.Tensor, torch.Tensor],
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """See ``AttentionBackend.attend``; all tensors contiguous and of one dtype."""
        layer = self._layers.get(heads)
        if layer is None:
            layer = self._layers[heads] = self._kernels.describe_heads(
                (heads.num_heads, heads.num_kv_heads, heads.head_dim),
                heads.scale,
                heads.sliding_window,
                heads.head_norm,
                heads.eps,
                qkv.dtype,
            )
        caches = (key_cache, value_cache)
        return self._kernels.attend(layer, metadata.prepared, qkv, rotary, caches)
