"""The scheduler on the simulated runner: same tokens however it schedules, nothing lost, no limit
passed.

The runner checks every KV slot it reads, so a block handed out twice or freed too early fails here.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.harness import Setup, crowd, drain, make_request, run, step
from paceline.errors import RequestError
from paceline.spec.policy import DraftChoice, DraftOutcome, FixedPolicy, Load

PLAIN = Setup(k=0, num_blocks=400, budget=200)
VARIANTS = {
    "speculation": Setup(),
    "delayed": Setup(delay=1),
    "plain delayed": Setup(k=0, delay=1),
    "static": Setup(batching="static"),
    "static delayed": Setup(batching="static", delay=1),
    "no prefix cache": Setup(caching=False),
    "always accepted": Setup(acceptance=1.0),
    "never accepted, delayed": Setup(acceptance=0.0, delay=1),
    "lookup drafter": Setup(drafter_has_kv=False, delay=1),
    "tiny pool": Setup(num_blocks=26),
    "tiny pool delayed": Setup(num_blocks=26, delay=1),
    "long drafts": Setup(k=9, budget=80, delay=1),
    "whole prompts": Setup(budget=100, chunked=False),
    "short drafter context": Setup(drafter_context=30, delay=1),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("seed", [1, 2])
def test_tokens_do_not_depend_on_scheduling(name: str, seed: int) -> None:
    plain = run(PLAIN, crowd(seed, 60), seed=seed)
    other = run(VARIANTS[name], crowd(seed, 60), seed=seed + 7)
    assert other.outputs == plain.outputs
    assert other.reasons == plain.reasons
    stats, setup = other.core.scheduler.stats, VARIANTS[name]
    assert other.core.scheduler.kv.pool.num_free == setup.num_blocks
    # The paths named above really ran.
    assert plain.core.scheduler.stats.num_preemptions == 0
    assert stats.num_preemptions > 0 or name == "whole prompts"
    assert (stats.num_cached_tokens > 0) == setup.caching
    if setup.chunked:
        assert stats.num_prefill_chunks > stats.num_finished
    if setup.k:
        assert stats.num_draft_tokens > 0
        if setup.acceptance in (0.0, 1.0):
            assert stats.acceptance_rate == setup.acceptance


@pytest.mark.parametrize("setup", [Setup(num_blocks=30), Setup(delay=1), Setup(caching=False)])
def test_outputs_of_one_request_share_its_prompt(setup: Setup) -> None:
    wide = Setup(k=0, num_blocks=900, budget=300, max_num_seqs=64)
    plain = run(wide, crowd(3, 40, most_n=4), seed=1)
    shared = run(setup, crowd(3, 40, most_n=4), seed=2)
    assert shared.outputs == plain.outputs
    assert shared.core.scheduler.stats.num_cached_tokens > 0
    several = [outputs for outputs in shared.outputs.values() if len(outputs) > 1]
    assert any(len({tuple(ids) for ids in outputs}) == len(outputs) for outputs in several)


@pytest.mark.parametrize("delay", [0, 1])
def test_thousand_requests_with_aborts_leave_every_block_free(delay: int) -> None:
    setup = Setup(num_blocks=60, max_num_seqs=12, budget=40, delay=delay)
    outcome = run(setup, crowd(11, 1000, most_n=2), seed=5, abort=0.1)
    scheduler = outcome.core.scheduler
    assert scheduler.kv.pool.num_free == setup.num_blocks
    assert not scheduler.table.occupied.any()
    assert scheduler.stats.num_preemptions > 0
    reasons = {reason for of_request in outcome.reasons.values() for reason, _ in of_request}
    assert reasons == {"stop", "length", "abort"}
    finished = [sequence for events in outcome.events for sequence in events.finished]
    aborted = [r for of_request in outcome.reasons.values() for r, _ in of_request if r == "abort"]
    assert len(finished) == len(set(finished)) == sum(len(o) for o in outcome.outputs.values())
    assert aborted


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_blocks=st.integers(25, 60),
    block_size=st.sampled_from([1, 4, 16]),
    max_num_seqs=st.integers(1, 9),
    extra_budget=st.integers(0, 40),
    k=st.integers(0, 6),
    delay=st.integers(0, 1),
    static=st.booleans(),
    caching=st.booleans(),
    acceptance=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_any_configuration_serves_any_crowd(
    seed: int,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    extra_budget: int,
    k: int,
    delay: int,
    static: bool,
    caching: bool,
    acceptance: float,
) -> None:
    setup = Setup(
        num_blocks=num_blocks * 4 // block_size + 5,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        budget=max_num_seqs + extra_budget,
        k=k,
        delay=delay,
        batching="static" if static else "continuous",
        caching=caching,
        acceptance=acceptance,
    )
    requests = crowd(seed, 25, most_n=2)
    outcome = run(setup, requests, seed=seed, abort=0.03)
    assert all(request.finished for request in requests)
    assert outcome.core.scheduler.kv.pool.num_free == setup.num_blocks


def test_lone_sequence_finishes_in_a_pool_of_its_own_size() -> None:
    for prompt_len, max_tokens in [(1, 1), (4, 1), (5, 4), (8, 9), (7, 30)]:
        for k, delay in [(0, 0), (0, 1), (3, 0), (5, 1)]:
            blocks = -(-(prompt_len + max_tokens - 1) // 4)
            core = Setup(num_blocks=blocks, k=k, delay=delay, budget=40).build()
            request = make_request("r", list(range(prompt_len)), max_tokens=max_tokens)
            core.scheduler.add_request(request)
            drain(core)
            assert len(request.sequences[0].output_token_ids) == max_tokens
            assert core.scheduler.stats.num_preemptions == 0


def test_sequence_alone_and_out_of_blocks_ends_with_length() -> None:
    for delay in (0, 1):
        core = Setup(num_blocks=3, delay=delay).build()
        request = make_request("r", [1, 2, 3, 4, 5], max_tokens=50)
        core.scheduler.add_request(request)
        drain(core)
        sequence = request.sequences[0]
        assert sequence.finish_reason == "length"
        # 12 slots hold all tokens but the last, which needs none.
        assert len(sequence.token_ids) == 13


def test_oldest_sequence_is_never_preempted() -> None:
    core = Setup(num_blocks=12, k=0).build()
    requests = [make_request(f"r{i}", [1, 2, 3, i], max_tokens=25) for i in range(4)]
    for request in requests:
        core.scheduler.add_request(request)
    drain(core)
    assert core.scheduler.stats.num_preemptions > 0
    assert requests[0].sequences[0].num_preemptions == 0
    assert [r.sequences[0].finish_reason for r in requests] == ["length"] * 4


def test_request_that_can_never_fit_is_refused_with_numbers() -> None:
    core = Setup(num_blocks=5, max_model_len=30).build()
    with pytest.raises(RequestError, match="30 tokens, but max_model_len is 30"):
        core.scheduler.add_request(make_request("r", [1] * 30))
    with pytest.raises(
        RequestError, match=r"21 tokens, but the KV pool holds 20 \(5 blocks of 4\)"
    ):
        core.scheduler.add_request(make_request("r", [1] * 21))
    with pytest.raises(RequestError, match="no tokens"):
        core.scheduler.add_request(make_request("r", []))
    core.scheduler.add_request(make_request("r", [1] * 20, max_tokens=1))
    drain(core)
    assert core.scheduler.kv.pool.num_free == 5


def test_decode_goes_on_while_a_long_prompt_streams_in() -> None:
    core = Setup(budget=10, k=0, num_blocks=100, max_model_len=200).build()
    short = make_request("short", [1, 2], max_tokens=40)
    core.scheduler.add_request(short)
    step(core)
    core.scheduler.add_request(make_request("long", list(range(40)) * 3, max_tokens=2))
    before = core.scheduler.stats.num_generation_tokens
    for _ in range(10):
        step(core)
    # 120 tokens at 9 a step take 14 steps, and none of them stalls the short one.
    assert core.scheduler.stats.num_generation_tokens - before == 10


def test_drafts_leave_room_for_waiting_prompts() -> None:
    core = Setup(budget=16, k=7, num_blocks=100, acceptance=0.0, max_model_len=200).build()
    for i in range(2):
        core.scheduler.add_request(make_request(f"r{i}", [i], max_tokens=60))
    step(core)
    core.scheduler.add_request(make_request("long", list(range(40)), max_tokens=2))
    planned = core.scheduler.schedule()
    assert int(planned.prefill_lens.sum()) >= 4
    assert 0 < planned.k < 7
    assert "token budget 16" in planned.k_reason


def test_static_batch_admits_nothing_until_all_have_finished() -> None:
    setup = Setup(batching="static", max_num_seqs=3, num_blocks=100, budget=30, k=0)
    core = setup.build()
    lengths = [3, 20, 6, 5, 5]
    requests = [make_request(f"r{i}", [i] * 9, max_tokens=m) for i, m in enumerate(lengths)]
    for request in requests:
        core.scheduler.add_request(request)
    sizes = set()
    order: list[str] = []
    while core.has_work:
        planned = core.scheduler.schedule()
        if len(planned.decode_rows):
            sizes.add(len(planned.decode_rows))
        core.scheduler.update_from_output(core.runner.collect(core.runner.launch(planned)))
        order += [s.request.request_id for s in core.scheduler.take_events().finished]
    assert sizes == {3, 2}  # finished rows are computed until the batch ends
    assert order == ["r0", "r2", "r1", "r3", "r4"]


def test_catch_up_while_a_static_batch_forms_stays_within_the_blocks() -> None:
    """Prompts trickle in at the smallest budget, so that early rows wait with their first token."""
    setup = Setup(
        num_blocks=105,
        block_size=1,
        max_num_seqs=4,
        budget=4,
        k=1,
        batching="static",
        acceptance=0.0,
    )
    outcome = run(setup, crowd(0, 25, most_n=2), seed=0, abort=0.03)
    assert outcome.core.scheduler.stats.num_catch_up_tokens > 0


class _Schedule:
    """A policy that follows a list of draft lengths, then repeats its last."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.max_k = max(lengths)
        self.outcomes: list[DraftOutcome] = []

    def choose(self, load: Load) -> DraftChoice:
        k = self.lengths.pop(0) if len(self.lengths) > 1 else self.lengths[0]
        return DraftChoice(k, "scheduled")

    def observe(self, outcome: DraftOutcome) -> None:
        self.outcomes.append(outcome)


@pytest.mark.parametrize("delay", [0, 1])
def test_drafter_catches_up_after_steps_without_drafts(delay: int) -> None:
    policy = _Schedule([4] * 5 + [0] * 20 + [4])
    setup = Setup(policy=policy, delay=delay, acceptance=1.0, num_blocks=200, max_model_len=400)
    core = setup.build()
    request = make_request("r", [1, 2, 3], max_tokens=300)
    core.scheduler.add_request(request)
    drain(core)
    stats = core.scheduler.stats
    # The runner fails on any missing drafter KV, so acceptance here proves the catch-up.
    assert stats.acceptance_rate == 1.0
    assert stats.num_catch_up_tokens >= 18
    assert {o.k for o in policy.outcomes} >= {0, 4}


def test_prefix_hit_without_drafter_kv_is_caught_up() -> None:
    policy = _Schedule([0] * 4 + [3])
    core = Setup(policy=policy, num_blocks=100, acceptance=1.0, budget=64).build()
    prompt = list(range(30))
    core.scheduler.add_request(make_request("a", prompt, max_tokens=3))
    drain(core)
    policy.lengths = [3]
    core.scheduler.add_request(make_request("b", prompt, max_tokens=20))
    drain(core)
    stats = core.scheduler.stats
    assert stats.num_cached_tokens == 28
    assert stats.num_catch_up_tokens == 28
    assert stats.acceptance_rate == 1.0


def test_speculation_is_off_above_the_batch_size_and_says_why() -> None:
    core = Setup(policy=FixedPolicy(3, disable_by_batch_size=2), num_blocks=200).build()
    for i in range(4):
        core.scheduler.add_request(make_request(f"r{i}", [i, 1], max_tokens=10 * (i + 1)))
    seen = set()
    while core.has_work:
        step(core)
        stats = core.scheduler.stats
        seen.add((core.scheduler.num_running > 2, stats.last_k > 0, stats.last_k_reason))
    reasons = {reason for _, _, reason in seen}
    assert "disabled by batch size: 4 running > 2" in reasons
    assert "fixed" in reasons


@pytest.mark.parametrize("count", [1, 17, 100])
@pytest.mark.parametrize("k", [0, 1, 5])
def test_self_draft_needs_exactly_the_passes_it_should(count: int, k: int) -> None:
    core = Setup(k=k, acceptance=1.0, num_blocks=100, max_model_len=300, budget=64).build()
    core.scheduler.add_request(make_request("r", [1, 2, 3], max_tokens=count))
    drain(core)
    assert core.scheduler.stats.num_decode_passes == -(-(count - 1) // (k + 1))


def test_abort_in_flight_frees_blocks_at_once_and_drops_results() -> None:
    core = Setup(delay=1, num_blocks=50).build()
    requests = [make_request(f"r{i}", [i, 2, 3], max_tokens=40) for i in range(3)]
    for request in requests:
        core.scheduler.add_request(request)
    for _ in range(4):
        step(core)
    used = 50 - core.scheduler.kv.pool.num_free
    core.scheduler.abort(requests[1])
    assert 50 - core.scheduler.kv.pool.num_free < used
    length = len(requests[1].sequences[0].token_ids)
    drain(core)
    assert requests[1].sequences[0].finish_reason == "abort"
    assert len(requests[1].sequences[0].token_ids) == length
    assert [r.sequences[0].finish_reason for r in requests] == ["length", "abort", "length"]


def test_waiting_requests_are_served_first_come_first_served() -> None:
    core = Setup(max_num_seqs=2, num_blocks=200, k=0).build()
    requests = [make_request(f"r{i}", [i], max_tokens=4) for i in range(8)]
    for request in requests:
        core.scheduler.add_request(request)
    core.scheduler.abort(requests[3])
    order = [s.request.number for events in drain(core) for s in events.finished]
    assert order == [3, 0, 1, 2, 4, 5, 6, 7]
