"""Greedy output of the whole engine equals transformers' token for token, however it is scheduled.

A covering set of configurations: every pair of settings occurs in at least one row of ``WAYS``, for
every family, and every row proves that what it names really happened.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import pytest

from e2e.engines import (
    FAMILIES,
    VOCAB,
    WINDOW,
    Models,
    Script,
    add,
    drain,
    make_engine,
    random_prompt,
    run,
    token_ids,
)
from paceline.sampling_params import SamplingParams

COUNT = 20
SHARED = random_prompt(64, seed=5)
PROMPTS = [
    random_prompt(1),
    random_prompt(310),
    random_prompt(2),
    [*SHARED, *random_prompt(9)],
    random_prompt(17),
    [7, 8, 9, 10] * 12,  # something to look up
    [*SHARED, *random_prompt(40)],
    random_prompt(128),
    SHARED,
]
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
DRAFT_LENGTHS = {"none": 0, "self": 3, "random": 4, "ngram": 5}


class Way(NamedTuple):
    """One configuration."""

    drafter: str
    budget: str
    pool: str
    caching: bool
    batching: str
    delay: int


LEVELS: dict[str, list[Any]] = {
    "drafter": list(DRAFT_LENGTHS),
    "budget": ["large", "small"],
    "pool": ["large", "tiny"],
    "caching": [True, False],
    "batching": ["continuous", "static"],
    "delay": [0, 1],
}
WAYS = [
    Way("none", "large", "tiny", True, "static", 1),
    Way("none", "small", "large", False, "continuous", 0),
    Way("self", "large", "large", True, "static", 0),
    Way("self", "small", "tiny", False, "continuous", 1),
    Way("random", "large", "large", False, "continuous", 1),
    Way("random", "small", "tiny", True, "static", 0),
    Way("ngram", "large", "tiny", True, "continuous", 0),
    Way("ngram", "small", "large", False, "static", 1),
]


def arguments(models: Models, family: str, way: Way) -> dict[str, Any]:
    """Engine arguments of a configuration."""
    # 22 blocks of 16 hold the longest sequence, and by far not all of them.
    args: dict[str, Any] = {
        "enable_prefix_caching": way.caching,
        "batching": way.batching,
        "num_gpu_blocks_override": 22 if way.pool == "tiny" else 200,
        "max_num_batched_tokens": 40 if way.budget == "small" else 2048,
    }
    drafters = {
        "self": models.family(family),
        "random": models.random_drafter(),
        "ngram": "[ngram]",
    }
    if way.drafter != "none":
        args["speculative_model"] = str(drafters[way.drafter])
        args["num_speculative_tokens"] = DRAFT_LENGTHS[way.drafter]
    if way.drafter == "ngram":
        args["ngram_prompt_lookup_min"] = 1
    return args


def test_every_pair_of_settings_occurs() -> None:
    for (one, first), (other, second) in itertools.combinations(LEVELS.items(), 2):
        seen = {(getattr(way, one), getattr(way, other)) for way in WAYS}
        assert seen == set(itertools.product(first, second))
    lengths = [len(prompt) for prompt in PROMPTS]
    assert min(lengths) == 1
    assert max(lengths) > 15 * WINDOW


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way)))
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(models: Models, family: str, way: Way) -> None:
    expected = [models.greedy(family, prompt, COUNT) for prompt in PROMPTS]
    args = arguments(models, family, way)
    engine = make_engine(models.family(family), delay=way.delay, **args)
    outputs = run(engine, PROMPTS, GREEDY)
    assert token_ids(outputs) == expected
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}

    stats = engine.stats
    assert stats.num_generation_tokens == COUNT * len(PROMPTS)
    assert (stats.num_preemptions > 0) == (way.pool == "tiny")
    assert (stats.num_cached_tokens > 0) == way.caching
    if way.budget == "small":
        assert stats.num_prefill_chunks > len(PROMPTS) + stats.num_preemptions
    assert (stats.num_draft_tokens > 0) == (way.drafter != "none")
    if way.drafter == "random":
        assert stats.acceptance_rate is not None
        assert stats.acceptance_rate < 0.05
    if way.drafter == "self":
        assert stats.acceptance_rate == 1.0


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_lone_self_draft_takes_exactly_the_passes_it_should(
    models: Models, family: str, k: int, delay: int
) -> None:
    path, policy = models.family(family), Script(k)
    drafting = {"speculative_model": str(path), "num_speculative_tokens": k}
    engine = make_engine(path, delay=delay, policy=policy, **drafting)
    prompt = PROMPTS[4]
    assert token_ids(run(engine, [prompt], GREEDY)) == [models.greedy(family, prompt, COUNT)]
    passes = math.ceil((COUNT - 1) / (k + 1))
    # One result with an active row for the prompt, then one for each pass.
    assert [outcome.num_rows for outcome in policy.outcomes] == [1] * (1 + passes)
    # A step behind, the host may launch one more before it learns of the end.
    assert passes <= engine.stats.num_decode_passes <= passes + delay


@pytest.mark.parametrize("drafter", DRAFT_LENGTHS)
def test_requests_that_come_while_others_run(models: Models, drafter: str) -> None:
    """Admissions beside decode rows at every length of the crowd, whole prompts only."""
    path = models.family("mistral")
    way = Way(drafter, "large", "large", True, "continuous", 1)
    args = arguments(models, "mistral", way) | {"enable_chunked_prefill": False, "block_size": 5}
    engine = make_engine(path, delay=1, max_num_seqs=4, **args)
    order = sorted(range(len(PROMPTS)), key=lambda i: (i * 5) % len(PROMPTS))
    found = {}
    for i in order:
        add(engine, [PROMPTS[i]], GREEDY, [str(i)])
        for _ in range(3):
            found.update({o.request_id: o for o in engine.step() if o.finished})
    found.update(drain(engine))
    for i, prompt in enumerate(PROMPTS):
        expected = models.greedy("mistral", prompt, COUNT)
        assert found[str(i)].outputs[0].token_ids == expected
    # Prompts came one by one, so prefill passes ran beside decode passes.
    assert engine.stats.num_prefill_passes >= len(PROMPTS)
    assert engine.stats.num_prefill_chunks == len(PROMPTS)


@pytest.mark.parametrize("drafter", ["none", "self"])
def test_closed_static_batch_lets_nobody_in(models: Models, drafter: str) -> None:
    """There is room in the batch, but a static one has to end before others begin."""
    way = Way(drafter, "large", "large", True, "static", 1)
    args = arguments(models, "qwen2", way)
    engine = make_engine(models.family("qwen2"), delay=1, **args)
    add(engine, PROMPTS[:2], GREEDY, ["0", "1"])
    for _ in range(4):
        engine.step()
    add(engine, PROMPTS[2:4], GREEDY, ["2", "3"])
    found = drain(engine)
    for i in range(4):
        expected = models.greedy("qwen2", PROMPTS[i], COUNT)
        assert found[str(i)].outputs[0].token_ids == expected
    ends = [found[name].metrics.finished_time for name in ("0", "1")]
    starts = [found[name].metrics.first_scheduled_time for name in ("2", "3")]
    assert max(time for time in ends if time) <= min(time for time in starts if time)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("drafter", ["none", "self"])
def test_static_batch_computes_finished_rows_to_its_end(
    models: Models, monkeypatch: pytest.MonkeyPatch, drafter: str, delay: int
) -> None:
    """As static serving does: each row costs every pass a token, whatever ended it."""
    family = "qwen2"
    args = arguments(models, family, Way(drafter, "large", "large", True, "static", delay))
    engine = make_engine(models.family(family), delay=delay, **args)
    if engine.config.device == "cuda":
        pytest.skip("looks into the CPU runner")
    ids = models.greedy(family, PROMPTS[4], COUNT)
    params = [
        SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
        GREEDY,
        SamplingParams(temperature=0, max_tokens=COUNT, stop_token_ids=[ids[3]]),
    ]
    runner = engine.core.runner
    forward = runner._forward  # type: ignore[attr-defined]
    sizes = []

    def record(batch: Any) -> Any:
        sizes.append([batch.metadata.query_lens.count(0), len(batch.metadata.query_lens)])
        return forward(batch)

    monkeypatch.setattr(runner, "_forward", record)
    outputs = run(engine, [PROMPTS[0], PROMPTS[2], PROMPTS[4]], params)
    assert [len(done) for done in token_ids(outputs)] == [2, COUNT, ids.index(ids[3]) + 1]
    assert len(sizes) > 4
    assert not any(empty for empty, _ in sizes)
    # A step behind, the host leaves a row out once: between its last token and knowing of it.
    assert sum(rows < 3 for _, rows in sizes) <= 2 * delay


def test_ids_the_tokenizer_does_not_know_are_masked(models: Models) -> None:
    """The targets here prefer such ids; without a tokenizer there is no mask."""
    path = models.family("qwen2")
    masked = run(make_engine(path), PROMPTS, GREEDY)
    engine = make_engine(path, skip_tokenizer_init=True)
    unmasked = run(engine, PROMPTS, GREEDY)
    assert all(token < VOCAB for ids in token_ids(masked) for token in ids)
    assert any(token >= VOCAB for ids in token_ids(unmasked) for token in ids)
    assert unmasked[0].outputs[0].text == ""
    assert masked[0].outputs[0].text != ""


def test_stop_ids_end_where_transformers_meets_them(models: Models) -> None:
    """The first occurrence of a stop id in the oracle's text ends the sequence, id included."""
    path = models.family("qwen3")
    engine = make_engine(path, speculative_model=str(path), num_speculative_tokens=4)
    expected, params = [], []
    for place, prompt in enumerate(PROMPTS):
        ids = models.greedy("qwen3", prompt, COUNT)
        stop = ids[place * 2]
        params.append(SamplingParams(temperature=0, max_tokens=COUNT, stop_token_ids=[stop]))
        expected.append(ids[: ids.index(stop) + 1])
    outputs = run(engine, PROMPTS, params)
    assert token_ids(outputs) == expected
    for output, sampling in zip(outputs, params, strict=True):
        assert output.outputs[0].finish_reason == "stop"
        assert sampling.stop_token_ids == [output.outputs[0].stop_reason]
    assert len({len(ids) for ids in expected}) > 4
