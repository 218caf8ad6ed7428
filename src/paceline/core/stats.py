"""Counters of an engine's life; plain integers, read by logs, metrics and benchmarks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from paceline.arrays import BoolArray, Int64Array
from paceline.core.commit_log import CommitLog

_NUMBERS = re.compile(r"[\s:]*\d")  # where a reason turns from words to numbers
_CATCH_UP, _END, _DRAFTER_CONTEXT = "catch-up", "end of sequence", "drafter context"


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine started. Drafts are counted after the cut at a sequence's end."""

    num_steps: int = 0
    num_decode_passes: int = 0  # target passes with at least one decode row
    num_prefill_passes: int = 0
    num_prefill_chunks: int = 0
    num_prompt_tokens: int = 0  # computed in prefill passes, recomputation included
    num_generation_tokens: int = 0  # committed
    num_batched_tokens: int = 0  # counted against the token budget
    num_cached_tokens: int = 0  # found in the prefix cache
    num_request_prompt_tokens: int = 0  # of requests that have their first token, counted once
    # Prompt tokens looked up in the prefix cache and found there, once a request.
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_preemptions: int = 0
    num_blocks_swapped_out: int = 0  # KV blocks of preempted sequences copied to host memory
    num_blocks_swapped_in: int = 0  # and copied back
    num_finished: int = 0
    num_drafts: int = 0  # (sequence, step) pairs that proposed at least one token
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_catch_up_tokens: int = 0  # drafter KV computed for tokens it had missed
    last_k: int = 0
    last_k_reason: str = ""
    choices: dict[tuple[int, str], int] = field(default_factory=dict)  # rounds by k and why
    # Index i counts rounds that proposed at least i + 1 drafts; of these, those that accepted the i
    # before; of these, those that accepted this one too.
    proposed_by_position: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))
    reached_by_position: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))
    accepted_by_position: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))
    commit_log: CommitLog | None = None  # set by who wants to know when tokens were committed

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted ÷ proposed, None before anything was proposed."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    def record_choice(
        self, k: int, reason: str, drafts: Int64Array, room: Int64Array, lagging: BoolArray
    ) -> None:
        """Count the rounds of one decode pass by draft length and what decided it.

        k, reason: chosen for the pass; a reason is counted without its numbers, of which there may
        be many. [rows]: drafts each row got, the most that its own end allows, and whether its
        drafter lacks KV.
        """
        self.last_k, self.last_k_reason = k, reason
        words = _NUMBERS.split(reason, 1)[0]
        less = drafts < k
        if not less.any():
            self._count(k, words, len(drafts))
            return
        self._count(k, words, len(drafts) - int(less.sum()))
        ending = less & ~lagging & (drafts == np.maximum(room, 0))
        for why, rows in (
            (_CATCH_UP, less & lagging),
            (_END, ending),
            (_DRAFTER_CONTEXT, less & ~lagging & ~ending),
        ):
            for length, count in enumerate(np.bincount(drafts[rows]).tolist()):
                self._count(length, why, count)

    def _count(self, k: int, words: str, rounds: int) -> None:
        if rounds:
            self.choices[k, words] = self.choices.get((k, words), 0) + rounds

    def record_drafts(self, proposed: Int64Array, accepted: Int64Array) -> None:
        """Add one step's rounds. proposed, accepted: [rows] draft tokens of each row."""
        total = int(proposed.sum())
        if total == 0:
            return
        width = int(proposed.max())
        if width > len(self.proposed_by_position):
            grow = width - len(self.proposed_by_position)
            self.proposed_by_position = np.pad(self.proposed_by_position, (0, grow))
            self.reached_by_position = np.pad(self.reached_by_position, (0, grow))
            self.accepted_by_position = np.pad(self.accepted_by_position, (0, grow))
        positions = np.arange(width)
        deep = proposed[:, None] > positions  # [rows, width]
        self.proposed_by_position[:width] += deep.sum(0)
        self.reached_by_position[:width] += (deep & (accepted[:, None] >= positions)).sum(0)
        self.accepted_by_position[:width] += (accepted[:, None] > positions).sum(0)
        self.num_drafts += int((proposed > 0).sum())
        self.num_draft_tokens += total
        self.num_accepted_tokens += int(accepted.sum())
