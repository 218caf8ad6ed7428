"""Drafting with a small model of the same tokenizer.

The drafter samples with the target's noise (see ``sample``), so that the two agree as often as
their distributions do. Its KV uses the target's block ids and tables. Every round's first forward
feeds the last two committed tokens: after a fully accepted round the drafter has not seen its own
last draft, and feeding two makes that no special case.
"""

from __future__ import annotations

import numpy as np
import torch

from paceline.arrays import Int64Array
from paceline.models.decoder import DecoderModel
from paceline.sample.sampler import Sampler
from paceline.worker.batch import build_pass
from paceline.worker.decode_state import DecodeState
from paceline.worker.kv_cache import KVCache, copy_blocks


class DraftModelDrafter:
    """A ``Drafter`` around a decoder model.

    sampler: with the limit that holds for both models' ids. num_embeddings: ids at or above it,
    which only the target knows, are fed as id 0; that can cost acceptance, never correctness.
    """

    name = "draft_model"

    def __init__(
        self, model: DecoderModel, kv_caches: list[KVCache], state: DecodeState, sampler: Sampler
    ) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._state = state
        self._sampler = sampler

    def propose(
        self, rows: Int64Array, num_tokens: Int64Array, num_draft_tokens: Int64Array
    ) -> Int64Array:
        """See ``Drafter``: k forwards, the first over two tokens."""
        state = self._state
        for i in range(int(num_draft_tokens.max(initial=0))):
            drafting = num_draft_tokens > i
            chosen, count = rows[drafting], num_tokens[drafting]
            lens = np.full(len(chosen), 2 if i == 0 else 1, np.int64)
            hidden, ends = self._forward(chosen, count + i - lens, lens)
            logits = self._model.compute_logits(hidden[torch.from_numpy(ends - 1)])
            tokens = self._sampler.sample(logits, chosen, count + i, state.sampling, truncate=False)
            state.history[chosen, count + i] = tokens.numpy()
        return num_draft_tokens

    def catch_up(self, rows: Int64Array, starts: Int64Array, ends: Int64Array) -> None:
        """See ``Drafter``: one prefill pass without logits."""
        self._forward(rows, starts, ends - starts)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """See ``Drafter``."""
        copy_blocks(self._kv_caches, pairs)

    def _forward(
        self, rows: Int64Array, starts: Int64Array, lens: Int64Array
    ) -> tuple[torch.Tensor, Int64Array]:
        batch = build_pass(self._state, rows, starts, lens)
        ids = batch.input_ids
        ids[ids >= self._model.arch.vocab_size] = 0
        hidden = self._model(ids, batch.positions, self._kv_caches, batch.metadata)
        return hidden, batch.ends
