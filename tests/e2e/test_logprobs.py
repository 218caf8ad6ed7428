"""Log-probabilities: of the raw distribution, one entry a token, however many a step brings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e.engines import (
    PROMPT,
    VOCAB,
    Models,
    all_logits,
    engine_with,
    one,
    random_prompt,
    run,
    text_of_tokens,
    transformers_model,
    unique_piece,
)
from paceline.engine.llm_engine import LLMEngine
from paceline.outputs import Logprob
from paceline.sampling_params import SamplingParams

K = 5
LONG = 40
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def oracle(target: Path) -> Any:
    return transformers_model(target)


def expected_logprobs(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """[len(ids), VOCAB] log-softmax over the ids that may come out."""
    return torch.log_softmax(all_logits(model, ids)[:, :VOCAB].double(), -1)


def assert_entry(entry: dict[int, Logprob], row: torch.Tensor, chosen: int, top: int) -> None:
    """The chosen token first, then the top ones, with their values and ranks."""
    assert next(iter(entry)) == chosen
    best = row.topk(max(top, 1))
    wanted = set(best.indices[:top].tolist()) | {chosen}
    assert set(entry) == wanted
    for token, logprob in entry.items():
        assert logprob.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert logprob.rank == int((row > row[token]).sum()) + 1
        assert logprob.decoded_token is not None


@pytest.mark.parametrize("top", [0, 1, 5])
def test_logprobs(engines: dict[str, LLMEngine], oracle: Any, top: int) -> None:
    """Of the raw distribution, whatever processing the sampler does."""
    settings = {"temperature": 0.8, "seed": 5, "top_k": 30, "frequency_penalty": 0.5}
    for name, engine in engines.items():
        for count in (1, K + 1, 16):
            output = one(engine, max_tokens=count, ignore_eos=True, logprobs=top, **settings)
            done = output.outputs[0]
            assert done.logprobs is not None
            assert len(done.logprobs) == len(done.token_ids) == count, name
            rows = expected_logprobs(oracle, [*PROMPT, *done.token_ids])[len(PROMPT) - 1 : -1]
            for entry, row, chosen in zip(done.logprobs, rows, done.token_ids, strict=True):
                assert_entry(entry, row, chosen, top)
            total = sum(
                float(row[chosen]) for row, chosen in zip(rows, done.token_ids, strict=True)
            )
            assert done.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_logprobs_follow_the_cut(engines: dict[str, LLMEngine]) -> None:
    """A stop inside a run drops the logprobs behind it."""
    plain = engines["none"]
    full = one(plain, max_tokens=LONG, logprobs=2, **GREEDY).outputs[0]
    assert full.logprobs is not None
    text, pieces = text_of_tokens(plain, one(plain, max_tokens=LONG, **GREEDY))
    place, stop = unique_piece(text, pieces, K + 3)
    for engine in engines.values():
        for case in ({"stop": stop}, {"stop_token_ids": [full.token_ids[place]]}):
            done = one(engine, max_tokens=LONG, logprobs=2, **case, **GREEDY).outputs[0]
            assert done.logprobs is not None
            assert len(done.logprobs) == len(done.token_ids) == place + 1
            for ours, theirs in zip(done.logprobs, full.logprobs, strict=False):
                assert list(ours) == list(theirs)
                assert [x.logprob for x in ours.values()] == pytest.approx(
                    [x.logprob for x in theirs.values()], abs=1e-4
                )
            values = [next(iter(entry.values())).logprob for entry in done.logprobs]
            assert done.cumulative_logprob == pytest.approx(sum(values), abs=1e-5)


def test_logprobs_are_absent_unless_asked(engines: dict[str, LLMEngine]) -> None:
    for engine in engines.values():
        params = [
            SamplingParams(max_tokens=4, logprobs=logprobs, **GREEDY)
            for logprobs in (None, 1, None)
        ]
        found = [output.outputs[0] for output in run(engine, [PROMPT] * 3, params)]
        assert [done.logprobs is None for done in found] == [True, False, True]
        assert [done.cumulative_logprob is None for done in found] == [True, False, True]


LONG_PROMPT = random_prompt(140)
PROMPT_LOGPROB_WAYS: dict[str, dict[str, Any]] = {
    "at once": {},
    "chunked": {"max_num_batched_tokens": 30},
    "chunked, no cache": {"max_num_batched_tokens": 17, "enable_prefix_caching": False},
    "chunked, delayed": {"max_num_batched_tokens": 30, "delay": 1},
}


@pytest.mark.parametrize("name", ["none", "self"])
@pytest.mark.parametrize("way", PROMPT_LOGPROB_WAYS)
def test_prompt_logprobs(models: Models, oracle: Any, way: str, name: str) -> None:
    """Also of a prompt that lies in the prefix cache, which must then be computed again."""
    engine = engine_with(models, name, **PROMPT_LOGPROB_WAYS[way])
    first = one(engine, LONG_PROMPT, max_tokens=3, **GREEDY)
    params = [
        SamplingParams(max_tokens=7, prompt_logprobs=top, logprobs=0, **GREEDY) for top in (0, 3, 1)
    ]
    prompts = [LONG_PROMPT, LONG_PROMPT, [5]]
    outputs = run(engine, prompts, params)
    if "max_num_batched_tokens" in PROMPT_LOGPROB_WAYS[way]:
        assert engine.stats.num_prefill_chunks > 10
    for output, prompt, top in zip(outputs, prompts, (0, 3, 1), strict=True):
        assert output.prompt_logprobs is not None
        assert output.metrics.num_cached_tokens == 0
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        rows = expected_logprobs(oracle, prompt)
        for entry, row, token in zip(output.prompt_logprobs[1:], rows, prompt[1:], strict=False):
            assert entry is not None
            assert_entry(entry, row, token, top)
    assert outputs[0].outputs[0].token_ids[:3] == first.outputs[0].token_ids
    cached = one(engine, LONG_PROMPT, max_tokens=3, **GREEDY)
    assert cached.prompt_logprobs is None
    assert (cached.metrics.num_cached_tokens > 0) == engine.config.cache.enable_prefix_caching


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("caching", [True, False])
def test_logprobs_survive_preemption(
    models: Models, oracle: Any, caching: bool, delay: int
) -> None:
    """Prompt logprobs come once, output logprobs are not repeated by recomputation."""
    engine = engine_with(
        models,
        "self",
        delay=delay,
        num_gpu_blocks_override=13,
        max_num_batched_tokens=48,
        enable_prefix_caching=caching,
    )
    prompts = [random_prompt(60), random_prompt(75)]
    sampling = SamplingParams(max_tokens=60, prompt_logprobs=0, logprobs=1, **GREEDY)
    outputs = run(engine, prompts, sampling)
    assert outputs[1].metrics.num_preemptions > 0
    for output, prompt in zip(outputs, prompts, strict=True):
        done = output.outputs[0]
        assert done.logprobs is not None
        assert output.prompt_logprobs is not None
        rows = expected_logprobs(oracle, [*prompt, *done.token_ids])
        entries = [*output.prompt_logprobs[1:], *done.logprobs]
        assert len(entries) == len(rows) - 1
        for entry, row, token in zip(entries, rows, [*prompt[1:], *done.token_ids], strict=False):
            assert entry is not None
            assert entry[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
