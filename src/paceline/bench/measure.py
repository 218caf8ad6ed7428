"""Run a workload on an ``LLM`` and say what it took.

A figure means little alone: callers interleave the runs they compare and give the spread. Knows no
output format.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.arrays import Int64Array
from paceline.core.commit_log import CommitLog, Float64Array, Gaps
from paceline.core.stats import EngineStats
from paceline.errors import EngineError
from paceline.llm import LLM
from paceline.outputs import RequestOutput
from paceline.prompts import Prompt
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
    """One pass over a workload. Counts are of this pass only, times are seconds."""

    seconds: float
    num_requests: int
    num_tokens: int  # committed
    num_prompt_tokens: int  # computed or found in the prefix cache
    num_cached_tokens: int  # of these, found
    num_steps: int
    num_decode_passes: int
    num_batched_tokens: int
    num_preemptions: int
    proposed_by_position: Int64Array  # rounds that proposed at least i + 1 drafts
    reached_by_position: Int64Array  # of these, rounds that accepted the i before
    accepted_by_position: Int64Array  # of these, rounds that accepted this one too
    first_token_seconds: Float64Array  # [num_requests] from submission to the first token
    gaps: Gaps
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
    """Generate all prompts at once and count. The prefix cache is as earlier runs left it.

    The engine must have nothing else to do. Raises EngineError if a request fails.
    """
    stats = llm.engine.stats
    before = replace(stats)
    # record_drafts adds to these in place.
    before.proposed_by_position = stats.proposed_by_position.copy()
    before.reached_by_position = stats.reached_by_position.copy()
    before.accepted_by_position = stats.accepted_by_position.copy()
    stats.commit_log = log = CommitLog()
    start = time.monotonic()
    try:
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.monotonic() - start
    finally:
        stats.commit_log = None
    failed = next((output for output in outputs if output.error is not None), None)
    if failed is not None:
        raise EngineError(f"a request failed while it was measured: {failed.error}")
    return _run(seconds, start, outputs, log, before, stats)


def _run(
    seconds: float,
    start: float,
    outputs: list[RequestOutput],
    log: CommitLog,
    before: EngineStats,
    now: EngineStats,
) -> Run:
    firsts = [output.metrics.first_token_time for output in outputs]
    proposed = _grown(now.proposed_by_position, before.proposed_by_position)
    reached = _grown(now.reached_by_position, before.reached_by_position)
    accepted = _grown(now.accepted_by_position, before.accepted_by_position)
    width = len(np.trim_zeros(proposed, "b"))
    cached = now.num_cached_tokens - before.num_cached_tokens
    return Run(
        seconds=seconds,
        num_requests=len(outputs),
        num_tokens=now.num_generation_tokens - before.num_generation_tokens,
        num_prompt_tokens=now.num_prompt_tokens - before.num_prompt_tokens + cached,
        num_cached_tokens=cached,
        num_steps=now.num_steps - before.num_steps,
        num_decode_passes=now.num_decode_passes - before.num_decode_passes,
        num_batched_tokens=now.num_batched_tokens - before.num_batched_tokens,
        num_preemptions=now.num_preemptions - before.num_preemptions,
        proposed_by_position=proposed[:width],
        reached_by_position=reached[:width],
        accepted_by_position=accepted[:width],
        first_token_seconds=np.array([one - start for one in firsts if one is not None]),
        gaps=log.gaps(),
        token_ids=[output.outputs[0].token_ids for output in outputs],
    )


def _grown(now: Int64Array, before: Int64Array) -> Int64Array:
    """now - before, where before may be the shorter."""
    grown: Int64Array = now - np.pad(before, (0, len(now) - len(before)))
    return grown
