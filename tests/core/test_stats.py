"""What an engine's totals count: rounds by length and reason, prompts and prefix hits once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from core.harness import Setup, crowd, run, step
from paceline.core.stats import EngineStats
from paceline.request import Request
from paceline.spec.policy import FixedPolicy, make_policy


def choose(reason: str, rows: list[tuple[int, int, bool]]) -> EngineStats:
    """k = 4 for rows of drafts, room, lagging."""
    stats = EngineStats()
    drafts, room, lagging = (np.array(column) for column in zip(*rows, strict=True))
    stats.record_choice(4, reason, drafts, room, lagging.astype(np.bool_))
    return stats


def test_rounds_are_counted_by_what_decided_their_length() -> None:
    rows = [(4, 9, False), (4, 4, False), (2, 2, False), (0, 0, False), (0, -3, False)]
    rows += [(0, 9, True), (0, 0, True), (1, 5, False), (0, 5, False)]
    stats = choose("token budget 64 for 9 rows", rows)
    assert stats.choices == {
        (4, "token budget"): 2,
        (2, "end of sequence"): 1,
        (0, "end of sequence"): 2,
        (0, "catch-up"): 2,
        (1, "drafter context"): 1,
        (0, "drafter context"): 1,
    }
    assert (stats.last_k, stats.last_k_reason) == (4, "token budget 64 for 9 rows")


def test_reasons_are_counted_without_their_numbers() -> None:
    reasons = ["fixed", "free blocks: 3", "disabled by batch size: 5 running > 4"]
    counted = {why for reason in reasons for _, why in choose(reason, [(4, 9, False)]).choices}
    assert counted == {"fixed", "free blocks", "disabled by batch size"}


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        (Setup(num_blocks=26), {"fixed", "free blocks"}),
        (Setup(budget=16, k=7, num_blocks=200), {"fixed", "token budget"}),
        (Setup(num_blocks=400, budget=200), {"fixed", "end of sequence"}),
        (Setup(drafter_context=30, delay=1), {"fixed", "drafter context"}),
        (Setup(policy=FixedPolicy(3, 2)), {"fixed", "disabled by batch size", "catch-up"}),
        (Setup(policy=make_policy(None)), {"no drafter"}),
    ],
    ids=["few blocks", "low budget", "plenty", "short context", "off when many run", "no drafter"],
)
def test_every_round_has_a_reason(setup: Setup, expected: set[str]) -> None:
    core = setup.build()
    for request in crowd(4, 30):
        core.scheduler.add_request(request)
    planned: Counter[int] = Counter()
    plan = core.scheduler.schedule

    def watched() -> object:
        out = plan()
        planned.update(out.num_draft_tokens.tolist())
        return out

    core.scheduler.schedule = watched  # type: ignore[method-assign, assignment]
    while core.has_work:
        step(core)
    counted: Counter[int] = Counter()
    for (k, _), rounds in core.scheduler.stats.choices.items():
        counted[k] += rounds
    assert counted == planned
    assert expected <= {why for _, why in core.scheduler.stats.choices}


@pytest.mark.parametrize("setup", [Setup(), Setup(num_blocks=26, delay=1), Setup(caching=False)])
def test_prompts_and_prefix_hits_are_counted_once_a_request(setup: Setup) -> None:
    requests = crowd(5, 50, most_n=3)
    stats = run(setup, requests, seed=2).core.scheduler.stats
    assert stats.num_preemptions > 0
    total = sum(request.prompt_len for request in requests)
    assert stats.num_request_prompt_tokens == total
    found = sum(request.sequences[0].num_cached_tokens for request in requests)
    assert (found > 0) == setup.caching
    assert stats.num_prefix_queries == (total if setup.caching else 0)
    assert stats.num_prefix_hits == found


def test_rounds_of_a_request_are_kept_where_asked_for() -> None:
    requests: list[Request] = crowd(6, 30)
    for request in requests[::2]:
        request.keep_rounds = True
    outcome = run(Setup(num_blocks=26, delay=1), requests, seed=3)
    assert outcome.core.scheduler.stats.num_preemptions > 0
    for i, request in enumerate(requests):
        drafts = request.sequences[0].speculative
        if i % 2:
            assert drafts.rounds == []
            continue
        assert len(drafts.rounds) == drafts.num_drafts
        assert sum(proposed for proposed, _ in drafts.rounds) == drafts.num_draft_tokens
        assert sum(accepted for _, accepted in drafts.rounds) == drafts.num_accepted_tokens
    assert any(request.sequences[0].speculative.rounds for request in requests)
