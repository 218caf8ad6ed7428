"""From runs to figures: percentiles, steps, acceptance, ratios within rounds."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import LLM, SamplingParams
from paceline.bench.figures import Figures, Percentiles, acceptance, figures_of, summarise
from paceline.bench.measure import ChosenLength, Run, measure
from paceline.bench.rounds import run_rounds
from paceline.bench.variants import Variant
from paceline.core.commit_log import Gaps
from paceline.core.stats import EngineStats
from paceline.errors import EngineError

RUN = Run(
    seconds=2.0,
    num_requests=2,
    num_tokens=10,
    num_prompt_tokens=8,
    num_cached_tokens=2,
    num_steps=5,
    num_decode_passes=4,
    num_batched_tokens=50,
    num_preemptions=1,
    proposed_by_position=np.array([4, 2]),
    reached_by_position=np.array([4, 2]),
    accepted_by_position=np.array([3, 1]),
    first_token_seconds=np.array([0.1, 0.3]),
    gaps=Gaps(np.array([0.1, 0.2, 0.3, 0.3, 0.4]), np.array([1, 2, 1, 3, 1])),
    token_ids=[[1, 2], [3]],
)


def figures(speed: float, **changes: Any) -> Figures:
    changes = {"tokens_per_second": speed, **changes}
    return dataclasses.replace(figures_of(RUN, 100, RUN.token_ids), **changes)


def test_figures_of_a_run() -> None:
    found = figures_of(RUN, 100, [[1, 2], [4]])
    assert found.tokens_per_second == 5
    assert found.requests_per_second == 1
    assert found.tokens_per_step == pytest.approx(8 / 5)
    assert found.rows_per_pass == pytest.approx(5 / 4)
    assert (found.batched_tokens_per_step, found.budget_share) == (10, 0.1)
    assert found.cached_share == 0.25
    assert found.drafting_share == 4 / 5  # rounds that drafted, of a sequence's decode steps
    assert found.num_same_outputs == 1
    # Per token: 0.1, 0.1 twice, 0.3, 0.1 three times, 0.4.
    assert found.inter_token_ms is not None
    assert found.inter_token_ms.p50 == pytest.approx(100)
    assert found.pause_ms is not None
    assert found.pause_ms.p50 == pytest.approx(300)
    assert found.time_to_first_token_ms is not None
    assert found.time_to_first_token_ms.p50 == pytest.approx(200)


def test_one_token_a_request_has_no_gaps() -> None:
    alone = dataclasses.replace(RUN, gaps=Gaps(np.zeros(0), np.zeros(0, np.int64)))
    found = figures_of(dataclasses.replace(alone, num_decode_passes=0), 100, alone.token_ids)
    assert found.inter_token_ms is found.pause_ms is found.tokens_per_step is None
    assert found.rows_per_pass is found.drafting_share is None
    assert summarise([found], [found]).inter_token_ms is None


def test_acceptance_sums_rounds_of_different_depth() -> None:
    deep = drafts([10, 8, 4], [10, 4, 2], [5, 2, 1])
    found = acceptance([deep, drafts([10], [10], [9])])
    assert found.at_least == pytest.approx([0.7, 0.25, 0.25])
    assert found.conditional == pytest.approx([0.7, 0.5, 0.5])
    none = acceptance([drafts([], [], [])])
    assert none.at_least == none.conditional == []
    assert acceptance([drafts([5, 5], [5, 0], [0, 0])]).conditional == [0, None]


def drafts(proposed: list[int], reached: list[int], accepted: list[int]) -> Figures:
    return figures(
        1,
        proposed_by_position=proposed,
        reached_by_position=reached,
        accepted_by_position=accepted,
    )


ROUND = st.integers(1, 5).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))


@given(st.lists(st.lists(ROUND, min_size=1), min_size=1))
def test_conditional_acceptance_is_a_share_of_the_rounds_that_came_so_far(
    steps: list[list[tuple[int, int]]],
) -> None:
    """Rounds of any depth: short ones that fail must not raise the rate of the longer ones."""
    stats = EngineStats()
    for rows in steps:
        stats.record_drafts(*np.array(rows, np.int64).T)
    found = acceptance(
        [
            drafts(
                stats.proposed_by_position.tolist(),
                stats.reached_by_position.tolist(),
                stats.accepted_by_position.tolist(),
            )
        ]
    )
    every = [one for rows in steps for one in rows]
    for i, (at_least, conditional) in enumerate(
        zip(found.at_least, found.conditional, strict=True)
    ):
        deep = [accepted for proposed, accepted in every if proposed > i]
        reached = [accepted for accepted in deep if accepted >= i]
        assert at_least == sum(accepted > i for accepted in deep) / len(deep)
        due = sum(accepted > i for accepted in reached) / len(reached) if reached else None
        assert conditional == due


def test_ratios_are_taken_within_rounds() -> None:
    """The machine halves its speed after the first round; the ratio does not notice."""
    first = [figures(speed) for speed in (100, 50, 50)]
    other = [figures(speed) for speed in (150, 75, 80)]
    summary = summarise(other, first)
    assert (summary.ratio.low, summary.ratio.median, summary.ratio.high) == (1.5, 1.5, 1.6)
    assert summary.tokens_per_second.low == 75


def test_latencies_are_medians_of_the_rounds() -> None:
    rounds = [figures(1, pause_ms=Percentiles(p, 2 * p, 3 * p)) for p in (1.0, 9.0, 2.0)]
    assert summarise(rounds, rounds).pause_ms == Percentiles(2, 4, 6)


def test_rounds_rotate_and_come_in_the_variants_order() -> None:
    order: list[tuple[int, int | None]] = []

    class Scripted:
        def __init__(self, index: int) -> None:
            self.index = index

        def run(self, k: int | None) -> Run:
            order.append((self.index, k))
            return dataclasses.replace(RUN, num_preemptions=100 * self.index + (k or 0))

    class Engines:
        get = Scripted

    class Plan:
        class config:
            class scheduler:
                max_num_batched_tokens = 100

    variants = [Variant("x", 0, 0), Variant("y", 0, 3), Variant("z", 1, None)]
    rounds = list(run_rounds(Engines(), [Plan, Plan], variants, 3))  # type: ignore[arg-type, list-item]
    assert [[one.num_preemptions for one in figures] for figures in rounds] == [[0, 3, 100]] * 3
    assert order == [
        (0, 0),
        (0, 3),
        (1, None),
        (1, None),
        (0, 3),
        (0, 0),
        (0, 0),
        (0, 3),
        (1, None),
    ]


def test_measuring_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = ChosenLength(3)
    sampling = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (5, 9)]
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    with LLM(
        "paceline/demo",
        speculative_model="paceline/demo-draft",
        num_speculative_tokens=3,
        dtype="float32",
        max_num_seqs=2,
        max_model_len=64,
        policy=policy,
    ) as llm:
        runs = {}
        for k in (3, 0):
            policy.k = k
            started = time.monotonic()
            runs[k] = measure(llm, prompts, sampling)
            assert runs[k].seconds <= time.monotonic() - started
        assert llm.engine.stats.commit_log is None
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        outputs[1].error = "all logits are NaN"
        monkeypatch.setattr(llm, "generate", lambda *_, **__: outputs)
        with pytest.raises(EngineError, match=r"a request failed .* all logits are NaN"):
            measure(llm, prompts, sampling)
    for run in runs.values():
        assert (run.num_requests, run.num_tokens, run.num_preemptions) == (2, 14, 0)
        assert run.num_prompt_tokens == 7
        assert run.gaps.num_tokens.sum() == 12
        assert 0 < run.first_token_seconds.min() <= run.first_token_seconds.max() < run.seconds
        # The longer request decodes throughout.
        assert run.gaps.seconds.sum() <= 2 * run.seconds
    assert runs[0].token_ids == runs[3].token_ids
    assert (runs[0].gaps.num_tokens == 1).all()
    assert runs[0].num_decode_passes == 8
    assert not len(runs[0].proposed_by_position)
    proposed, reached, accepted = (
        runs[3].proposed_by_position,
        runs[3].reached_by_position,
        runs[3].accepted_by_position,
    )
    assert len(proposed) == len(reached) == len(accepted) > 0
    assert reached[0] == proposed[0]
    assert (proposed >= reached).all()
    assert (reached >= accepted).all()
    assert runs[3].gaps.num_tokens.max() <= 4
