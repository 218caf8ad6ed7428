"""Seeded sampling does not depend on speculation, company or delay, and follows the distribution.

The reference is the plainest engine there is: no drafter, one request at a time, nothing cached.
Whether its distribution is the model's is checked against transformers' logits at the end.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from e2e.engines import (
    VOCAB,
    Models,
    make_engine,
    random_prompt,
    run,
    token_ids,
    tokens,
    transformers_model,
)
from models.paged_harness import save_random
from paceline.core.stats import EngineStats
from paceline.outputs import RequestOutput
from paceline.sampling_params import SamplingParams

# Few candidates, so that outputs repeat themselves: penalties bite and a lookup finds something.
FEW = dict.fromkeys(range(40, 60), 6.0)
EVERYTHING = {
    "temperature": 0.9,
    "top_k": 30,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.4,
    "logit_bias": FEW,
    "min_tokens": 12,
    "stop_token_ids": [44, 51, 53, 58],
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.5, "logit_bias": FEW},
    "presence": {"presence_penalty": 1.5, "logit_bias": FEW},
    "frequency": {"frequency_penalty": 1.0, "logit_bias": FEW},
    "greedy frequency": {"temperature": 0, "frequency_penalty": 0.7, "logit_bias": FEW},
    "negative presence": {"presence_penalty": -1.0, "logit_bias": FEW},
    "bias": {"logit_bias": {7: 5.0, 8: 5.0, 9: -100.0}},
    "few": {"logit_bias": dict.fromkeys(range(40, 43), 60.0), "temperature": 0.5},
    "stop ids": {"logit_bias": FEW, "stop_token_ids": list(range(40, 44))},
    "min tokens": {"logit_bias": FEW, "stop_token_ids": list(range(40, 44)), "min_tokens": 17},
    "short": {"max_tokens": 2},
    "one token": {"max_tokens": 1},
    "everything": EVERYTHING,
    "everything, greedy": EVERYTHING | {"temperature": 0},
}
COUNT = 24
SHARED = random_prompt(40, seed=2)
PROMPTS = [
    [*SHARED, *random_prompt(1 + i % 3, seed=i)] if i % 2 else random_prompt(1 + 7 * i, seed=9)
    for i in range(len(CASES))
]


def params(seed: int = 0, **changes: Any) -> list[SamplingParams]:
    """Every case with a seed of its own."""
    common = {"max_tokens": COUNT, "ignore_eos": True}
    return [
        SamplingParams(**common | {"seed": 100 * seed + number} | values | changes)
        for number, values in enumerate(CASES.values())
    ]


@pytest.fixture(scope="module")
def reference(target: Path) -> list[RequestOutput]:
    """Each request alone, without speculation."""
    engine = make_engine(target, enable_prefix_caching=False)
    pairs = zip(PROMPTS, params(), strict=True)
    outputs = [run(engine, [prompt], sampling)[0] for prompt, sampling in pairs]
    assert engine.stats.num_draft_tokens == engine.stats.num_cached_tokens == 0
    return outputs


def endings(outputs: Sequence[RequestOutput]) -> list[tuple[Any, Any]]:
    return [(c.finish_reason, c.stop_reason) for o in outputs for c in o.outputs]


# name -> (drafter, k, delay, further arguments)
VARIANTS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "company": ("", 0, 0, {"max_num_seqs": 32}),
    "company, delayed": ("", 0, 1, {"max_num_batched_tokens": 48}),
    "self": ("self", 4, 0, {"max_num_seqs": 32}),
    "self, delayed, tiny pool": ("self", 5, 1, {"num_gpu_blocks_override": 14}),
    "near": ("near", 3, 0, {"max_num_batched_tokens": 40}),
    "near, delayed": ("near", 7, 1, {"block_size": 4}),
    "near, static": ("near", 2, 1, {"batching": "static"}),
    "random": ("random", 3, 0, {}),
    "random, delayed": ("random", 1, 1, {"enable_prefix_caching": False}),
    "lookup": ("[ngram]", 5, 0, {"ngram_prompt_lookup_min": 1}),
    "lookup, delayed, tiny pool": (
        "[ngram]",
        3,
        1,
        {"ngram_prompt_lookup_min": 1, "num_gpu_blocks_override": 14},
    ),
}


def variant_arguments(models: Models, name: str) -> tuple[int, dict[str, Any]]:
    drafter, k, delay, args = VARIANTS[name]
    if not drafter:
        return delay, args
    paths = {
        "self": models.tiny(),
        "near": models.tiny(perturb=0.05, vocab_padding=24),
        "random": models.random_drafter(),
    }
    return delay, {
        "speculative_model": str(paths.get(drafter, drafter)),
        "num_speculative_tokens": k,
        **args,
    }


@pytest.mark.parametrize("name", VARIANTS)
def test_same_tokens_with_any_drafter_in_any_company(
    models: Models, target: Path, reference: list[RequestOutput], name: str
) -> None:
    delay, args = variant_arguments(models, name)
    engine = make_engine(target, delay=delay, **args)
    outputs = run(engine, PROMPTS, params())
    for case, ours, alone in zip(CASES, outputs, reference, strict=True):
        assert token_ids([ours]) == token_ids([alone]), case
    assert endings(outputs) == endings(reference)
    assert_ran(name, engine.stats)


def assert_ran(name: str, stats: EngineStats) -> None:
    drafter, k, _, args = VARIANTS[name]
    assert (stats.num_draft_tokens > 0) == (k > 0)
    assert (stats.num_preemptions > 0) == ("num_gpu_blocks_override" in args)
    assert (stats.num_cached_tokens > 0) == args.get("enable_prefix_caching", True)
    if "max_num_batched_tokens" in args:
        assert stats.num_prefill_chunks > len(PROMPTS)
    rate = stats.acceptance_rate
    if drafter == "random":
        assert rate is not None
        assert rate < 0.2  # the few tokens that a bias leaves are guessed now and then
    if drafter in ("near", "[ngram]"):
        assert rate is not None
        assert 0.05 < rate < 0.95


def test_cases_do_what_they_are_for(reference: list[RequestOutput]) -> None:
    """Each parameter changed something, so that the comparisons above can fail."""
    found = dict(zip(CASES, reference, strict=True))
    reasons = {name: output.outputs[0].finish_reason for name, output in found.items()}
    lengths = {name: len(output.outputs[0].token_ids) for name, output in found.items()}
    assert reasons["stop ids"] == reasons["min tokens"] == "stop"
    assert lengths["stop ids"] < 17 < lengths["min tokens"] < COUNT
    assert reasons["everything"] == "stop"
    assert lengths["everything"] > 12
    assert (lengths["short"], lengths["one token"]) == (2, 1)
    for name in ("plain", "top_k", "repetition", "frequency", "hot"):
        assert lengths[name] == COUNT
    repeats = {name: COUNT - len(set(o.outputs[0].token_ids)) for name, o in found.items()}
    assert repeats["negative presence"] > repeats["presence"]
    assert repeats["few"] > 15


def test_every_parameter_matters(target: Path, reference: list[RequestOutput]) -> None:
    """Without its parameters every case gives other tokens from the same seed."""
    bare = [SamplingParams(seed=i, max_tokens=COUNT, ignore_eos=True) for i in range(len(CASES))]
    outputs = run(make_engine(target), PROMPTS, bare)
    same = [
        case
        for case, ours, other in zip(CASES, token_ids(outputs), token_ids(reference), strict=True)
        if ours == other
    ]
    assert same == ["plain"]


@pytest.mark.parametrize("name", ["company", "self", "near, delayed", "lookup"])
def test_outputs_of_one_request_differ_and_do_not_depend_on_speculation(
    models: Models, target: Path, name: str
) -> None:
    prompts = [PROMPTS[3], PROMPTS[0], PROMPTS[5]]
    several = [
        SamplingParams(n=5, seed=8, max_tokens=15, ignore_eos=True),
        SamplingParams(n=3, seed=9, max_tokens=15, ignore_eos=True),
        SamplingParams(n=4, max_tokens=15, ignore_eos=True, logit_bias=FEW, presence_penalty=1.0),
    ]
    plain = make_engine(target, enable_prefix_caching=False)
    expected = [run(plain, [prompt], one)[0] for prompt, one in zip(prompts, several, strict=True)]
    delay, args = variant_arguments(models, name)
    engine = make_engine(target, delay=delay, **args)
    outputs = run(engine, prompts, several)
    assert tokens(outputs) == tokens(expected)
    for output, one in zip(outputs, several, strict=True):
        assert [completion.index for completion in output.outputs] == list(range(one.n))
        assert len(set(map(tuple, tokens([output])))) == one.n
    assert engine.stats.num_cached_tokens > 0  # the outputs share their prompt
    assert (engine.stats.num_draft_tokens > 0) == (VARIANTS[name][1] > 0)


def test_first_of_n_is_the_single_output(target: Path) -> None:
    engine = make_engine(target)
    one = run(engine, [PROMPTS[3]], SamplingParams(seed=4, max_tokens=12, ignore_eos=True))
    many = run(engine, [PROMPTS[3]], SamplingParams(n=4, seed=4, max_tokens=12, ignore_eos=True))
    assert tokens(many)[0] == tokens(one)[0]


def test_unseeded_requests_repeat_from_run_to_run(models: Models, target: Path) -> None:
    """Seeds derive from the engine's and the order of requests, not from what else happens."""
    free = [SamplingParams(max_tokens=COUNT, ignore_eos=True)] * 6

    def once(name: str, seed: int) -> list[list[int]]:
        delay, args = variant_arguments(models, name)
        return token_ids(
            run(make_engine(target, delay=delay, seed=seed, **args), PROMPTS[:6], free)
        )

    first = once("company", 0)
    assert once("company", 0) == first
    assert once("near, delayed", 0) == first
    assert once("company", 1) != first
    # The same prompt twice, unseeded, is sampled twice.
    engine = make_engine(target)
    twice = token_ids(run(engine, [PROMPTS[1]] * 2, free[:2]))
    assert twice[0] != twice[1]


def test_seeds_matter(target: Path) -> None:
    engine = make_engine(target)
    seeded = [
        SamplingParams(seed=seed, max_tokens=10, ignore_eos=True)
        for seed in (0, 1, 2**63, 2**64 - 1, -5)
    ]
    outputs = token_ids(run(engine, [PROMPTS[4]] * len(seeded), seeded))
    assert len(set(map(tuple, outputs))) == len(seeded)
    assert token_ids(run(engine, [PROMPTS[4]] * len(seeded), seeded)) == outputs


# ---- the distribution ----------------------------------------------------------------------------

SMALL = 5  # tokens of the vocabulary
LENGTH = 4  # output tokens: 625 outcomes
DRAWS = 3200
PROMPT = [3, 1, 4, 1, 0]
DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "truncated": {"top_k": 4, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
    "penalties": {
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.3,
        "logit_bias": {2: 1.0},
    },
}


Logits = dict[tuple[int, ...], torch.Tensor]  # of the next token, by the output so far


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Logits]:
    """A target, a drafter that knows nothing of it, and transformers' logits of the target."""
    root = tmp_path_factory.mktemp("small")
    save_random(root / "target", "qwen2", seed=1, vocab_size=SMALL)
    save_random(root / "drafter", "qwen2", seed=2, vocab_size=SMALL, num_hidden_layers=1)
    model = transformers_model(root / "target")
    logits: Logits = {}
    for length in range(LENGTH):
        outputs = list(itertools.product(range(SMALL), repeat=length))
        with torch.no_grad():
            batch = model(torch.tensor([[*PROMPT, *output] for output in outputs])).logits
        logits.update(zip(outputs, batch[:, -1], strict=True))
    return root / "target", root / "drafter", logits


def exact_probs(logits: torch.Tensor, context: list[int], sampling: SamplingParams) -> np.ndarray:
    """Distribution of the token after ``context``, float64, from the definitions."""
    values = logits.double().numpy().copy()
    output = context[len(PROMPT) :]
    for token, bias in (sampling.logit_bias or {}).items():
        values[token] += bias
    for token in set(context):
        factor = sampling.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token, count in Counter(output).items():
        values[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    values /= sampling.temperature
    probs = np.exp(values - values.max())
    probs /= probs.sum()
    probs[probs < sampling.min_p * probs.max()] = 0.0
    if sampling.top_k:
        probs[np.argsort(-probs)[sampling.top_k :]] = 0.0
    probs /= probs.sum()
    above = np.array([probs[probs > p].sum() for p in probs])
    probs[above >= sampling.top_p] = 0.0
    return probs / probs.sum()


def outcome_probs(logits: Logits, sampling: SamplingParams) -> dict[tuple[int, ...], float]:
    """Exact probability of every output of LENGTH tokens."""
    found = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for output, mass in found.items():
            probs = exact_probs(logits[output], [*PROMPT, *output], sampling)
            longer |= {(*output, token): mass * probs[token] for token in range(SMALL)}
        found = longer
    return found


def chi_square_z(counts: Counter[tuple[int, ...]], probs: dict[tuple[int, ...], float]) -> float:
    """Fit as a standard normal (Wilson and Hilferty, 1931); rare outcomes are merged."""
    total = sum(counts.values())
    impossible = {outcome for outcome, p in probs.items() if p == 0}
    assert not impossible & set(counts), "an outcome of probability zero was drawn"
    often = [outcome for outcome, p in probs.items() if p * total >= 5]
    observed = [counts[outcome] for outcome in often]
    expected = [probs[outcome] * total for outcome in often]
    if total - sum(expected) > 1:
        observed.append(total - sum(observed))
        expected.append(total - sum(expected))
    assert len(expected) > 20
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    freedom = len(expected) - 1
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_output_follows_the_exact_distribution(small: tuple[Path, Path, Logits], name: str) -> None:
    """Outputs of a few requests, drafted by a model that is mostly wrong."""
    path, drafter, logits = small
    requests = [
        SamplingParams(n=DRAWS // 8, seed=seed, max_tokens=LENGTH, **DISTRIBUTIONS[name])
        for seed in range(8)
    ]
    engine = make_engine(
        path,
        skip_tokenizer_init=True,
        max_num_seqs=256,
        speculative_model=str(drafter),
        num_speculative_tokens=2,
    )
    outputs = tokens(run(engine, [PROMPT] * len(requests), requests))
    assert {len(ids) for ids in outputs} == {LENGTH}
    counts = Counter(map(tuple, outputs))
    probs = outcome_probs(logits, requests[0])
    assert math.isclose(sum(probs.values()), 1.0, abs_tol=1e-9)
    z = chi_square_z(counts, probs)
    assert abs(z) < 4, f"z = {z:.1f}"
    # A distribution a little flatter would have shown.
    flatter = {outcome: p**0.7 for outcome, p in probs.items()}
    total = sum(flatter.values())
    assert chi_square_z(counts, {outcome: p / total for outcome, p in flatter.items()}) > 6
    assert engine.stats.num_draft_tokens > DRAWS
    assert engine.stats.acceptance_rate is not None
    assert 0.1 < engine.stats.acceptance_rate < 0.6


def test_seeds_are_as_independent_as_outputs_of_one_request(
    small: tuple[Path, Path, Logits],
) -> None:
    path, _, logits = small
    engine = make_engine(path, skip_tokenizer_init=True, max_num_seqs=256)
    draws = [SamplingParams(seed=seed, max_tokens=LENGTH) for seed in range(2000)]
    outputs = token_ids(run(engine, [PROMPT] * len(draws), draws))
    z = chi_square_z(Counter(map(tuple, outputs)), outcome_probs(logits, draws[0]))
    assert abs(z) < 4, f"z = {z:.1f}"


def test_padding_ids_are_never_sampled(models: Models) -> None:
    """At a temperature that makes every id alike."""
    engine = make_engine(models.family("llama"))
    wild = SamplingParams(n=40, seed=1, temperature=50.0, max_tokens=20, ignore_eos=True)
    ids = list(itertools.chain.from_iterable(tokens(run(engine, [PROMPTS[1]], wild))))
    assert max(ids) < VOCAB
    assert len(set(ids)) > VOCAB / 2
