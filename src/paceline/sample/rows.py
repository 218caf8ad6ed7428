"""Per-row sampling state: what the sampler needs to know of each running sequence.

Parameters lie in arrays indexed by row, so that a step gathers them for all its rows at once; a
row's flags say which features it pays for. Only set_row and clear_row write here, when a sequence
enters or leaves. This file must not know requests, steps or logits.

    state = SamplingRows(256, history, torch.device("cpu"))
    state.set_row(3, SamplingParams(temperature=0.7), prompt_len=20, seed=5, sample_index=0,
                  stop_token_ids=(2,))
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paceline.arrays import Int32Array, Int64Array
from paceline.sample.noise import row_key
from paceline.sampling_params import SamplingParams

SAMPLED = 1  # temperature above zero
TRUNCATED = 2  # top_k, top_p or min_p, and sampled: truncation never changes an argmax
COUNTED = 4  # repetition, presence or frequency penalty
BIASED = 8
MIN_TOKENS = 16
PROCESSED = COUNTED | BIASED | MIN_TOKENS  # logits change before temperature

_FLOAT32 = np.finfo(np.float32)


def _to_float32(value: float) -> float:
    """Clamp a positive parameter into float32, whose overflow would turn it into 0 or infinity."""
    return min(max(value, float(_FLOAT32.tiny)), float(_FLOAT32.max))


class SamplingRows:
    """Sampling parameters of up to ``max_num_seqs`` rows.

    history: [R, L] int32, the runner's tensor of token ids: prompt, outputs, and beyond the
    committed length the drafts under verification. Read, never written.
    """

    def __init__(self, max_num_seqs: int, history: torch.Tensor, device: torch.device) -> None:
        self.history = history
        self.device = device
        self.flags = np.zeros(max_num_seqs, np.uint8)
        self.row_keys = np.zeros(max_num_seqs, np.uint64)
        self.prompt_len = np.zeros(max_num_seqs, np.int64)
        self.min_tokens = np.zeros(max_num_seqs, np.int64)
        self.temperature = np.ones(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int64)  # 0 is off
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.repetition_penalty = np.ones(max_num_seqs, np.float32)
        self.presence_penalty = np.zeros(max_num_seqs, np.float32)
        self.frequency_penalty = np.zeros(max_num_seqs, np.float32)
        self.stop_ids: dict[int, Int64Array] = {}
        self.bias: dict[int, tuple[Int64Array, np.ndarray]] = {}  # row -> ids, float32 values
        self._prompt_ids: dict[int, Int32Array] = {}

    def set_row(
        self,
        row: int,
        sampling: SamplingParams,
        prompt_len: int,
        seed: int,
        sample_index: int,
        stop_token_ids: Sequence[int],
    ) -> None:
        """Take a sequence into a row.

        Args:
            prompt_len: position of the first output token.
            seed: the request's, any integer.
            sample_index: which of the request's ``n``.
            stop_token_ids: forbidden while fewer than ``min_tokens`` tokens are out.
        """
        self.clear_row(row)
        flags = 0
        if not sampling.is_greedy:
            flags |= SAMPLED
            if sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0:
                flags |= TRUNCATED
        if sampling.needs_penalties:
            flags |= COUNTED
        if sampling.logit_bias:
            flags |= BIASED
            ids = np.fromiter(sampling.logit_bias.keys(), np.int64)
            self.bias[row] = ids, np.fromiter(sampling.logit_bias.values(), np.float32)
        if sampling.min_tokens > 0 and len(stop_token_ids):
            flags |= MIN_TOKENS
            self.stop_ids[row] = np.asarray(stop_token_ids, np.int64)
        self.flags[row] = flags
        self.row_keys[row] = row_key(seed, sample_index)
        self.prompt_len[row] = prompt_len
        self.min_tokens[row] = min(sampling.min_tokens, 1 << 62)
        self.temperature[row] = _to_float32(sampling.temperature)
        self.top_k[row] = min(max(sampling.top_k, 0), 1 << 62)
        self.top_p[row] = _to_float32(sampling.top_p)
        self.min_p[row] = sampling.min_p
        self.repetition_penalty[row] = _to_float32(sampling.repetition_penalty)
        self.presence_penalty[row] = sampling.presence_penalty
        self.frequency_penalty[row] = sampling.frequency_penalty

    def clear_row(self, row: int) -> None:
        """Forget a sequence; the row then samples greedily, which costs least."""
        self.flags[row] = 0
        self.stop_ids.pop(row, None)
        self.bias.pop(row, None)
        self._prompt_ids.pop(row, None)

    def tokens(self, row: int, start: int, end: int) -> Int32Array:
        """``history[row, start:end]`` on the host (a view on a CPU)."""
        array: Int32Array = self.history[row, start:end].cpu().numpy()
        return array

    def prompt_ids(self, row: int) -> Int32Array:
        """Sorted distinct ids of the row's prompt, found once: a prompt never changes."""
        ids = self._prompt_ids.get(row)
        if ids is None:
            ids = np.unique(self.tokens(row, 0, int(self.prompt_len[row])))
            self._prompt_ids[row] = ids
        return ids
