"""The only two messages between core and runner: plain data, numpy arrays, no tensors.

``SchedulerOutput`` goes down (what this step computes and how rows change), ``ModelRunnerOutput``
comes back (what was sampled). New rows are sent whole, known ones as differences.

A *row* is a running sequence's place in the device's tensors. Every assignment of a row to a
sequence carries a new *generation*, so that a result computed for an earlier owner can be told and
dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from paceline.arrays import BoolArray, Int32Array, Int64Array, IntArray, TokenLogprobs
from paceline.request import TokenGrammar
from paceline.sampling_params import SamplingParams

__all__ = ["ModelRunnerOutput", "NewRow", "SchedulerOutput", "TokenGrammar", "TokenLogprobs"]


def _empty() -> Int32Array:
    return np.zeros(0, np.int32)


@dataclass(slots=True)
class NewRow:
    """A sequence that enters a row: all the runner ever needs to know of it."""

    row: int
    generation: int
    token_ids: Int32Array  # [num_tokens] prompt, and outputs so far when it was preempted
    prompt_len: int
    max_total_tokens: int  # prompt + output may not exceed this
    sampling: SamplingParams
    # any of these ends the sequence (empty with ignore_eos and none given)
    stop_token_ids: tuple[int, ...]
    seed: int  # 64-bit, of the request
    sample_index: int  # which of the request's n
    block_ids: list[int]
    grammar: TokenGrammar | None = None  # what the output must look like, None if that is free


@dataclass(slots=True)
class SchedulerOutput:
    """One step: at most one decode pass and one prefill pass, after the row changes."""

    step: int
    new_rows: list[NewRow] = field(default_factory=list)
    freed_rows: list[int] = field(default_factory=list)
    # Target KV of whole blocks, before anything else: to the host, then from it.
    swap_outs: list[tuple[int, int]] = field(default_factory=list)  # (block id, host slot)
    swap_ins: list[tuple[int, int]] = field(default_factory=list)  # (host slot, block id)
    block_copies: list[tuple[int, int]] = field(default_factory=list)  # (source, destination) ids
    # Blocks appended to running rows: block_table[row, index] = id.
    new_block_rows: Int32Array = field(default_factory=_empty)
    new_block_indices: Int32Array = field(default_factory=_empty)
    new_block_ids: Int32Array = field(default_factory=_empty)
    # Decode pass: each row feeds its last token and num_draft_tokens drafts.
    decode_rows: Int32Array = field(default_factory=_empty)  # [B]
    num_draft_tokens: Int32Array = field(default_factory=_empty)  # [B] each at most k
    k: int = 0
    k_reason: str = ""
    # Prefill pass: row computes tokens [start, start + len).
    prefill_rows: Int32Array = field(default_factory=_empty)  # [P]
    prefill_starts: Int32Array = field(default_factory=_empty)  # [P]
    prefill_lens: Int32Array = field(default_factory=_empty)  # [P]
    # [P] last chunk
    prefill_samples: BoolArray = field(default_factory=lambda: np.zeros(0, np.bool_))
    # Drafter KV to compute at known tokens [start, end), after the prefill pass.
    catch_up_rows: Int32Array = field(default_factory=_empty)  # [C]
    catch_up_starts: Int32Array = field(default_factory=_empty)  # [C]
    catch_up_ends: Int32Array = field(default_factory=_empty)  # [C]
    num_batched_tokens: int = 0  # counted against the token budget
    # Static batching keeps computing rows whose sequence has finished; their results are dropped.
    compute_finished: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing is computed (row changes may still be carried)."""
        return not (len(self.decode_rows) or len(self.prefill_rows) or len(self.catch_up_rows))


@dataclass(slots=True)
class ModelRunnerOutput:
    """What one step sampled, for M rows: decode rows still active, and prompts that completed."""

    step: int
    rows: Int32Array = field(default_factory=_empty)  # [M]
    generations: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))  # [M]
    token_ids: Int32Array = field(default_factory=lambda: np.zeros((0, 1), np.int32))  # [M, k + 1]
    num_sampled: Int32Array = field(default_factory=_empty)  # [M] accepted drafts + 1
    num_draft_tokens: Int32Array = field(default_factory=_empty)  # [M] drafts really proposed
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by row, when asked
    # By (row, generation, first token index - 1): logprobs of prompt tokens, one chunk each.
    prompt_logprobs: dict[tuple[int, int, int], TokenLogprobs] = field(default_factory=dict)
    # (row, generation, why its sequence cannot go on)
    failed: list[tuple[int, int, str]] = field(default_factory=list)

    def add(
        self,
        rows: Int64Array,
        generations: Int64Array,
        token_ids: IntArray,
        num_sampled: IntArray,
        num_draft_tokens: IntArray,
    ) -> None:
        """Append the rows of one pass, [M] each, token_ids [M, W]; narrower runs are padded."""
        width = max(token_ids.shape[1], self.token_ids.shape[1])
        self.rows = _joined(self.rows, rows)
        self.generations = np.concatenate([self.generations, generations])
        added = _padded(token_ids.astype(np.int32), width)
        self.token_ids = _joined(_padded(self.token_ids, width), added)
        self.num_sampled = _joined(self.num_sampled, num_sampled)
        self.num_draft_tokens = _joined(self.num_draft_tokens, num_draft_tokens)


def _joined(before: Int32Array, more: IntArray) -> Int32Array:
    return np.concatenate([before, more.astype(np.int32)])


def _padded(token_ids: Int32Array, width: int) -> Int32Array:
    padded: Int32Array = np.pad(token_ids, ((0, 0), (0, width - token_ids.shape[1])))
    return padded
