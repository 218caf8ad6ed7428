"""What is wrong with a request or a setting is said at once and clearly, and hurts nobody else.

Every test ends with the engine doing its work as if nothing had happened.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from e2e.callers import GREEDY, MAX_LEN, PROMPT, assert_works, generate, open_llm
from e2e.engines import VOCAB, Models, assert_idle
from paceline import LLM
from paceline.errors import ConfigError, PacelineError, RequestError
from paceline.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def shared(models: Models) -> Iterator[LLM]:
    """For requests that are refused; none of them may leave a trace."""
    with open_llm(models.tiny()) as llm:
        yield llm


@pytest.fixture(scope="module")
def wordless(models: Models) -> Iterator[LLM]:
    with open_llm(models.tiny(), skip_tokenizer_init=True) as llm:
        yield llm


TOP = VOCAB + 8 - 1  # the embedding has 8 rows more than the tokenizer has ids
# prompts -> what the message must say
PROMPTS: dict[str, tuple[Any, str]] = {
    "empty text": ("", "prompt is empty"),
    "empty text among others": (["hello", ""], "prompt is empty"),
    "empty ids": ([[]], "prompt has no tokens"),
    "empty ids in a dictionary": ({"prompt_token_ids": []}, "prompt has no tokens"),
    "empty array": ([np.zeros(0, np.int64)], "prompt has no tokens"),
    "id too large": ([[1, 2, TOP + 1]], rf"token 2 is {TOP + 1}, .* run from 0 to {TOP}"),
    "negative id": ([[1, -1]], rf"token 1 is -1, .* run from 0 to {TOP}"),
    "huge id": ([[2**70]], "run from 0 to"),
    "bool": ([[1, True]], "token 1 is True, not an integer"),
    "float": ([[1, 2.0]], r"token 1 is 2\.0, not an integer"),
    "float array": ([np.array([1.0, 2.0])], "not an integer"),
    "text in ids": ([[1, "2"]], "token 1 is '2', not an integer"),
    "None": ([None], "cannot be of type NoneType"),
    "number in a list": ([1.5], "cannot be of type float"),
    "bytes": (b"abc", "a prompt cannot be of type bytes. hint: decode it"),
    "bytes in a list": ([b"abc"], "cannot be of type bytes"),
    "bytes among others": (["hello", bytearray(b"abc")], "cannot be of type bytearray"),
    "bytes in a dictionary": ({"prompt": b"abc"}, "cannot be of type bytes"),
    "dictionary without a prompt": ([{}], "cannot be of type NoneType"),
    "unknown key": ({"text": "hello"}, "no key 'text'"),
    "too long": (
        [[5] * MAX_LEN],
        rf"the prompt has {MAX_LEN} tokens, but max_model_len is {MAX_LEN}",
    ),
    "nested": ([[[1, 2]]], "not an integer"),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_that_are_refused(shared: LLM, expected: list[int], name: str) -> None:
    prompts, message = PROMPTS[name]
    with pytest.raises(RequestError, match=message) as caught:
        generate(shared, prompts)
    assert "hint:" in str(caught.value) or "run from 0 to" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert_works(shared, expected)


def test_prompts_at_the_limits_are_served(shared: LLM) -> None:
    prompts = [[TOP], np.array([0, 5]), (1, 2), [5] * (MAX_LEN - 1), {"prompt_token_ids": (3, 4)}]
    outputs = generate(shared, prompts)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [30, 30, 30, 1, 30]
    assert generate(shared, [np.int64(3), 4])[0].prompt_token_ids == [3, 4]
    assert generate(shared, np.array([3, 4]))[0].prompt_token_ids == [3, 4]


SAMPLINGS: dict[str, tuple[dict[str, Any], str]] = {
    "negative temperature": ({"temperature": -0.1}, "`temperature` must be finite and at least 0"),
    "NaN temperature": ({"temperature": float("nan")}, "`temperature` must be finite"),
    "infinite temperature": ({"temperature": float("inf")}, "`temperature` must be finite"),
    "text temperature": ({"temperature": "hot"}, "`temperature` must be a number"),
    "top_p above 1": ({"top_p": 1.1}, "`top_p` must be finite and between 0 and 1"),
    "top_p 0": ({"top_p": 0.0}, "`top_p` must be above 0"),
    "top_k": ({"top_k": -2}, "`top_k` must be at least -1"),
    "no tokens": ({"max_tokens": 0}, "`max_tokens` must be at least 1"),
    "n": ({"n": 0}, "`n` must be between 1"),
    "greedy n": ({"n": 2, "temperature": 0}, "`n` must be 1 with greedy"),
    "min above max": ({"min_tokens": 20}, r"`min_tokens` \(20\) is above `max_tokens` \(16\)"),
    "empty stop": ({"stop": [""]}, "`stop` holds an empty string"),
    "empty stop among others": ({"stop": ["a", ""]}, "`stop` holds an empty string"),
    "stop of numbers": ({"stop": [3]}, "`stop` must hold strings"),
    "unknown name": ({"temprature": 1.0}, "unknown sampling parameter `temprature`.*temperature"),
    "negative stop id": ({"stop_token_ids": [-1]}, "`stop_token_ids` must be at least 0"),
    "bias": ({"logit_bias": {3: 101}}, "`logit_bias` must be finite and between -100 and 100"),
    "repetition": ({"repetition_penalty": 0.0}, "`repetition_penalty` must be above 0"),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampling_parameters_that_are_refused(name: str) -> None:
    values, message = SAMPLINGS[name]
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)


ADMISSIONS: dict[str, tuple[Any, str]] = {
    "bias beyond the vocabulary": (
        SamplingParams(logit_bias={3: 1.0, TOP + 1: 1.0}),
        rf"logit_bias has the id {TOP + 1}, .* run from 0 to {TOP}",
    ),
    "stop id beyond the vocabulary": (
        SamplingParams(stop_token_ids=[TOP + 1]),
        rf"stop_token_ids has the id {TOP + 1}, .* run from 0 to {TOP}",
    ),
    "too many logprobs": (SamplingParams(logprobs=21), "logprobs=21 is above max_logprobs 20"),
    "too many prompt logprobs": (
        SamplingParams(prompt_logprobs=50),
        "prompt_logprobs=50 is above max_logprobs 20",
    ),
    "a dictionary": ({"temperature": 0}, "must be a SamplingParams, got dict"),
    "two for one": ([GREEDY, GREEDY], "1 prompt but 2 SamplingParams. hint: "),
    "none for one": ([], "1 prompt but 0 SamplingParams. hint: "),
    "a list of something else": ([3], "must be a SamplingParams, got int"),
}


@pytest.mark.parametrize("name", ADMISSIONS)
def test_parameters_that_do_not_fit_the_engine(shared: LLM, expected: list[int], name: str) -> None:
    sampling, message = ADMISSIONS[name]
    with pytest.raises(RequestError, match=message):
        generate(shared, [PROMPT], sampling)
    assert_works(shared, expected)


def test_field_assigned_later_is_checked_at_admission(shared: LLM, expected: list[int]) -> None:
    sampling = SamplingParams()
    sampling.temperature = float("nan")
    with pytest.raises(RequestError, match="`temperature` must be finite"):
        generate(shared, [PROMPT], sampling)
    assert_works(shared, expected)


def test_one_wrong_prompt_starts_none_of_its_list(shared: LLM, expected: list[int]) -> None:
    before = shared.engine.stats.num_steps
    with pytest.raises(RequestError, match="token 0 is -3"):
        generate(shared, [PROMPT, [-3], PROMPT])
    assert shared.engine.stats.num_steps == before
    assert_works(shared, expected)


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        ("hello", GREEDY, "text prompt needs a tokenizer"),
        ({"prompt": "hello"}, GREEDY, "text prompt needs a tokenizer"),
        ([PROMPT], SamplingParams(stop="x"), "stop strings need a tokenizer.*stop_token_ids"),
    ],
)
def test_without_a_tokenizer(
    wordless: LLM, prompts: Any, sampling: SamplingParams, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        generate(wordless, prompts, sampling)
    with pytest.raises(RequestError, match="needs a tokenizer"):
        wordless.chat([{"role": "user", "content": "hi"}])
    output = generate(wordless)[0]
    assert len(output.outputs[0].token_ids) == 30
    assert_idle(wordless.engine)


def test_no_prompts_have_no_outputs(shared: LLM, expected: list[int]) -> None:
    assert generate(shared, []) == generate(shared, np.zeros((0, 3), np.int64)) == []
    assert shared.generate([], []) == shared.generate(()) == []
    with pytest.raises(RequestError, match="0 prompts but 1 SamplingParams"):
        shared.generate([], [GREEDY])
    assert_works(shared, expected)


def test_vllms_keywords_of_a_call(shared: LLM, expected: list[int]) -> None:
    nothing: dict[str, Any] = {
        "lora_request": None,
        "priority": None,
        "prompt_adapter_request": None,
        "tokenization_kwargs": None,
    }
    output = shared.generate([PROMPT], GREEDY, use_tqdm=False, **nothing)[0]
    assert output.outputs[0].token_ids == expected
    for wrong, says in (
        ({"lora_request": "x"}, "`lora_request='x'` is not supported: LoRA"),
        ({"priority": [1]}, "first come first served"),
        ({"sampling_param": GREEDY}, "unknown keyword .*did you mean `sampling_params`"),
        ({"lora_reqest": None}, "did you mean `lora_request`"),
    ):
        with pytest.raises(RequestError, match=says):
            shared.generate([PROMPT], GREEDY, **wrong)
    messages = [{"role": "user", "content": "hi"}]
    template = "{{ messages[0].content }}"
    options: dict[str, Any] = {**nothing, "chat_template_content_format": "auto"}
    answer = shared.chat(messages, GREEDY, use_tqdm=False, chat_template=template, **options)
    assert answer[0].prompt == "hi"
    with pytest.raises(RequestError, match="did you mean `chat_template`"):
        shared.chat(messages, GREEDY, chat_templat=template)
    with pytest.raises(RequestError, match="`priority="):
        shared.chat(messages, GREEDY, priority=[1])
    assert_works(shared, expected)


@pytest.mark.parametrize("messages", [[], "hi", None, [{"content": "no role"}], [[]], [3]])
def test_messages_that_are_refused(shared: LLM, expected: list[int], messages: Any) -> None:
    with pytest.raises(RequestError):
        shared.chat(messages, GREEDY, use_tqdm=False)
    assert_works(shared, expected)


def test_prompt_larger_than_the_pool_blocks_nobody(models: Models, expected: list[int]) -> None:
    """The length is lowered to the pool, so that the refusal names one limit and the numbers."""
    with open_llm(models.tiny(), max_model_len=None, num_gpu_blocks_override=5) as llm:
        stream = llm.stream(PROMPT, GREEDY)
        next(stream)
        with pytest.raises(RequestError, match="prompt has 81 tokens, but"):
            generate(llm, [[5] * 81])
        *_, last = stream
        assert last.outputs[0].token_ids == expected
        assert_works(llm, expected)


ENGINE_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt": ({"max_num_seq": 4}, "unknown engine argument `max_num_seq`.*max_num_seqs"),
    "of no effect here, with an effect": ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
    "no draft length": ({"speculative_model": "[ngram]"}, "`num_speculative_tokens` is missing"),
    "draft length alone": ({"num_speculative_tokens": 4}, "has no effect without a drafter"),
    "unknown dtype": ({"dtype": "int8"}, "`dtype='int8'`"),
    "swap": ({"preemption_mode": "swap"}, "`preemption_mode='swap'`.*recompute"),
    "length beyond the model": ({"max_model_len": 9999}, r"`max_model_len` \(9999\) is above"),
    "length beyond the pool": (
        {"max_model_len": 500, "num_gpu_blocks_override": 10},
        r"`max_model_len` \(500\) does not fit the KV pool.*raise `num_gpu_blocks_override` to 32",
    ),
    "no directory": ({"model": "/no/such/directory"}, "/no/such/directory"),
}


@pytest.mark.parametrize("name", ENGINE_ARGUMENTS)
def test_engine_arguments_that_are_refused(models: Models, name: str) -> None:
    values, message = ENGINE_ARGUMENTS[name]
    with pytest.raises((ConfigError, PacelineError), match=message):
        LLM(**{"model": str(models.tiny()), "dtype": "float32"} | values)


def test_model_must_be_a_name() -> None:
    with pytest.raises(ConfigError, match=r"`model` must be a .*string, got 3"):
        LLM(3)  # type: ignore[arg-type]


def test_directories_that_are_no_models(models: Models, tmp_path: Path) -> None:
    """Found before weights load: nothing there, a truncated file, an unknown architecture."""
    source = models.tiny()
    copies = {name: tmp_path / name for name in ("bare", "cut", "odd", "other")}
    for copy in copies.values():
        copy.mkdir()
        for file in source.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
    (copies["bare"] / "model.safetensors").unlink()
    cut = copies["cut"] / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    config = json.loads((source / "config.json").read_text())
    odd = json.dumps(config | {"architectures": ["MambaForCausalLM"]})
    (copies["odd"] / "config.json").write_text(odd)
    for name, message in (
        ("bare", "safetensors"),
        ("cut", "model.safetensors"),
        ("odd", "MambaForCausalLM"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_llm(copies[name])
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (copies["other"] / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="tokenizer"):
        open_llm(source, speculative_model=str(copies["other"]), num_speculative_tokens=2)


def test_refusals_are_quick(shared: LLM) -> None:
    """A wrong request is not queued behind anything, even while a stream holds the engine."""
    stream = shared.stream(PROMPT, GREEDY)
    next(stream)
    start = time.monotonic()
    for _ in range(200):
        with pytest.raises(RequestError):
            generate(shared, [[5] * MAX_LEN])
    assert time.monotonic() - start < 5
    stream.close()  # type: ignore[attr-defined]
    assert_idle(shared.engine)
