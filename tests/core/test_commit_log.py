"""Gaps between commits: one for every run but a sequence's first, preemptions bridged."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from core.harness import Setup, crowd, make_request, step
from paceline.core.commit_log import CommitLog

SETUPS = {
    "plain": Setup(k=0, num_blocks=400, budget=200),
    "preempting": Setup(num_blocks=26),
    "preempting, delayed": Setup(num_blocks=26, delay=1),
    "static": Setup(batching="static"),
}


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock takes a second, and the log looks once a step."""
    ticks = itertools.count()
    monkeypatch.setattr("paceline.core.commit_log.time.monotonic", lambda: float(next(ticks)))


@pytest.mark.parametrize("name", SETUPS)
def test_every_token_but_the_first_ends_a_gap(name: str) -> None:
    core = SETUPS[name].build()
    requests = crowd(5, 40, most_n=2)
    log = core.scheduler.stats.commit_log = CommitLog()
    for request in requests:
        core.scheduler.add_request(request)
    while core.has_work:
        step(core)
    stats, gaps = core.scheduler.stats, log.gaps()
    sequences = sum(len(request.sequences) for request in requests)
    assert gaps.num_tokens.sum() == stats.num_generation_tokens - sequences
    assert gaps.num_tokens.min() >= 1
    assert gaps.seconds.min() >= 1
    if name == "plain":
        assert stats.num_preemptions == 0
        assert (gaps.num_tokens == 1).all()
    else:
        assert stats.num_preemptions > 0
        assert gaps.seconds.max() > 1


def test_a_sequence_that_began_before_the_log() -> None:
    core = SETUPS["plain"].build()
    core.scheduler.add_request(make_request("r", [1, 2, 3], max_tokens=6))
    for _ in range(3):
        step(core)
    log = core.scheduler.stats.commit_log = CommitLog()
    while core.has_work:
        step(core)
    assert log.gaps().num_tokens.sum() == 2  # 6 tokens, 3 before, the fourth begins


def test_nothing_committed() -> None:
    gaps = CommitLog().gaps()
    assert len(gaps.seconds) == len(gaps.num_tokens) == 0
    assert gaps.num_tokens.dtype == np.int64
