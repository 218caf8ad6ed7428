"""Swapping on the simulated runner: the same tokens, less computed, every block and slot home.

The runner moves what each block holds and checks every KV slot it reads, so a block saved too late,
restored to the wrong place or from a slot that was reused fails here.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.harness import Outcome, Setup, crowd, drain, make_request, run, step
from paceline.core.swap import SwapSpace
from paceline.engine.core import EngineCore

VARIANTS = {
    "plain": Setup(k=0),
    "plain delayed": Setup(k=0, delay=1),
    "speculation": Setup(),
    "speculation delayed": Setup(delay=1),
    "lookup drafter": Setup(drafter_has_kv=False, delay=1),
    "no prefix cache": Setup(caching=False),
    "no prefix cache, delayed": Setup(caching=False, delay=1),
    "tiny pool delayed": Setup(num_blocks=26, delay=1),
    "static": Setup(batching="static", delay=1),
    "whole prompts": Setup(budget=100, chunked=False, num_blocks=30),
    "short drafter context": Setup(drafter_context=30, delay=1),
}


def all_home(outcome: Outcome, setup: Setup) -> bool:
    kv = outcome.core.scheduler.kv
    return kv.pool.num_free == setup.num_blocks and kv.swap.num_free == setup.num_host_blocks


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("host_blocks", [12, 400])
def test_same_tokens_with_and_without(name: str, host_blocks: int) -> None:
    without = VARIANTS[name]
    setup = dataclasses.replace(without, num_host_blocks=host_blocks)
    plain = run(without, crowd(2, 60, most_n=2), seed=3)
    swapped = run(setup, crowd(2, 60, most_n=2), seed=3)
    assert swapped.outputs == plain.outputs
    assert swapped.reasons == plain.reasons
    assert all_home(swapped, setup)
    before, stats = plain.core.scheduler.stats, swapped.core.scheduler.stats
    assert 0 < stats.num_blocks_swapped_in <= stats.num_blocks_swapped_out
    assert before.num_blocks_swapped_out == 0
    if host_blocks == 400:
        assert stats.num_prompt_tokens < before.num_prompt_tokens


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_blocks=st.integers(25, 45),
    block_size=st.sampled_from([1, 4, 16]),
    max_num_seqs=st.integers(2, 9),
    extra_budget=st.integers(0, 40),
    k=st.integers(0, 4),
    delay=st.integers(0, 1),
    static=st.booleans(),
    caching=st.booleans(),
    host_blocks=st.integers(1, 60),
)
def test_any_configuration_brings_every_slot_home(
    seed: int,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    extra_budget: int,
    k: int,
    delay: int,
    static: bool,
    caching: bool,
    host_blocks: int,
) -> None:
    """Aborts hit sequences in host memory too."""
    setup = Setup(
        num_blocks=num_blocks * 4 // block_size + 5,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        budget=max_num_seqs + extra_budget,
        k=k,
        delay=delay,
        batching="static" if static else "continuous",
        caching=caching,
        num_host_blocks=host_blocks,
    )
    requests = crowd(seed, 25, most_n=2)
    outcome = run(setup, requests, seed=seed, abort=0.05)
    assert all(request.finished for request in requests)
    assert all_home(outcome, setup)
    # What was not aborted has the tokens of a run in which nothing is preempted.
    wide = run(
        Setup(k=0, num_blocks=3000, block_size=block_size, budget=200), crowd(seed, 25, most_n=2)
    )
    for name, reasons in outcome.reasons.items():
        for found, expected, (reason, _) in zip(
            outcome.outputs[name], wide.outputs[name], reasons, strict=True
        ):
            assert found == expected or (reason == "abort" and found == expected[: len(found)])


def preempt_newest(core: EngineCore) -> None:
    """Put back the newest sequence, with nothing in flight, as the scheduler does it."""
    scheduler = core.scheduler
    while core._in_flight:
        scheduler.update_from_output(core.runner.collect(core._in_flight.popleft()))
    if not scheduler.table.num_occupied:
        return
    rows = scheduler.table.rows_in_order(scheduler.table.occupied)
    scheduler._preempt(int(rows[-1]))
    scheduler.check_integrity()


def test_a_restored_sequence_computes_its_last_token_alone() -> None:
    core = Setup(k=0, num_blocks=60, num_host_blocks=20, caching=False, budget=40).build()
    request = make_request("r", list(range(30)), max_tokens=20)
    core.scheduler.add_request(request)
    for _ in range(6):
        step(core)
    preempt_newest(core)
    assert core.scheduler.kv.pool.num_free == 60
    assert core.scheduler.kv.swap.num_free == 20 - 9  # 35 tokens with KV, of 36
    planned = core.scheduler.schedule()
    assert planned.prefill_starts.tolist() == [35]
    assert planned.prefill_lens.tolist() == [1]
    assert [len(pair) for pair in (planned.swap_outs, planned.swap_ins)] == [9, 9]
    assert core.scheduler.kv.swap.num_free == 20
    core.scheduler.update_from_output(core.runner.collect(core.runner.launch(planned)))
    drain(core)
    assert request.sequences[0].finish_reason == "length"
    assert core.scheduler.stats.num_prompt_tokens == 31
    assert core.scheduler.stats.num_cached_tokens == 0


def test_a_prompt_goes_on_in_its_middle() -> None:
    core = Setup(k=2, num_blocks=60, num_host_blocks=20, caching=False, budget=11).build()
    request = make_request("r", list(range(30)), max_tokens=5, prompt_logprobs=0)
    core.scheduler.add_request(request)
    step(core)
    step(core)
    # The simulated runner reports no logprobs; a device would have reported these.
    request.sequences[0].num_prompt_logprobs = 22
    preempt_newest(core)
    step(core)
    assert core.scheduler.stats.num_prompt_tokens == 30
    drain(core)
    assert core.scheduler.stats.num_prompt_tokens == 30
    assert core.scheduler.stats.num_blocks_swapped_in == 6


@pytest.mark.parametrize("delay", [0, 1])
def test_preempted_again_at_every_step(delay: int) -> None:
    setup = Setup(k=0, num_blocks=60, delay=delay, budget=40)
    requests = [make_request("r", list(range(14)), max_tokens=20)]
    expected = run(setup, requests).outputs["r"]
    setup.num_host_blocks = 9
    core = setup.build()
    again = make_request("r", list(range(14)), max_tokens=20)
    core.scheduler.add_request(again)
    while core.has_work:
        step(core)
        preempt_newest(core)
    assert [again.sequences[0].output_token_ids] == expected
    assert core.scheduler.kv.swap.num_free == 9
    assert again.sequences[0].num_preemptions == 19  # after every token but the last


def test_a_full_host_pool_means_recomputing() -> None:
    core = Setup(k=0, num_blocks=60, num_host_blocks=8, caching=False, budget=40).build()
    request = make_request("r", list(range(34)), max_tokens=5)
    core.scheduler.add_request(request)
    step(core)
    preempt_newest(core)  # 9 blocks
    assert core.scheduler.kv.swap.num_free == 8
    drain(core)
    assert core.scheduler.stats.num_prompt_tokens == 34 + 35
    assert core.scheduler.stats.num_blocks_swapped_out == 0


def test_an_abort_while_swapped_out_frees_the_slots() -> None:
    core = Setup(k=0, num_blocks=60, num_host_blocks=20, caching=False, budget=40).build()
    first, second = (make_request(f"r{i}", [i] * 18, max_tokens=9) for i in range(2))
    core.scheduler.add_request(first)
    core.scheduler.add_request(second)
    step(core)
    preempt_newest(core)
    assert core.scheduler.kv.swap.num_free == 15
    core.scheduler.abort(second)
    core.scheduler.check_integrity()
    assert core.scheduler.kv.swap.num_free == 20
    drain(core)
    assert first.sequences[0].finish_reason == "length"


def test_shared_blocks_are_found_again_and_not_copied() -> None:
    core = Setup(k=0, num_blocks=60, num_host_blocks=20, budget=80).build()
    prompt = list(range(22))  # five blocks and a half
    requests = [make_request(f"r{i}", prompt, max_tokens=9, seed=1) for i in range(2)]
    core.scheduler.add_request(requests[0])
    step(core)
    core.scheduler.add_request(requests[1])
    step(core)
    step(core)
    preempt_newest(core)
    assert core.scheduler.kv.swap.num_free == 19
    computed = core.scheduler.stats.num_prompt_tokens
    drain(core)
    assert core.scheduler.stats.num_prompt_tokens == computed + 1
    assert core.scheduler.stats.num_blocks_swapped_out == 1
    assert requests[0].sequences[0].output_token_ids == requests[1].sequences[0].output_token_ids


def test_lost_shared_blocks_mean_recomputing() -> None:
    core = Setup(k=0, num_blocks=60, num_host_blocks=20, budget=80).build()
    prompt = list(range(22))
    requests = [make_request(f"r{i}", prompt, max_tokens=9, seed=1) for i in range(2)]
    core.scheduler.add_request(requests[0])
    step(core)
    core.scheduler.add_request(requests[1])
    step(core)
    preempt_newest(core)
    core.scheduler.kv.pool.reset_prefix_cache()
    computed = core.scheduler.stats.num_prompt_tokens
    drain(core)
    assert core.scheduler.stats.num_prompt_tokens == computed + 23
    assert core.scheduler.kv.swap.num_free == 20
    assert requests[0].sequences[0].output_token_ids == requests[1].sequences[0].output_token_ids


def test_drafter_kv_is_dropped_and_caught_up() -> None:
    core = Setup(k=3, num_blocks=60, num_host_blocks=20, caching=False, acceptance=1.0).build()
    request = make_request("r", list(range(20)), max_tokens=40)
    core.scheduler.add_request(request)
    for _ in range(4):
        step(core)
    preempt_newest(core)
    caught_up = core.scheduler.stats.num_catch_up_tokens
    known = len(request.sequences[0].token_ids)
    drain(core)
    assert core.scheduler.stats.num_catch_up_tokens >= caught_up + known - 1
    assert core.scheduler.stats.acceptance_rate == 1.0


def test_slots_are_conserved() -> None:
    space = SwapSpace(4)
    one, other = (make_request(name, [1]).sequences[0] for name in "ab")
    assert space.save(one, 0, [7, 8, 9], 11)
    assert not space.save(other, 0, [5, 6], 8)
    assert not space.save(other, 0, [], 0)
    space.check_integrity([one])
    with pytest.raises(AssertionError, match="does not wait"):
        space.check_integrity([])
    saved = space.saved(one)
    assert saved is not None
    space.restore(saved.slots[1:], [3, 4])
    space.drop(one)
    space.drop(one)
    outs, ins = space.take_copies()
    assert [block for block, _ in outs] == [7, 8, 9]
    assert ins == [(outs[1][1], 3), (outs[2][1], 4)]
    assert space.take_copies() == ([], [])
    assert space.num_free == 4
    space.check_integrity([])
    space._free.append(2)
    with pytest.raises(AssertionError, match="held twice"):
        space.check_integrity([])
