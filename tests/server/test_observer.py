"""What the observer makes of deltas and of the engine's own figures."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
        "num_request_prompt_tokens": 11 * steps,
        "num_generation_tokens": 2 * steps,
        "num_prefix_queries": 11 * steps,
        "num_prefix_hits": steps,
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


def begin(
    seen: Observer, name: str, *, ago: float = 0.0, outputs: int = 1, stream: bool = True
) -> float:
    """A request of three prompt tokens; when it arrived."""
    arrived = time.monotonic() - ago
    seen.begin(name, "chat", arrived, outputs, 3, stream=stream)
    return arrived


def test_a_streamed_request() -> None:
    seen = Observer()
    now = begin(seen, "a", ago=0.5) + 0.5
    seen.take([delta("a", "xy")])
    seen.take([delta("a", "zzz")])
    metrics = SpeculativeMetrics(num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3)
    times = Times(now + 0.25, now + 0.4, now + 2.9)
    seen.take([delta("a", "w", "stop", speculative=metrics, times=times)])
    (record,) = seen.recent
    assert (record["id"], record["kind"], record["status"]) == ("a", "chat", "stop")
    assert (record["output_tokens"], record["prompt_tokens"]) == (6, 3)
    assert record["queue_s"] == pytest.approx(0.25, abs=0.05)
    assert 0.5 <= record["ttft_s"] < 0.6  # when it is written, not when the engine had it
    assert (record["acceptance"], record["mean_k"]) == (0.5, 3.0)
    assert record["tokens_per_s"] == pytest.approx(5 / 2.5)
    assert seen.inter_token.count == 2  # events after the first, not tokens
    assert seen.prefill.sum == pytest.approx(0.15)
    assert seen.decode.sum == pytest.approx(2.5)
    assert seen.inference.sum == pytest.approx(2.65)
    assert seen.per_output_token.sum == pytest.approx(0.5)
    once = (seen.ttft, seen.latency, seen.queue, seen.prompt_lengths, seen.output_lengths)
    assert [one.count for one in once] == [1] * 5
    assert seen.finished == {"stop": 1}
    seen.take([delta("a", "late")])  # of a request that has ended: nobody's
    assert seen.inter_token.count == 2


def test_a_whole_answer_has_the_engines_first_token() -> None:
    seen = Observer()
    now = begin(seen, "a", outputs=2, stream=False)
    for index in (0, 1):
        times = Times(now, now + 0.125, now + 2.0)
        seen.take([delta("a", "abc", "length", index=index, times=times)])
    (record,) = seen.recent
    assert record["ttft_s"] == pytest.approx(0.125)
    assert record["output_tokens"] == 6
    assert record["tokens_per_s"] == pytest.approx(4 / 1.875)
    assert seen.finished == {"length": 2}
    assert seen.inter_token.count == 0
    assert (seen.ttft.count, seen.latency.count) == (1, 1)
    assert seen.per_output_token.sum == pytest.approx(1.875 / 2)


def test_requests_that_do_not_finish() -> None:
    seen = Observer()
    for name in ("left", "lost", "failed"):
        begin(seen, name, outputs=2)
    seen.leave("left", "abort")
    seen.leave("lost", "error")
    seen.leave("lost", "error")
    seen.leave("never came", "abort")
    seen.take([delta("failed", "x")])
    seen.take([delta("failed", "", "stop", index=1)])
    seen.take([delta("failed", "", "error", error="a step failed")])
    assert seen.finished == {"abort": 2, "error": 3, "stop": 1}
    assert [record["status"] for record in seen.recent] == ["error", "error", "abort"]
    assert [record["prompt_tokens"] for record in seen.recent] == [3, 3, 3]
    assert seen.latency.count == 0
    assert seen.ttft.count == 1


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
    seen.engine(None)
    seen.engine(None)
    seen.engine(stats(9))  # with more than the one before it: a new one all the same
    assert seen.totals["num_steps"] == 19


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
    assert values.percentiles() is None
    for value in (0.5, 1.0, 1.5, 9.0):
        values.add(value)
    assert values.cumulative() == [2, 3, 4]
    assert (values.count, values.sum) == (4, 12.0)
    values.add(1e9)
    assert values.cumulative() == [2, 3, 5]


@given(st.lists(st.floats(1e-3, 100), min_size=1, max_size=300), st.floats(0.01, 1))
def test_percentiles_are_close(values: list[float], share: float) -> None:
    seen = Distribution((1.0,))
    for value in values:
        seen.add(value)
    (found,) = seen.percentiles((share,)) or (0.0,)
    true = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    assert found == pytest.approx(true, rel=0.11)


def test_percentiles_are_of_the_last_minute() -> None:
    seen = Distribution((1.0,))
    seen.add(100.0)
    for _ in range(30):
        seen.next_second()
    seen.add(1.0)
    assert (seen.percentiles((1.0,)) or [0])[0] == pytest.approx(100, rel=0.1)
    for _ in range(31):
        seen.next_second()
    assert (seen.percentiles((1.0,)) or [0])[0] == pytest.approx(1, rel=0.1)
    for _ in range(30):
        seen.next_second()
    assert seen.percentiles() is None
    assert seen.count == 2
