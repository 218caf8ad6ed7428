"""Engines in this process and in their own: same tokens, and an end that is noticed."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
from typing import Any

import pytest

from paceline.bench.engines import ChildEngine, EngineSet, LocalEngine
from paceline.bench.workload import Workload
from paceline.errors import ConfigError, EngineError, RequestError

MakePlans = Any


def test_a_process_of_its_own_gives_the_same(make_plans: MakePlans) -> None:
    (plan,) = make_plans(ks=(2,))
    local = LocalEngine(plan)
    child = ChildEngine(plan)
    try:
        for k in (0, 2):
            here, there = local.run(k), child.run(k)
            assert here.token_ids == there.token_ids
            assert here.num_tokens == there.num_tokens == 24
            assert here.proposed_by_position.tolist() == there.proposed_by_position.tolist()
            assert len(here.proposed_by_position) == k
        assert local.machine["device"] == child.machine["device"] == "cpu"
        assert child.machine["threads"] >= 1
    finally:
        local.close()
        child.close()
    assert not multiprocessing.active_children()


def test_a_dying_process_is_an_error_and_no_hang(make_plans: MakePlans) -> None:
    (plan,) = make_plans()
    child = ChildEngine(plan)
    (process,) = multiprocessing.active_children()
    os.kill(process.pid or 0, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"ended unexpectedly \(signal 9\). hint: signal 9"):
        child.run(None)
    child.close()
    assert not multiprocessing.active_children()


def test_errors_of_a_process_are_raised_here(make_plans: MakePlans) -> None:
    (plan,) = make_plans()
    beyond = Workload([[10**6]], plan.workload.sampling[:1])
    child = ChildEngine(dataclasses.replace(plan, workload=beyond))
    with pytest.raises(RequestError, match="prompt token 0 is 1000000"):
        child.run(None)
    child.close()
    unloadable = dataclasses.replace(plan, arguments={**plan.arguments, "model": "/no/such"})
    with pytest.raises(ConfigError, match="there is no directory `/no/such`"):
        ChildEngine(unloadable)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("placement", ["shared", "alternating"])
def test_engines_are_opened_warm_and_closed(
    make_plans: MakePlans, monkeypatch: pytest.MonkeyPatch, placement: Any
) -> None:
    log: list[str] = []

    class Scripted:
        machine: dict[str, Any] = {}  # noqa: RUF012  a constant

        def __init__(self, plan: Any) -> None:
            self.name = plan.spec.name
            log.append(f"open {self.name}")

        def run(self, k: int | None) -> None:
            log.append(f"{self.name} k={k}")

        def close(self) -> None:
            log.append(f"close {self.name}")

    for kind in ("LocalEngine", "ChildEngine"):
        monkeypatch.setattr(f"paceline.bench.engines.{kind}", Scripted)
    plans = make_plans({"a": {}, "b": {}})
    opened = [["open a", "a k=0", "a k=3"], ["open b", "b k=None"]]
    with EngineSet(plans, [[0, 3], [None]], placement) as engines:
        assert set(engines.machines) == ({0, 1} if placement == "shared" else set())
        assert log == (opened[0] + opened[1] if placement == "shared" else [])
        log.clear()
        engines.get(0)
        engines.get(1)
        engines.get(1)
        engines.get(0)
        assert set(engines.machines) == {0, 1}
    turns = [*opened[0], "close a", *opened[1], "close b", *opened[0], "close a"]
    assert log == (["close b", "close a"] if placement == "shared" else turns)
