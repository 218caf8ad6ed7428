"""What is refused and fixed before a model loads."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from paceline.bench.prepare import place
from paceline.engine.tokenizer import Tokenizer
from paceline.errors import CapacityError, ConfigError, RequestError
from paceline.hub import download

MakePlans = Any


def test_requests_are_exact_and_the_same_for_both_sides(make_plans: MakePlans) -> None:
    sides = {"a": {}, "b": {"block_size": 8}}
    plans = make_plans(sides, count=20, input_len="3-9", output_len="mix:0.5=2,0.5=7")
    first, second = (plan.workload for plan in plans)
    assert first == second
    assert {len(prompt) for prompt in first.prompts} <= set(range(3, 10))
    assert sorted(one.max_tokens for one in first.sampling) == [2] * 10 + [7] * 10
    assert all(one.ignore_eos for one in first.sampling)
    assert len({one.seed for one in first.sampling}) == 20
    assert first.num_prompt_tokens == sum(map(len, first.prompts))


def test_random_prompts_have_no_special_ids(make_plans: MakePlans) -> None:
    (plan,) = make_plans(count=40, input_len="50")
    tokenizer = Tokenizer.load(download("paceline/demo"))
    ids = {token for prompt in plan.workload.prompts for token in prompt}
    assert len(ids) > 500
    assert not ids & tokenizer.added_token_ids
    assert max(ids) < plan.config.model.arch.vocab_size
    (bare,) = make_plans({"a": {"skip_tokenizer_init": True}})
    assert max(map(max, bare.workload.prompts)) < bare.config.model.arch.vocab_size


def test_the_seed_and_given_sampling_decide(make_plans: MakePlans) -> None:
    (one,), (two,) = make_plans(seed=1), make_plans(seed=2)
    assert one.workload.prompts != two.workload.prompts
    (pinned,) = make_plans(sampling={"seed": 9, "temperature": 0.5})
    assert {(s.seed, s.temperature) for s in pinned.workload.sampling} == {(9, 0.5)}


def test_the_pool_is_fixed_before_anything_takes_memory(
    make_plans: MakePlans, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 200 * 1024**2
    monkeypatch.setattr("paceline.check.machine.available_memory", lambda: free)
    plans = make_plans({"a": {"kv_cache_memory_bytes": None}, "b": {"num_gpu_blocks_override": 9}})
    assert plans[0].arguments["kv_cache_memory_bytes"] > 1024**2
    assert plans[1].config.cache.num_blocks == 9
    assert [plan.free_bytes for plan in plans] == [free, free]


def test_too_long_requests_are_refused_with_the_numbers(make_plans: MakePlans) -> None:
    with pytest.raises(RequestError, match=r"40 prompt and 30 output tokens, 70 in all.* is 64"):
        make_plans(input_len="40", output_len="30")
    with pytest.raises(RequestError, match=r"^variant b: request 1 would have"):
        make_plans({"a": {}, "b": {"max_model_len": 13}})
    with pytest.raises(RequestError, match=r"1000000 prompts .* have 40000000 tokens"):
        make_plans(count=10**6, input_len="40")
    with pytest.raises(RequestError, match="logit_bias has the id 5000"):
        make_plans(sampling={"logit_bias": {5000: 1.0}})
    (exact,) = make_plans(input_len="40", output_len="24")
    assert exact.workload.num_prompt_tokens == 160


def test_faults_name_their_variant(make_plans: MakePlans) -> None:
    with pytest.raises(ConfigError, match=r"^variant b: `block_size` must be"):
        make_plans({"a": {}, "b": {"block_size": 0}})


def test_where_engines_live(make_plans: MakePlans) -> None:
    (one,) = make_plans()
    assert one.needed_bytes > 8 * 1024**2
    assert place([one], "auto") == "shared"
    assert place([one], "separate") == "separate"
    enough = dataclasses.replace(one, free_bytes=2 * one.needed_bytes)
    short = dataclasses.replace(one, free_bytes=2 * one.needed_bytes - 1)
    unknown = dataclasses.replace(one, needed_bytes=None)
    assert place([enough, enough], "auto") == "shared"
    assert place([enough, enough], "separate") == "separate"
    assert place([short, enough], "auto") == "alternating"
    assert place([short, enough], "separate") == "alternating"
    assert place([short, unknown], "auto") == "shared"
    with pytest.raises(CapacityError, match="the 2 engines need") as caught:
        place([short, enough], "shared")
    assert re.search(r"need \S+ MiB together, but only \S+ MiB are free", str(caught.value))
