"""KV found in the prefix cache is what a fresh engine would compute, whoever left it there.

Rejected drafts, a sequence's last token, and prompts that were given up half-way leave KV that must
not be found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.engines import (
    Models,
    add,
    assert_idle,
    drain,
    engine_with,
    make_engine,
    random_prompt,
    run,
    token_ids,
)
from paceline.engine.llm_engine import LLMEngine
from paceline.sampling_params import SamplingParams

BLOCK = 8
PROMPT = random_prompt(50)


def greedy(count: int = 20) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


@pytest.fixture(scope="module")
def fresh(target: Path) -> LLMEngine:
    """Caches nothing, drafts nothing."""
    return make_engine(target, enable_prefix_caching=False)


def cached_engine(models: Models, drafter: str, **args: Any) -> LLMEngine:
    return engine_with(models, drafter, k=7, block_size=BLOCK, **args)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("drafter", ["none", "self", "random", "lookup"])
def test_generated_tokens_are_found_and_drafts_are_not(
    models: Models, fresh: LLMEngine, drafter: str, delay: int
) -> None:
    """Every length of output, so that the last block ends at every distance from the last token."""
    engine = cached_engine(models, drafter, delay=delay)
    counts = range(1, 2 * BLOCK + 2)
    prompts = [random_prompt(13, seed=count) for count in counts]
    firsts = token_ids(run(engine, prompts, [greedy(count) for count in counts]))
    agains = [[*prompt, *ids, 5, 6, 7] for prompt, ids in zip(prompts, firsts, strict=True)]
    seconds = run(engine, agains, greedy(5))
    for count, second in zip(counts, seconds, strict=True):
        # The last token was never fed, so that its KV does not exist.
        computed = 13 + count - 1
        assert second.metrics.num_cached_tokens == computed // BLOCK * BLOCK, count
    assert token_ids(seconds) == token_ids(run(fresh, agains, greedy(5)))
    if drafter == "random":
        assert engine.stats.acceptance_rate is not None
        assert engine.stats.acceptance_rate < 0.05


def test_prompts_behind_rejected_drafts(models: Models, fresh: LLMEngine) -> None:
    """What was drafted, as a prompt: found as far as the target agreed, and computed from there."""
    engine = cached_engine(models, "random")
    output = run(engine, [PROMPT], greedy(40))[0].outputs[0].token_ids
    places = range(1, 40, 3)
    # Another token in place of an accepted one, as a rejected draft would have been.
    others = [
        [*PROMPT, *output[:place], (output[place] + 1) % 300, *output[place + 1 :]]
        for place in places
    ]
    found = run(engine, others, greedy(5))
    for place, one in zip(places, found, strict=True):
        assert one.metrics.num_cached_tokens == (len(PROMPT) + place) // BLOCK * BLOCK
    assert token_ids(found) == token_ids(run(fresh, others, greedy(5)))


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_prompt_given_up_half_way(models: Models, fresh: LLMEngine, steps: int, delay: int) -> None:
    """Its computed blocks may be used; the others were never written."""
    engine = cached_engine(models, "self", delay=delay, max_num_batched_tokens=24, max_num_seqs=3)
    prompt = random_prompt(90)
    add(engine, [prompt], greedy(), ["a"])
    for _ in range(steps):
        engine.step()
    engine.abort_request("a")
    assert_idle(engine)
    add(engine, [prompt, [*prompt[:70], 5]], greedy(), ["b", "c"])
    found = drain(engine)
    assert 0 < found["b"].metrics.num_cached_tokens <= 24 * steps
    expected = token_ids(run(fresh, [prompt, [*prompt[:70], 5]], greedy()))
    assert token_ids([found["b"], found["c"]]) == expected
    assert engine.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("delay", [0, 1])
def test_blocks_that_were_handed_out_again_are_not_found(
    models: Models, fresh: LLMEngine, delay: int
) -> None:
    """A pool that holds two conversations, and three that take turns."""
    engine = cached_engine(models, "self", delay=delay, num_gpu_blocks_override=24)
    conversations = [random_prompt(60, seed) for seed in range(3)]
    cached = []
    for turn in range(4):
        for i, ids in enumerate(conversations):
            output = run(engine, [ids], greedy(12))[0]
            assert token_ids([output]) == token_ids(run(fresh, [ids], greedy(12)))
            cached.append(output.metrics.num_cached_tokens)
            conversations[i] = [*ids, *output.outputs[0].token_ids, 3, turn]
    assert engine.stats.acceptance_rate == 1.0
    assert any(cached)
    assert sum(found == 0 for found in cached) > 3  # the first three, and what was evicted


def test_equal_blocks_behind_other_tokens_are_others(models: Models, fresh: LLMEngine) -> None:
    """A block's KV depends on all that precedes it, so equal tokens alone are no hit."""
    engine = cached_engine(models, "none")
    a, b, c = (random_prompt(BLOCK, seed) for seed in range(3))
    run(engine, [[*a, *b, 1], [*c, *a, 1]], greedy(1))
    crossed = [[*c, *b, 1], [*a, *a, 1], [*b, *b, 1], [*c, *a, *b, 1]]
    outputs = run(engine, crossed, greedy())
    assert [output.metrics.num_cached_tokens // BLOCK for output in outputs] == [1, 1, 0, 2]
    assert token_ids(outputs) == token_ids(run(fresh, crossed, greedy()))


def test_equal_prompts_in_one_step_share_blocks(models: Models, fresh: LLMEngine) -> None:
    """The second finds what the first is about to compute in the same pass."""
    engine = cached_engine(models, "self")
    prompts = [PROMPT, PROMPT, [*PROMPT, 9], PROMPT[:30]]
    outputs = run(engine, prompts, greedy())
    assert engine.stats.num_prefill_passes == 1
    assert [o.metrics.num_cached_tokens for o in outputs] == [0, 48, 48, 24]
    assert token_ids(outputs) == token_ids(run(fresh, prompts, greedy()))
    assert engine.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("delay", [0, 1])
def test_seeded_samples_do_not_depend_on_hits(models: Models, delay: int) -> None:
    engine = cached_engine(models, "self", delay=delay)
    sampling = SamplingParams(
        seed=2, max_tokens=30, ignore_eos=True, repetition_penalty=1.3, top_p=0.9
    )
    first = run(engine, [PROMPT], sampling)[0]
    again = run(engine, [PROMPT], sampling)[0]
    assert again.metrics.num_cached_tokens == 48
    assert token_ids([again]) == token_ids([first])
