"""What the observer makes of deltas and of the engine's own figures."""

from __future__ import annotations

import time

import pytest

from paceline.outputs import SpeculativeMetrics
from paceline.server.messages import Stats, Times
from paceline.server.observer import Distribution, Observer, kv_use
from server.serving import delta


def stats(steps: int, **fields: object) -> Stats:
    values: dict[str, object] = {
        "num_running": 1,
        "num_waiting": 0,
        "num_free_blocks": 48,
        "num_blocks": 64,
        "num_steps": steps,
        "num_prompt_tokens": 10 * steps,
        "num_generation_tokens": 2 * steps,
        "num_cached_tokens": steps,
        "num_preemptions": 0,
        "num_batched_tokens": 12 * steps,
        "num_drafts": steps,
        "num_draft_tokens": 3 * steps,
        "num_accepted_tokens": steps,
        "proposed_by_position": [steps, steps, steps],
        "accepted_by_position": [steps, 0, 0],
        "choices": [(3, "fixed", steps)],
    }
    return Stats(**{**values, **fields})  # type: ignore[arg-type]


def test_a_streamed_request() -> None:
    seen = Observer()
    seen.begin("a", "chat", time.monotonic() - 0.5, 1)
    seen.take([delta("a", "xy")])
    seen.take([delta("a", "zzz")])
    metrics = SpeculativeMetrics(num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3)
    last = delta("a", "w", "stop", speculative=metrics, times=Times(0.25, 0.4, 0.6))
    seen.take([last])
    (record,) = seen.recent
    assert (record["id"], record["kind"], record["status"]) == ("a", "chat", "stop")
    assert (record["output_tokens"], record["prompt_tokens"]) == (6, 3)
    assert record["queue_s"] == 0.25
    assert 0.5 <= record["ttft_s"] < 1
    assert (record["acceptance"], record["mean_k"]) == (0.5, 3.0)
    assert sum(seen.inter_token.counts) == 2  # steps after the first, not tokens
    assert sum(seen.ttft.counts) == sum(seen.latency.counts) == sum(seen.queue.counts) == 1
    assert seen.finished == {"stop": 1}
    seen.take([delta("a", "late")])  # of a request that has ended: nobody's
    assert sum(seen.inter_token.counts) == 2


def test_a_whole_answer_has_the_engines_first_token() -> None:
    seen = Observer()
    seen.begin("a", "completion", time.monotonic(), 2)
    for index in (0, 1):
        seen.take([delta("a", "abc", "length", index=index, times=Times(0.0, 0.125, 2.0))])
    (record,) = seen.recent
    assert record["ttft_s"] == pytest.approx(0.125, abs=0.01)
    assert record["output_tokens"] == 6
    assert seen.finished == {"length": 2}
    assert sum(seen.inter_token.counts) == 0


def test_requests_that_do_not_finish() -> None:
    seen = Observer()
    for name in ("left", "lost", "failed"):
        seen.begin(name, "chat", time.monotonic(), 1)
    seen.leave("left", "abort")
    seen.leave("lost", "error")
    seen.leave("lost", "error")
    seen.leave("never came", "abort")
    seen.take([delta("failed", "", "error", error="a step failed")])
    assert seen.finished == {"abort": 1, "error": 2}
    assert [record["status"] for record in seen.recent] == ["error", "error", "abort"]
    assert sum(seen.latency.counts) == 0


def test_totals_never_go_down() -> None:
    seen = Observer()
    seen.engine(stats(5))
    seen.engine(stats(7))
    assert seen.totals["num_generation_tokens"] == 14
    seen.engine(None)  # it died
    assert seen.totals["num_generation_tokens"] == 14
    assert kv_use(seen.stats) == 0.0
    seen.engine(stats(2))  # and a new one counts from nothing
    assert seen.totals["num_generation_tokens"] == 18
    assert seen.totals["choice", 3, "fixed"] == 9
    assert seen.totals["accepted", 1] == 9
    seen.engine(stats(3))
    assert seen.totals["num_steps"] == 10


def test_samples_are_of_their_second() -> None:
    seen = Observer()
    seen.engine(stats(4))
    seen.sample()
    seen.engine(
        stats(6, num_running=3, choices=[(3, "fixed", 5), (0, "disabled by batch size", 1)])
    )
    seen.sample()
    sample = seen.samples[-1]
    assert sample["batched_tokens"] == 12
    assert (sample["running"], sample["kv_use"]) == (3, 0.25)
    assert sample["k"] == {"3": 1, "0": 1}
    assert sample["reasons"] == {"fixed": 1, "disabled by batch size": 1}
    assert sample["prefix_hit_rate"] == pytest.approx(1 / 11)
    seen.sample()
    assert seen.samples[-1]["generation_tokens"] == 0
    assert seen.positions()[0] == {"position": 1, "proposed": 6, "accepted": 6}


def test_distributions_count_up_to_their_bounds() -> None:
    values = Distribution((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        values.add(value)
    assert values.counts == [2, 1, 1]
    assert values.sum == 12.0
    assert values.percentiles((0.5, 0.99)) == [1.5, 9.0]
    assert Distribution((1.0,)).percentiles() is None
