"""Run a workload on an ``LLM`` and say what it took.

A figure means little alone: callers interleave the runs they compare and give the spread. Knows no
output format.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.arrays import Int64Array
from paceline.engine.admission import Prompt
from paceline.llm import LLM
from paceline.sampling_params import SamplingParams
from paceline.spec.policy import DraftChoice, DraftOutcome, Load


class ChosenLength:
    """A ``DraftLengthPolicy`` whose k its owner sets, so that one engine serves all lengths."""

    def __init__(self, max_k: int) -> None:
        self.max_k = max_k
        self.k = max_k

    def choose(self, load: Load) -> DraftChoice:
        return DraftChoice(self.k, "chosen")

    def observe(self, outcome: DraftOutcome) -> None:
        """A chosen length learns nothing."""


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over a workload. Counts are of this pass only."""

    seconds: float
    num_tokens: int  # committed
    num_decode_passes: int
    proposed_by_position: Int64Array  # rounds that proposed at least i + 1 drafts
    accepted_by_position: Int64Array
    token_ids: list[list[int]]  # of each prompt's first output

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second, prefill included."""
        return self.num_tokens / self.seconds

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of rounds that accepted at least i + 1 drafts, of those that proposed as many."""
        proposed = np.maximum(self.proposed_by_position, 1)
        shares: list[float] = (self.accepted_by_position / proposed).tolist()
        return shares


def measure(
    llm: LLM, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams]
) -> Run:
    """Generate all prompts at once and count. The prefix cache is as earlier runs left it."""
    stats = llm.engine.stats
    tokens, passes = stats.num_generation_tokens, stats.num_decode_passes
    proposed, accepted = stats.proposed_by_position, stats.accepted_by_position
    proposed, accepted = proposed.copy(), accepted.copy()
    start = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    return Run(
        seconds,
        stats.num_generation_tokens - tokens,
        stats.num_decode_passes - passes,
        _grown(stats.proposed_by_position, proposed),
        _grown(stats.accepted_by_position, accepted),
        [output.outputs[0].token_ids for output in outputs],
    )


def _grown(now: Int64Array, before: Int64Array) -> Int64Array:
    """now - before, without the positions that no round of this run reached."""
    grown: Int64Array = now - np.pad(before, (0, len(now) - len(before)))
    return np.trim_zeros(grown, "b")
