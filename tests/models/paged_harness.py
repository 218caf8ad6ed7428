"""Run a loaded model over a paged cache with shuffled blocks, and tiny checkpoints to load.

The harness is the smallest possible runner: it builds ``AttentionMetadata`` for passes in which
every sequence computes any number of its next tokens, and returns the logits of all of them.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.attention.backend import AttentionMetadata
from paceline.attention.selector import select_backend
from paceline.config import ModelConfig
from paceline.distributed.tp_group import SingleProcessGroup
from paceline.models.decoder import DecoderModel
from paceline.models.hf_config import read_hf_config
from paceline.models.loader import load_model
from paceline.worker.kv_cache import allocate_kv_caches

BLOCK = 4
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers' warnings and progress bars are not ours to fail on."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def save_random(
    path: Path, family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> Any:
    """Write a random checkpoint of a family; returns the transformers model in eval mode."""
    import transformers

    classes = {
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
        "mistral": ("MistralConfig", "MistralForCausalLM"),
        "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    }
    shard_size = changes.pop("max_shard_size", "1GB")
    config_name, model_name = classes[family]
    with quiet():
        torch.manual_seed(seed)
        config = getattr(transformers, config_name)(**{**TINY, **changes})
        config._attn_implementation = "eager"
        model = getattr(transformers, model_name)(config).eval()
        with torch.no_grad():  # the defaults (zero biases, unit norms) would hide mistakes
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0.0, 0.3)
                elif "norm" in name:
                    parameter.uniform_(0.5, 1.5)
        model.to(dtype).save_pretrained(path, max_shard_size=shard_size)
    return model


def reload(path: Path, dtype: torch.dtype) -> Any:
    """The checkpoint as transformers loads it (which keeps rotary frequencies in float32)."""
    from transformers import AutoModelForCausalLM

    with quiet():
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")


def load(path: Path, dtype: str = "float32", backend: str = "cpu") -> DecoderModel:
    """Load a directory as Paceline does, with an attention backend by name."""
    arch = read_hf_config(path)
    config = ModelConfig(str(path), str(path), arch, dtype, arch.max_position_embeddings)  # type: ignore[arg-type]
    attention = select_backend("cpu", arch, getattr(torch, dtype), backend)
    return load_model(config, "cpu", attention, SingleProcessGroup())


class PagedRun:
    """Sequences of known tokens, computed in passes of any shape.

    Blocks are dealt in shuffled order and the cache starts as NaN, so that anything read beyond
    what was written shows.
    """

    def __init__(
        self,
        model: DecoderModel,
        sequences: Sequence[Sequence[int]],
        seed: int = 0,
        tp_size: int = 1,
    ) -> None:
        self.model = model
        self.sequences = sequences
        self.computed = [0] * len(sequences)
        counts = [-(-len(tokens) // BLOCK) for tokens in sequences]
        dtype = model.embedding.weight.dtype
        self.caches = allocate_kv_caches(model.arch, sum(counts), BLOCK, dtype, "cpu", tp_size)
        for layer in self.caches:
            for cache in layer:
                cache.fill_(float("nan"))
        generator = torch.Generator().manual_seed(seed)
        order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
        self.table = torch.zeros(len(sequences), max(counts) + 2, dtype=torch.int32)
        for row, count in enumerate(counts):
            for index in range(count):
                self.table[row, index] = order.pop()
        self.logits: list[list[torch.Tensor]] = [[] for _ in sequences]

    def step(self, plan: Sequence[tuple[int, int]]) -> None:
        """One pass: (sequence, how many of its next tokens), in this order."""
        ids, positions, slots = [], [], []
        for row, count in plan:
            for position in range(self.computed[row], self.computed[row] + count):
                ids.append(self.sequences[row][position])
                positions.append(position)
                block = int(self.table[row, position // BLOCK])
                slots.append(block * BLOCK + position % BLOCK)
            self.computed[row] += count
        query_lens = [count for _, count in plan]
        seq_lens = [self.computed[row] for row, _ in plan]
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_table=self.table[[row for row, _ in plan]],
            slot_mapping=torch.tensor(slots),
            block_size=BLOCK,
            query_lens=query_lens,
            seq_lens_list=seq_lens,
        )
        with torch.inference_mode():
            hidden = self.model(torch.tensor(ids), torch.tensor(positions), self.caches, metadata)
            logits = self.model.compute_logits(hidden)
        assert logits.dtype == torch.float32
        for (row, _), part in zip(plan, logits.split(query_lens), strict=True):
            self.logits[row].append(part)

    def finish(self, lens: Sequence[int]) -> list[torch.Tensor]:
        """Compute the rest, each pass taking the next of ``lens`` from every unfinished sequence.

        Returns the logits of every position, [len(sequence), vocab] each.
        """
        turn = 0
        while plan := self._plan(lens, turn):
            self.step(plan)
            turn += 1
        return [torch.cat(parts) for parts in self.logits]

    def _plan(self, lens: Sequence[int], turn: int) -> list[tuple[int, int]]:
        plan = []
        for row, tokens in enumerate(self.sequences):
            left = len(tokens) - self.computed[row]
            if left:
                plan.append((row, min(left, lens[(turn + row) % len(lens)])))
        return plan


def oracle(model: Any, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """transformers' float32 logits of every position of every sequence."""
    with torch.no_grad(), quiet():
        return [model(torch.tensor([list(tokens)])).logits[0].float() for tokens in sequences]
