"""Drafting with the target itself: every draft is accepted, whatever happened to the drafter's KV.

One stale or missing slot of drafter KV would show as a rejected draft, so an acceptance of exactly
1 at every position is the proof that hits, preemptions and idle steps are caught up.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from e2e.engines import (
    Models,
    Script,
    add,
    assert_idle,
    drain,
    make_engine,
    random_prompt,
    run,
    token_ids,
)
from paceline import LLM
from paceline.core.stats import EngineStats
from paceline.engine.llm_engine import LLMEngine
from paceline.sampling_params import SamplingParams

K = 5
COUNT = 500
SAMPLINGS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "seed": 3},
    "penalised": {
        "temperature": 0.9,
        "seed": 4,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.4,
        "logit_bias": {7: 2.0, 9: -3.0},
    },
}


def params(name: str = "sampled", count: int = COUNT, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, **SAMPLINGS[name] | changes)


def self_drafting(target: Path, k: int = K, **args: Any) -> LLMEngine:
    return make_engine(target, speculative_model=str(target), num_speculative_tokens=k, **args)


def assert_all_accepted(stats: EngineStats, k: int = K) -> None:
    """Every proposed draft was accepted, at each of the k positions."""
    assert len(stats.proposed_by_position) == k
    assert stats.proposed_by_position.min() > 0
    assert np.array_equal(stats.accepted_by_position, stats.proposed_by_position)
    assert stats.acceptance_rate == 1.0


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_alone(target: Path, name: str, delay: int) -> None:
    policy = Script(K)
    engine = self_drafting(target, delay=delay, policy=policy)
    output = run(engine, [random_prompt(30)], params(name))[0]
    stats = engine.stats
    assert len(output.outputs[0].token_ids) == stats.num_generation_tokens == COUNT
    assert_all_accepted(stats)
    passes = math.ceil((COUNT - 1) / (K + 1))
    assert len(policy.outcomes) == passes + 1  # and the prompt's
    assert stats.num_decode_passes <= passes + delay
    metrics = output.metrics.speculative_decoding
    assert metrics.num_drafts == passes - 1  # the last pass had one token to go
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens == COUNT - 1 - passes
    # Other ids than one repeated for ever, or stale KV might pass.
    assert len(set(output.outputs[0].token_ids)) > 20


@pytest.mark.parametrize("k", [1, 2, 8])
def test_other_draft_lengths_in_company(target: Path, k: int) -> None:
    """Sequences of different lengths, prompts in chunks, blocks of odd size."""
    engine = self_drafting(
        target, k, max_num_batched_tokens=64, max_num_seqs=4, block_size=7, delay=1
    )
    prompts = [random_prompt(length) for length in (1, 2, 90, 33, 150)]
    lengths = [300, 10, 60, 120, 40]
    run(engine, prompts, [params(count=count, seed=count) for count in lengths])
    assert engine.stats.num_prefill_chunks > len(prompts)
    assert_all_accepted(engine.stats, k)


@pytest.mark.parametrize("delay", [0, 1])
def test_after_a_prefix_hit(target: Path, delay: int) -> None:
    """Drafter KV of cached blocks is there, from prefill and from rounds of drafts."""
    engine = self_drafting(target, delay=delay, block_size=8)
    prompt = random_prompt(100)
    first = run(engine, [prompt], params(count=60))[0]
    again = [*prompt, *first.outputs[0].token_ids, 5]
    outputs = run(engine, [again, prompt], params())
    cached = [output.metrics.num_cached_tokens for output in outputs]
    assert cached[0] >= 152  # generated tokens too
    assert cached[1] == 96
    assert engine.stats.num_catch_up_tokens <= 8  # the last drafts of the first have no KV
    assert_all_accepted(engine.stats)


@pytest.mark.parametrize("delay", [0, 1])
def test_after_a_prefix_hit_on_blocks_the_drafter_has_not_seen(target: Path, delay: int) -> None:
    policy = Script(0)
    policy.max_k = K
    engine = self_drafting(target, delay=delay, policy=policy, max_num_batched_tokens=48)
    prompt = random_prompt(100)
    run(engine, [prompt], params(count=30))
    assert engine.stats.num_draft_tokens == 0
    policy.lengths = [K]
    output = run(engine, [prompt], params(seed=9))[0]
    assert output.metrics.num_cached_tokens == 96
    assert engine.stats.num_catch_up_tokens >= 96
    assert_all_accepted(engine.stats)


@pytest.mark.parametrize(("caching", "delay"), [(True, 0), (False, 1), (True, 1)])
def test_after_a_preemption(target: Path, caching: bool, delay: int) -> None:
    engine = self_drafting(
        target, delay=delay, num_gpu_blocks_override=36, enable_prefix_caching=caching
    )
    prompts = [random_prompt(20, seed) for seed in range(2)]
    sampling = [params(seed=seed) for seed in range(2)]
    outputs = run(engine, prompts, sampling)
    assert engine.stats.num_preemptions > 0
    assert [output.metrics.num_preemptions > 0 for output in outputs] == [False, True]
    assert (engine.stats.num_cached_tokens > 0) == caching
    assert_all_accepted(engine.stats)
    roomy = make_engine(target)
    assert token_ids(outputs) == token_ids(run(roomy, prompts, sampling))
    assert all(len(ids) == COUNT for ids in token_ids(outputs))
    assert roomy.stats.num_preemptions == 0


def test_after_twenty_idle_steps_of_a_policy_of_ones_own(target: Path) -> None:
    policy = Script(*[K] * 5, *[0] * 20, K)
    with LLM(
        str(target),
        policy=policy,
        dtype="float32",
        speculative_model=str(target),
        num_speculative_tokens=K,
        max_num_seqs=8,
    ) as llm:
        prompt = random_prompt(40)
        output = llm.generate(prompt, params(), use_tqdm=False)[0]
        stats = llm.engine.stats
        assert len(output.outputs[0].token_ids) == COUNT
        assert stats.num_catch_up_tokens >= 18
        assert_all_accepted(stats)
    drafted = [outcome.num_draft_tokens for outcome in policy.outcomes]
    # The prompt, four rounds, the idle steps, one that only catches up, and drafts again.
    assert drafted[1:5] == [K] * 4
    assert drafted[5:25] == [0] * 20
    assert drafted[26:-1] == [K] * (len(drafted) - 27)
    plain = make_engine(target)
    assert token_ids(run(plain, [prompt], params())) == token_ids([output])


@pytest.mark.parametrize("delay", [0, 1])
def test_after_idle_steps_again_and_again_in_company(target: Path, delay: int) -> None:
    """Idle times of every length, with catch-up in chunks under a small budget."""
    lengths = [k for idle in range(1, 14) for k in (K, *[0] * idle)]
    policy = Script(*lengths, K)
    engine = self_drafting(target, delay=delay, policy=policy, max_num_batched_tokens=30)
    prompts = [random_prompt(length) for length in (3, 70, 12)]
    sampling = [params(count=150, seed=seed) for seed in range(3)]
    outputs = run(engine, prompts, sampling)
    assert engine.stats.num_catch_up_tokens > 100
    assert {0, K} <= {outcome.k for outcome in policy.outcomes}
    assert_all_accepted(engine.stats)
    assert token_ids(outputs) == token_ids(run(make_engine(target), prompts, sampling))


@pytest.mark.parametrize("padding", [0, 3, 64])
def test_drafter_with_another_padded_vocabulary(models: Models, target: Path, padding: int) -> None:
    """Same weights, other padding rows: as good as the target itself, and never an unknown id."""
    drafter = models.tiny(vocab_padding=padding)
    engine = make_engine(target, speculative_model=str(drafter), num_speculative_tokens=K)
    sampling = params("penalised", count=150)
    expected = token_ids(run(make_engine(target), [random_prompt(20)], sampling))
    assert token_ids(run(engine, [random_prompt(20)], sampling)) == expected
    assert_all_accepted(engine.stats)


def test_prompt_ids_only_the_target_has_rows_for(models: Models, target: Path) -> None:
    """Padding ids in a prompt are legal; the drafter takes them for another token, no worse."""
    drafter = models.tiny(vocab_padding=0)
    engine = make_engine(target, speculative_model=str(drafter), num_speculative_tokens=K)
    plain = make_engine(target)
    top = plain.config.model.arch.vocab_size - 1
    prompt = [*random_prompt(20), top, top - 3, 5]
    expected = token_ids(run(plain, [prompt], params(count=80)))
    assert token_ids(run(engine, [prompt], params(count=80))) == expected
    assert engine.stats.num_draft_tokens > 0


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("reach", [64, 93])
def test_drafter_with_a_shorter_context(target: Path, reach: int, delay: int) -> None:
    """It drafts as far as it reaches and not a token further; the output does not change."""
    engine = self_drafting(target, delay=delay, speculative_max_model_len=reach)
    prompts = [random_prompt(20), random_prompt(reach - 3), random_prompt(150)]
    sampling = [params(count=80, seed=seed) for seed in range(3)]
    outputs = run(engine, prompts, sampling)
    assert token_ids(outputs) == token_ids(run(make_engine(target), prompts, sampling))
    drafts = [output.metrics.speculative_decoding for output in outputs]
    expected, length = 0, 21
    while length < reach:
        k = min(K, reach - length)
        expected, length = expected + k, length + k + 1
    assert drafts[0].num_draft_tokens == expected
    assert drafts[0].acceptance_rate == 1.0
    assert drafts[1].num_draft_tokens <= 3
    assert drafts[2].num_draft_tokens == 0
    assert engine.stats.acceptance_rate == 1.0


def test_drafter_model_made_for_a_shorter_context(models: Models, target: Path) -> None:
    """The limit may also be the drafter's own."""
    drafter = models.tiny(max_position_embeddings=100)
    engine = make_engine(target, speculative_model=str(drafter), num_speculative_tokens=K)
    outputs = run(engine, [random_prompt(40)], params(count=100))
    assert token_ids(outputs) == token_ids(
        run(make_engine(target), [random_prompt(40)], params(count=100))
    )
    assert 40 < engine.stats.num_draft_tokens <= 60
    assert engine.stats.acceptance_rate == 1.0


def test_outputs_of_one_request_share_drafter_kv(target: Path) -> None:
    """After the prefill the partial block is copied, the drafter's half of it too."""
    engine = self_drafting(target, enable_prefix_caching=False, block_size=8)
    run(engine, [random_prompt(61)], params(count=80, n=4))
    assert engine.stats.num_cached_tokens == 3 * 60
    assert engine.stats.num_catch_up_tokens <= 3 * 8
    assert_all_accepted(engine.stats)


def test_abort_of_one_leaves_the_others_drafts_alone(target: Path) -> None:
    engine = self_drafting(target, delay=1)
    add(engine, [random_prompt(9, seed) for seed in range(4)], params(count=200))
    for _ in range(12):
        engine.step()
    aborted = [*engine.abort_request("1"), *engine.abort_request("2")]
    assert [o.outputs[0].finish_reason for o in aborted] == ["abort"] * 2
    found = drain(engine)
    assert len(found["0"].outputs[0].token_ids) == len(found["3"].outputs[0].token_ids) == 200
    assert_all_accepted(engine.stats)
    assert_idle(engine)
