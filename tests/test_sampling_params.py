"""SamplingParams: defaults, normalisation, and one clear error for each wrong value."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from paceline.errors import RequestError
from paceline.no_effect import closest
from paceline.sampling_params import NO_EFFECT, SamplingParams, StructuredOutputsParams


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.min_p, params.max_tokens, params.min_tokens) == (0.0, 16, 0)
    assert (params.presence_penalty, params.frequency_penalty) == (0.0, 0.0)
    assert params.repetition_penalty == 1.0
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ([], [], None)
    assert (params.logprobs, params.prompt_logprobs, params.seed) == (None, None, None)
    assert params.skip_special_tokens is True
    assert params.ignore_eos is params.include_stop_str_in_output is False


@pytest.mark.parametrize(
    ("given", "field", "normalised"),
    [
        ({"stop": "END"}, "stop", ["END"]),
        ({"stop": ("a", "b")}, "stop", ["a", "b"]),
        ({"stop_token_ids": (1, np.int64(2))}, "stop_token_ids", [1, 2]),
        ({"top_k": -1}, "top_k", 0),
        ({"seed": -1}, "seed", None),
        ({"seed": 2**64 - 1}, "seed", 2**64 - 1),
        ({"temperature": 1}, "temperature", 1.0),
        ({"temperature": np.float32(0.5)}, "temperature", 0.5),
        ({"max_tokens": None}, "max_tokens", None),
        ({"logit_bias": {"12": -100, 3: 1.5}}, "logit_bias", {12: -100.0, 3: 1.5}),
        ({"logit_bias": {}}, "logit_bias", None),
    ],
)
def test_values_are_normalised(given: dict[str, Any], field: str, normalised: object) -> None:
    value = getattr(SamplingParams(**given), field)
    assert value == normalised
    assert type(value) is type(normalised)


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"n": True},
        {"n": 1.0},
        {"n": 10**6},
        {"n": 2, "temperature": 0.0},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "0.7"},
        {"temperature": True},
        {"temperature": None},
        {"temperature": 10**400},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": math.nan},
        {"top_k": -2},
        {"top_k": 1.5},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf},
        {"seed": 2**64},
        {"top_k": 2**63},
        {"max_tokens": 2**63},
        {"stop_token_ids": [2**63]},
        {"seed": -(2**63) - 1},
        {"seed": 1.0},
        {"stop": [""]},
        {"stop": ["a"] * 129},
        {"stop": "a" * 16_385},
        {"stop_token_ids": [5] * 4097},
        {"stop": ""},
        {"stop": [1]},
        {"stop": 5},
        {"stop": b"x"},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": ["1"]},
        {"stop_token_ids": 1},
        {"stop_token_ids": "12"},
        {"max_tokens": 0},
        {"max_tokens": "16"},
        {"min_tokens": -1},
        {"min_tokens": 17},
        {"logprobs": -1},
        {"logprobs": True},
        {"prompt_logprobs": -1},
        {"logit_bias": {1: 101}},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {-1: 1}},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {1: "1"}},
        {"logit_bias": [1]},
        {"ignore_eos": 1},
        {"skip_special_tokens": None},
    ],
    ids=str,
)
def test_wrong_value_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"`{next(iter(wrong))}`"):
        SamplingParams(**wrong)


def test_unknown_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(RequestError, match=r"`temprature`.*did you mean `temperature`"):
        SamplingParams(temprature=0.5)
    with pytest.raises(RequestError, match=r"`foo`.*known are: n, temperature"):
        SamplingParams(foo=0.5)


def test_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="top_p"):
        SamplingParams(top_p=2)


def test_greedy_and_penalties() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=1e-4).is_greedy
    assert not SamplingParams().needs_penalties
    for name, value in (
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -0.1),
    ):
        assert SamplingParams(**{name: value}).needs_penalties


def test_later_assignment_is_checked_by_validate() -> None:
    params = SamplingParams()
    params.stop = "x"
    params.validate()
    assert params.stop == params.stop_strings == ["x"]
    params.temperature = math.nan
    with pytest.raises(RequestError, match="temperature"):
        params.validate()
    with pytest.raises(AttributeError):
        params.max_token = 5  # type: ignore[attr-defined]


def test_copies_and_pickles() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, seed=7)
    assert copy.deepcopy(params) == params
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, seed=8).seed == 8


def test_lists_are_not_shared_with_the_caller() -> None:
    stop = ["a"]
    params = SamplingParams(stop=stop)
    stop.append("")
    assert params.stop == ["a"]


def test_needs_the_standard_library_only() -> None:
    code = (
        "import sys, paceline.sampling_params;"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": 10**5000},
        {"temperature": 10**5000},
        {"logit_bias": {"1" * 5000: 1.0}},
        {"max_tokens": -(10**5000)},
    ],
)
def test_numbers_of_thousands_of_digits_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_a_clone_is_independent() -> None:
    params = SamplingParams(stop=["a"], logit_bias={3: 1.0}, seed=5)
    copied = params.clone()
    assert copied == params
    assert isinstance(params.stop, list)
    params.stop.append("b")
    assert copied.stop == ["a"]


def test_vllms_parameters_change_nothing_at_their_defaults() -> None:
    accepted = {name: (entry.accepted or (True,))[0] for name, entry in NO_EFFECT.items()}
    assert SamplingParams(seed=7, **accepted) == SamplingParams(seed=7)
    assert not {f.name for f in dataclasses.fields(SamplingParams)} & set(NO_EFFECT)
    numbers: dict[str, Any] = {"length_penalty": 1, "best_of": np.int64(1), "bad_words": []}
    assert SamplingParams(seed=7, **numbers) == SamplingParams(seed=7)
    assert dataclasses.replace(SamplingParams(), **numbers) == SamplingParams()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"best_of": 2}, "`best_of=2` is not supported: .*use `n`"),
        ({"best_of": 0}, "`best_of=0`"),
        ({"best_of": True}, "`best_of=True`"),
        ({"detokenize": False}, "`detokenize=False` .*skip_tokenizer_init=True"),
        ({"bad_words": ["x"]}, "`bad_words=.*use `logit_bias`"),
        ({"guided_decoding": {"json": {}}}, "`guided_decoding=.*use `structured_outputs`"),
        ({"logits_processors": [print]}, "`logits_processors=.*not supported"),
        ({"allowed_token_ids": np.array([1, 2])}, "`allowed_token_ids="),
        ({"allowed_token_ids": list(range(1000))}, r"`allowed_token_ids=\.\.\.` is not"),
        ({"best_of": 10**5000}, r"`best_of=\.\.\.` is not"),
        ({"use_beam_search": True}, "no beam search.*use `n`"),
        ({"length_penalty": 0.5}, "`length_penalty=0.5`"),
        ({"spaces_between_special_tokens": False}, "hint: leave it out"),
        ({"output_text_buffer_length": 3}, "leave it out or set it to 0"),
        ({"truncate_prompt_tokens": 5}, "shorten the prompt"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_vllms_parameters_are_refused_at_other_values(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        SamplingParams(**wrong)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("temp", "temperature"), ("topk", "top_k"), ("max_new_tokens", "max_tokens")],
)
def test_a_name_is_suggested_by_its_beginning_or_likeness(name: str, meant: str) -> None:
    with pytest.raises(RequestError, match=f"`{name}`. hint: did you mean `{meant}`"):
        SamplingParams(**{name: 1})  # type: ignore[arg-type]


def test_vllms_structured_parameters() -> None:
    plain = StructuredOutputsParams(regex="a")
    taken: dict[str, Any] = {"disable_fallback": True, "whitespace_pattern": None}
    assert StructuredOutputsParams(regex="a", **taken) == plain
    with pytest.raises(RequestError, match=r"whitespace_pattern='x'.*`disable_any_whitespace`"):
        StructuredOutputsParams(json={}, whitespace_pattern="x")  # type: ignore[call-arg]


def test_keys_of_structured_outputs_must_be_names() -> None:
    with pytest.raises(RequestError, match=r"`structured_outputs` has the key 5.*json"):
        SamplingParams(structured_outputs={5: "a"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("--disable-log-requests", "--enable-log-requests", None),
        ("--no-access-log", "--access-log", None),
        ("--no-disable-cachin", "--no-disable-caching", "--no-disable-caching"),
        ("--no-disable-caching", "--disable-caching", None),
        ("--disable-fastapi-doc", "--disable-fastapi-docs", "--disable-fastapi-docs"),
        ("spaces_between_special_tokens", "skip_special_tokens", None),
        ("ma", "max_tokens", None),
        ("max", "max_tokens", "max_tokens"),
    ],
)
def test_no_opposite_and_nothing_unlike_is_suggested(
    name: str, known: str, meant: str | None
) -> None:
    assert closest(name, [known]) == meant
