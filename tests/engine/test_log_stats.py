"""The periodic line: what it says, and when nothing is said."""

from __future__ import annotations

import logging

import pytest

from core.harness import Setup, make_request, step
from paceline.engine import log_stats
from paceline.engine.log_stats import StatsLogger


class Clock:
    """Stands in for ``time``; moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(log_stats, "time", clock)
    return clock


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    written: list[str] = []
    monkeypatch.setattr(log_stats.logger, "info", written.append)
    return written


def test_a_line_every_interval_of_work(clock: Clock, lines: list[str]) -> None:
    core = Setup(num_blocks=200, acceptance=1.0).build()
    logger = StatsLogger(core.scheduler)
    shared = list(range(20))
    core.scheduler.add_request(make_request("first", shared, max_tokens=40))
    for _ in range(4):
        step(core)
        clock.now += 1
        logger.tick()
    assert lines == []
    core.scheduler.add_request(make_request("second", shared, max_tokens=60))
    while core.has_work:
        step(core)
    clock.now += 1
    logger.tick()
    (line,) = lines
    # 20 + 4 prompt tokens were computed in 5 seconds, and 16 of 40 found.
    assert line.startswith("prompt 4.8 tokens/s, generation 20.0 tokens/s, running 0, waiting 0, ")
    assert "tokens a step, prefix hits 40.0%, acceptance 100.0%, k 3 (fixed)" in line


def test_nothing_is_said_of_an_idle_interval(clock: Clock, lines: list[str]) -> None:
    core = Setup(num_blocks=200, k=0).build()
    logger = StatsLogger(core.scheduler)
    for _ in range(30):
        clock.now += 1
        logger.tick()
    assert lines == []
    core.scheduler.add_request(make_request("a", [1, 2, 3], max_tokens=10))
    while core.has_work:
        step(core)
    for _ in range(30):
        clock.now += 1
        logger.tick()
    (line,) = lines
    assert "generation 2.0 tokens/s" in line
    assert "prefix hits 0.0%" in line
    assert "acceptance" not in line


def test_idle_time_before_work_is_nobodys(clock: Clock, lines: list[str]) -> None:
    core = Setup(num_blocks=200).build()
    logger = StatsLogger(core.scheduler)
    clock.now += 1000
    logger.begin()
    core.scheduler.add_request(make_request("a", [1, 2, 3], max_tokens=10))
    while core.has_work:
        step(core)
        logger.tick()
    assert lines == []
    clock.now += 4
    logger.begin()  # short pauses begin no new interval
    clock.now += 1
    logger.tick()
    assert "generation 2.0 tokens/s" in lines[0]


def test_the_line_goes_to_the_log(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    core = Setup(num_blocks=200).build()
    logger = StatsLogger(core.scheduler)
    core.scheduler.add_request(make_request("a", [1, 2, 3], max_tokens=3))
    step(core)
    clock.now += 6
    logging.getLogger("paceline").addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, "paceline"):
            logger.tick()
    finally:
        logging.getLogger("paceline").removeHandler(caplog.handler)
    assert "running 1" in caplog.text
