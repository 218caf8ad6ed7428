"""The figures of one run, as plain numbers, and what several rounds of them come to."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.bench.spread import Spread, spread
from paceline.core.commit_log import Float64Array

if TYPE_CHECKING:
    from paceline.bench.measure import Run


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of times in milliseconds."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Figures:
    """One run of one variant. None where there was nothing to measure."""

    seconds: float
    num_tokens: int
    tokens_per_second: float
    requests_per_second: float
    time_to_first_token_ms: Percentiles | None
    inter_token_ms: Percentiles | None  # a gap between outputs ÷ the tokens at its end, by token
    pause_ms: Percentiles | None  # the gaps themselves
    tokens_per_step: float | None  # committed by a sequence in a decode step
    rows_per_pass: float | None  # unfinished sequences in a decode pass
    drafting_share: float | None  # of a sequence's decode steps, those that proposed a draft
    batched_tokens_per_step: float
    budget_share: float  # the same ÷ max_num_batched_tokens
    num_decode_passes: int
    num_preemptions: int
    cached_share: float  # of prompt tokens, found in the prefix cache
    proposed_by_position: list[int]  # drafting rounds, as ``Run`` counts them
    reached_by_position: list[int]
    accepted_by_position: list[int]
    num_same_outputs: int  # with the tokens of the first variant's first run


def figures_of(run: Run, token_budget: int, expected: Sequence[list[int]]) -> Figures:
    """Reduce a run. expected: token ids of each output to compare with."""
    gaps, passes = run.gaps, run.num_decode_passes
    batched = run.num_batched_tokens / max(run.num_steps, 1)
    by_token = np.repeat(gaps.seconds / gaps.num_tokens, gaps.num_tokens)
    return Figures(
        seconds=run.seconds,
        num_tokens=run.num_tokens,
        tokens_per_second=run.tokens_per_second,
        requests_per_second=run.num_requests / run.seconds,
        time_to_first_token_ms=_percentiles(run.first_token_seconds),
        inter_token_ms=_percentiles(by_token),
        pause_ms=_percentiles(gaps.seconds),
        tokens_per_step=float(gaps.num_tokens.mean()) if len(gaps.seconds) else None,
        rows_per_pass=len(gaps.seconds) / passes if passes else None,
        drafting_share=_drafting_share(run),
        batched_tokens_per_step=batched,
        budget_share=batched / token_budget,
        num_decode_passes=passes,
        num_preemptions=run.num_preemptions,
        cached_share=run.num_cached_tokens / max(run.num_prompt_tokens, 1),
        proposed_by_position=run.proposed_by_position.tolist(),
        reached_by_position=run.reached_by_position.tolist(),
        accepted_by_position=run.accepted_by_position.tolist(),
        num_same_outputs=sum(a == b for a, b in zip(run.token_ids, expected, strict=True)),
    )


def _drafting_share(run: Run) -> float | None:
    """A gap is a decode step of a sequence, but for the few that end in a recomputed prefill."""
    steps = len(run.gaps.seconds)
    drafts = int(run.proposed_by_position[0]) if len(run.proposed_by_position) else 0
    return min(drafts / steps, 1.0) if steps else None


def _percentiles(seconds: Float64Array) -> Percentiles | None:
    if not len(seconds):
        return None
    return Percentiles(*(np.percentile(seconds, (50, 95, 99)) * 1e3).tolist())


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of drafts, by position from the first; all rounds together."""

    # Share of rounds that accepted at least this many drafts, of those that proposed as many.
    at_least: list[float]
    # The same, of those that also accepted all before; None if there were none.
    conditional: list[float | None]


def acceptance(rounds: Sequence[Figures]) -> Acceptance:
    """Sum the counts of rounds; empty lists if nothing was proposed.

    Rounds near a sequence's end propose fewer drafts. They are other rounds than the rest, so a
    quotient of neighbouring shares would not be a share of anything, and could pass 1.
    """
    width = max(len(one.proposed_by_position) for one in rounds)
    counts = np.zeros((3, width), np.int64)
    for one in rounds:
        by_position = [one.proposed_by_position, one.reached_by_position, one.accepted_by_position]
        counts[:, : len(one.proposed_by_position)] += np.array(by_position, np.int64)
    proposed, reached, accepted = counts.tolist()
    at_least = [some / most for some, most in zip(accepted, proposed, strict=True)]
    conditional = [
        some / most if most else None for some, most in zip(accepted, reached, strict=True)
    ]
    return Acceptance(at_least, conditional)


@dataclass(frozen=True, slots=True)
class Summary:
    """All rounds of one variant. Latencies and counts are medians of the rounds' values."""

    tokens_per_second: Spread
    ratio: Spread  # to the first variant, taken within each round
    requests_per_second: float
    time_to_first_token_ms: Percentiles | None
    inter_token_ms: Percentiles | None
    pause_ms: Percentiles | None
    tokens_per_step: float | None
    rows_per_pass: float | None
    drafting_share: float | None
    batched_tokens_per_step: float
    budget_share: float
    num_decode_passes: float
    num_preemptions: float
    cached_share: float
    acceptance: Acceptance


def summarise(rounds: Sequence[Figures], baseline: Sequence[Figures]) -> Summary:
    """rounds, baseline: the same rounds of a variant and of the first one."""
    speeds = [one.tokens_per_second for one in rounds]
    ratios = [
        speed / first.tokens_per_second for speed, first in zip(speeds, baseline, strict=True)
    ]

    def median(value: Callable[[Figures], float | None]) -> float | None:
        values = [found for one in rounds if (found := value(one)) is not None]
        return statistics.median(values) if values else None

    def number(value: Callable[[Figures], float]) -> float:
        return statistics.median(map(value, rounds))

    return Summary(
        tokens_per_second=spread(speeds),
        ratio=spread(ratios),
        requests_per_second=number(lambda one: one.requests_per_second),
        time_to_first_token_ms=_median([one.time_to_first_token_ms for one in rounds]),
        inter_token_ms=_median([one.inter_token_ms for one in rounds]),
        pause_ms=_median([one.pause_ms for one in rounds]),
        tokens_per_step=median(lambda one: one.tokens_per_step),
        rows_per_pass=median(lambda one: one.rows_per_pass),
        drafting_share=median(lambda one: one.drafting_share),
        batched_tokens_per_step=number(lambda one: one.batched_tokens_per_step),
        budget_share=number(lambda one: one.budget_share),
        num_decode_passes=number(lambda one: one.num_decode_passes),
        num_preemptions=number(lambda one: one.num_preemptions),
        cached_share=number(lambda one: one.cached_share),
        acceptance=acceptance(rounds),
    )


def _median(found: Sequence[Percentiles | None]) -> Percentiles | None:
    known = [one for one in found if one is not None]
    if not known:
        return None
    return Percentiles(
        statistics.median(one.p50 for one in known),
        statistics.median(one.p95 for one in known),
        statistics.median(one.p99 for one in known),
    )
