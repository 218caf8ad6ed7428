"""The decoder that all dense families share; ``ModelArch`` says in what they differ.

Computes hidden states and logits of one pass. Knows nothing of requests, sampling or scheduling:
which tokens, at which positions, over which cache blocks, all comes in as tensors. Inference only:
the caller holds ``torch.inference_mode``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.attention.backend import AttentionBackend, AttentionMetadata
from paceline.config import ModelArch
from paceline.distributed.tp_group import TPGroup
from paceline.layers.attention import Attention
from paceline.layers.embedding import OutputHead, VocabEmbedding, VocabMatrix
from paceline.layers.layer import Layer
from paceline.layers.linear import Linear
from paceline.layers.mlp import GatedMLP
from paceline.layers.norm import RMSNorm
from paceline.layers.rotary import RotaryEmbedding
from paceline.layers.shard import WeightTarget
from paceline.ops.cpu_linear import MIN_ROWS, pad_rows

KVCache = tuple[torch.Tensor, torch.Tensor]  # K and V of one layer


class DecoderLayer(Layer):
    """Pre-norm attention and feed-forward on a residual stream."""

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
        self.input_norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, dtype, device)
        self.attention = Attention(arch, layer, backend, tp, dtype, device)
        self.mlp_norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, dtype, device)
        self.mlp = GatedMLP(arch, tp, dtype, device)

    def targets(self) -> dict[str, WeightTarget]:
        """Checkpoint names below ``model.layers.<i>.`` and where they go."""
        found = {
            "input_layernorm.weight": self.input_norm.target(),
            "post_attention_layernorm.weight": self.mlp_norm.target(),
        }
        found.update({f"self_attn.{name}": t for name, t in self.attention.targets().items()})
        found.update({f"mlp.{name}": t for name, t in self.mlp.targets().items()})
        return found

    def forward(
        self,
        hidden: torch.Tensor | None,  # [N, H] what the layer before added; None in the first layer
        residual: torch.Tensor,  # [N, H], changed in place
        rotary: tuple[torch.Tensor, torch.Tensor],  # for the backend
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Returns what is still to be added to ``residual``, [N, H]."""
        if hidden is None:
            normed = self.input_norm(residual)
        else:
            normed, residual = self.input_norm.add(hidden, residual)
        attended = self.attention(normed, rotary, kv_cache, metadata)
        normed, residual = self.mlp_norm.add(attended, residual)
        out: torch.Tensor = self.mlp(normed)
        return out


class DecoderModel(Layer):
    """Embedding, layers, final norm and head, with parameters uninitialised until loaded."""

    def __init__(
        self,
        arch: ModelArch,
        attention: AttentionBackend,
        tp: TPGroup,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Raises ConfigError when the group's size does not divide heads, widths or vocabulary."""
        super().__init__()
        self.arch = arch
        self.backend = attention
        self.min_rows = 1  # shorter passes carry rows of zeros through everything but attention
        self.embedding = VocabEmbedding(arch.vocab_size, arch.hidden_size, tp, dtype, device)
        self.layers = nn.ModuleList(
            DecoderLayer(arch, layer, attention, tp, dtype, device)
            for layer in range(arch.num_layers)
        )
        self.norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, dtype, device)
        self.rotary = RotaryEmbedding(arch, dtype, device)
        matrix: VocabMatrix = self.embedding
        if not arch.tie_word_embeddings:
            matrix = VocabMatrix(arch.vocab_size, arch.hidden_size, tp, dtype, device)
        self.head = OutputHead(matrix, tied=arch.tie_word_embeddings)

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Every checkpoint tensor the model needs and where it goes (before ``pack_weights``)."""
        found = {"model.embed_tokens.weight": self.embedding.target()}
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            found.update({f"model.layers.{index}.{n}": t for n, t in layer.targets().items()})
        found["model.norm.weight"] = self.norm.target()
        head = self.head.target()
        if head is not None:
            found["lm_head.weight"] = head
        return found

    def pack_weights(self) -> int:
        """Bring weights into the layout the device multiplies fastest; returns how many matrices.

        Only some CPUs have one. A tied head is packed beside the embedding's own copy, which costs
        vocab_size * hidden_size more weights.
        """
        packed = 0
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
                packed += module.packed is not None
        self.head.pack()
        if packed:
            self.min_rows = MIN_ROWS
        return packed + (self.head.packed is not None)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[KVCache],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Hidden states after the final norm, [N, H]; K and V of the pass are written to the cache.

        input_ids, positions: [N] int64; kv_caches: one (K, V) a layer; metadata: the same N tokens.
        """
        if metadata.prepared is None:
            self.backend.prepare(metadata)
        count = input_ids.shape[0]
        if count < self.min_rows:
            input_ids = pad_rows(input_ids, self.min_rows)
        rotary = (
            self.rotary(positions)
            if self.backend.takes_tables
            else (self.rotary.frequencies, positions)
        )
        return self.run(self.embedding(input_ids), rotary, kv_caches, metadata)[:count]

    def run(
        self,
        residual: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        kv_caches: list[KVCache],
        metadata: Any,
    ) -> torch.Tensor:
        """``forward`` from embeddings on: residual [N, H], changed; the rest is for the backend."""
        hidden: torch.Tensor | None = None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden = layer(hidden, residual, rotary, kv_cache, metadata)
        assert hidden is not None  # there is at least one layer
        normed, _ = self.norm.add(hidden, residual)
        return normed

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [M, H] from ``forward`` -> logits [M, vocab_size] float32."""
        logits: torch.Tensor = self.head(hidden)
        return logits
