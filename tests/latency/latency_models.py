"""Small models with random weights for the latency path, and passes over paged KV."""

from __future__ import annotations

import dataclasses

import torch

from paceline.attention.backend import AttentionMetadata
from paceline.attention.reference import ReferenceAttention
from paceline.config import ModelArch
from paceline.distributed.tp_group import SingleProcessGroup
from paceline.latency.forward import LatencyForward
from paceline.latency.plan import CardLimits, LatencyPlan, plan
from paceline.models.decoder import DecoderModel
from paceline.synth.shapes import find_shape

H200 = CardLimits((9, 0), 132, 232_448)
BLOCK_SIZE = 16
ROOM = 24  # positions of a sequence behind its cached ones


def small_arch(**changes: object) -> ModelArch:
    """Two layers of the qwen2 family with 5 heads of 32; nothing divides evenly."""
    sizes: dict[str, object] = {
        "vocab_size": 1003,
        "hidden_size": 160,
        "intermediate_size": 416,
        "num_layers": 2,
        "num_attention_heads": 5,
        "num_kv_heads": 1,
        "head_dim": 32,
    }
    sizes |= changes
    layers = sizes["num_layers"]
    assert isinstance(layers, int)
    sizes["sliding_window"] = (None,) * layers
    return dataclasses.replace(find_shape("tiny").arch(), **sizes)  # type: ignore[arg-type]


SMALL = {
    "heads of 32, odd layers": small_arch(num_layers=3),
    "heads of 64 with norms": small_arch(
        head_dim=64, num_attention_heads=6, num_kv_heads=2, qk_norm=True, qkv_bias=False,
        hidden_size=288, intermediate_size=800, tie_word_embeddings=False,
    ),
    "heads of 128": small_arch(
        head_dim=128, num_attention_heads=3, num_kv_heads=1, hidden_size=224,
        intermediate_size=544, tie_word_embeddings=False,
    ),
    "heads of 128 with norms": small_arch(
        num_layers=3, head_dim=128, num_attention_heads=4, num_kv_heads=2, qk_norm=True,
        qkv_bias=False, hidden_size=256, intermediate_size=672,
    ),
}  # fmt: skip


def two_layers(name: str, vocab_size: int) -> ModelArch:
    """Of a published shape."""
    arch = find_shape(name).arch()
    return dataclasses.replace(
        arch, num_layers=2, sliding_window=(None, None), vocab_size=vocab_size
    )


LARGE = {
    "0.5B, 2 layers": two_layers("qwen2.5-0.5b", 151_936),
    "7B, 2 layers": two_layers("qwen2.5-7b", 2000),
}


def planned(arch: ModelArch, max_positions: int = 2048, card: CardLimits = H200) -> LatencyPlan:
    """The plan of an architecture that the latency path takes."""
    found = plan(arch, card, dtype="bfloat16", block_size=BLOCK_SIZE, max_positions=max_positions)
    assert isinstance(found, LatencyPlan), found.reason
    return found


def random_model(arch: ModelArch, device: str = "cpu", seed: int = 0) -> DecoderModel:
    """A bfloat16 model whose activations stay near 1 and whose logits are flat."""
    with torch.inference_mode():
        model = DecoderModel(
            arch, ReferenceAttention(), SingleProcessGroup(), torch.bfloat16, device
        )
        generator = torch.Generator(device=device).manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.1, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.5, generator=generator)
            else:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        # A tied head makes logits as large as the embedding times the hidden size.
        scale = arch.hidden_size**-0.5 if arch.tie_word_embeddings else 1.0
        model.embedding.weight.normal_(0.0, scale, generator=generator)
    return model.eval()


def in_float32(model: DecoderModel) -> DecoderModel:
    """The same weights in float32, with the reference attention."""
    device = model.embedding.weight.device
    with torch.inference_mode():
        copy = DecoderModel(
            model.arch, ReferenceAttention(), SingleProcessGroup(), torch.float32, device
        )
        for mine, theirs in zip(copy.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    return copy.eval()


class Rows:
    """Rows with cached tokens of random K and V, and random tokens behind them; the last is null.

    contexts: cached tokens of each row.
    """

    def __init__(self, arch: ModelArch, contexts: list[int], device: str, seed: int = 0) -> None:
        self.arch = arch
        self.contexts = contexts
        self.device = device
        generator = torch.Generator().manual_seed(seed)
        rows, width = len(contexts), max(contexts) + ROOM
        blocks = -(-width // BLOCK_SIZE)
        table = torch.randperm(rows * blocks, generator=generator).view(rows, blocks) + 1
        ids = torch.randint(0, arch.vocab_size, (rows + 1, width), generator=generator)
        self.history = self._ints(ids)
        self.block_table = self._ints(torch.cat((table, torch.zeros_like(table[:1]))))
        self.num_tokens = self._ints(torch.tensor([context + 1 for context in contexts] + [1]))
        self.active = self._ints(torch.tensor([1] * rows + [0]))
        shape = (rows * blocks + 1, BLOCK_SIZE, arch.num_kv_heads, arch.head_dim)
        self.kv_caches = [
            (self._noise(shape, generator), self._noise(shape, generator))
            for _ in range(arch.num_layers)
        ]
        self.before = [(keys.clone(), values.clone()) for keys, values in self.kv_caches]
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}

    def _ints(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.int32).to(self.device).contiguous()

    def _noise(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16).to(self.device)

    def restore(self) -> None:
        """The caches as they were."""
        for now, before in zip(self.kv_caches, self.before, strict=True):
            for cache, content in zip(now, before, strict=True):
                cache.copy_(content)

    def run(
        self, forward: LatencyForward, rows: list[int], query_len: int = 1, shift: int = 0
    ) -> torch.Tensor:
        """Logits of ``query_len`` tokens a row, from ``shift`` behind the cached ones on."""
        count = len(rows) * query_len
        logits = torch.full((count, self.arch.vocab_size), torch.nan, device=self.device)
        if tuple(rows) not in self._indices:  # a capture could not copy them
            self._indices[tuple(rows)] = self._ints(torch.tensor(rows))
        index = self._indices[tuple(rows)]
        arguments = (self.history, index, self.num_tokens, self.active, self.block_table)
        forward.run(*arguments, query_len, shift - 1, logits)
        return logits

    def slots(self, rows: list[int], query_len: int = 1, shift: int = 0) -> torch.Tensor:
        """KV slots of the same tokens, [B * query_len]."""
        found = []
        for row in rows:
            at = self.contexts[row] + shift + torch.arange(query_len, device=self.device)
            blocks = self.block_table[row].long()[at // BLOCK_SIZE]
            found.append(blocks * BLOCK_SIZE + at % BLOCK_SIZE)
        return torch.cat(found)

    def written(self, slots: torch.Tensor) -> torch.Tensor:
        """K and V in those slots, [layers, 2, N, kv_heads * head_dim]."""
        size = self.arch.num_kv_heads * self.arch.head_dim
        return torch.stack(
            [torch.stack([c.view(-1, size)[slots] for c in pair]) for pair in self.kv_caches]
        )

    @torch.inference_mode()
    def reference(
        self, model: DecoderModel, rows: list[int], query_len: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and K and V of a float32 model for the same pass."""
        offsets = range(query_len)
        positions = [[self.contexts[row] + offset for offset in offsets] for row in rows]
        ids = [self.history[row, at] for row, at in zip(rows, positions, strict=True)]
        lens = [at[-1] + 1 for at in positions]
        slots = self.slots(rows, query_len)
        metadata = AttentionMetadata(
            query_start_loc=self._ints(torch.arange(len(rows) + 1) * query_len),
            seq_lens=self._ints(torch.tensor(lens)),
            block_table=self.block_table[torch.tensor(rows, device=self.device)],
            slot_mapping=slots,
            block_size=BLOCK_SIZE,
            query_lens=[query_len] * len(rows),
            seq_lens_list=lens,
        )
        caches = [(keys.float(), values.float()) for keys, values in self.before]
        flat = torch.tensor([at for row in positions for at in row], device=self.device)
        hidden = model(torch.cat(ids).long(), flat, caches, metadata)
        size = self.arch.num_kv_heads * self.arch.head_dim
        written = [torch.stack([c.view(-1, size)[slots] for c in pair]) for pair in caches]
        return model.compute_logits(hidden), torch.stack(written)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, in the Euclidean norm; NaN where anything is NaN."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
