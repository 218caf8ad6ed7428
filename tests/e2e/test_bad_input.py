"""What is wrong with a request is said at once and clearly, and hurts nobody else.

Every test ends with the engine doing its work as if nothing had happened.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from e2e.engines import VOCAB, Models, assert_idle, make_engine, random_prompt, run, token_ids
from safetensors.torch import load_file, save_file

from paceline import LLM
from paceline.core.step import ModelRunnerOutput, SchedulerOutput
from paceline.errors import ConfigError, EngineError, PacelineError, RequestError
from paceline.outputs import RequestOutput
from paceline.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
PROMPT = random_prompt(40)  # two full blocks and a partial one
MAX_LEN = 200


@pytest.fixture(scope="module")
def expected(models: Models) -> list[int]:
    """What PROMPT gives when nothing goes wrong."""
    return token_ids(run(make_engine(models.tiny()), [PROMPT], GREEDY))[0]


def open_llm(path: Path, **args: Any) -> LLM:
    settings = {"dtype": "float32", "max_num_seqs": 8, "max_model_len": MAX_LEN, **args}
    return LLM(str(path), **settings)


@pytest.fixture
def llm(models: Models) -> Iterator[LLM]:
    with open_llm(
        models.tiny(), speculative_model=str(models.tiny()), num_speculative_tokens=3
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def shared(models: Models) -> Iterator[LLM]:
    """For requests that are refused; none of them may leave a trace."""
    with open_llm(models.tiny()) as llm:
        yield llm


@pytest.fixture(scope="module")
def wordless(models: Models) -> Iterator[LLM]:
    with open_llm(models.tiny(), skip_tokenizer_init=True) as llm:
        yield llm


def generate(llm: LLM, prompts: Any = PROMPT, sampling: Any = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, sampling, use_tqdm=False)


def assert_works(llm: LLM, expected: list[int]) -> None:
    assert token_ids(generate(llm)) == [expected]
    assert_idle(llm.engine)


TOP = VOCAB + 8 - 1  # the embedding has 8 rows more than the tokenizer has ids
# prompts -> what the message must say
PROMPTS: dict[str, tuple[Any, str]] = {
    "no prompts": ([], "no prompts given"),
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
    "bytes": ([b"abc"], "cannot be of type bytes"),
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
    "a dictionary": ({"temperature": 0}, "1 prompts but dict|must be a SamplingParams, got dict"),
    "two for one": ([GREEDY, GREEDY], "1 prompts but 2 sampling parameters"),
    "none for one": ([], "1 prompts but 0 sampling parameters"),
    "a list of something else": ([3], "must be a SamplingParams, got int"),
}


@pytest.mark.parametrize("name", ADMISSIONS)
def test_parameters_that_do_not_fit_the_engine(
    shared: LLM, expected: list[int], name: str
) -> None:
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


@pytest.mark.parametrize("messages", [[], "hi", None, [{"content": "no role"}], [[]], [3]])
def test_messages_that_are_refused(shared: LLM, expected: list[int], messages: Any) -> None:
    with pytest.raises(RequestError):
        shared.chat(messages, GREEDY, use_tqdm=False)
    assert_works(shared, expected)


def test_prompt_larger_than_the_pool_blocks_nobody(models: Models, expected: list[int]) -> None:
    """The length is lowered to the pool, so that the refusal names one limit and the numbers."""
    with open_llm(models.tiny(), max_model_len=None, num_gpu_blocks_override=4) as llm:
        stream = llm.stream(PROMPT, GREEDY)
        next(stream)
        with pytest.raises(RequestError, match="prompt has 65 tokens, but"):
            generate(llm, [[5] * 65])
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
    with pytest.raises(ConfigError, match="`model` must be a .*string, got 3"):
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


# ---- while others run ------------------------------------------------------------------------------


def test_bad_requests_do_not_disturb_a_stream(llm: LLM, expected: list[int]) -> None:
    wrong: list[Callable[[], Any]] = [
        lambda: generate(llm, [[]]),
        lambda: generate(llm, [[-1]]),
        lambda: generate(llm, [[5] * MAX_LEN]),
        lambda: generate(llm, [PROMPT], SamplingParams(logprobs=99)),
        lambda: generate(llm, [PROMPT], SamplingParams(logit_bias={TOP + 1: 1.0})),
        lambda: next(llm.stream([1.5], GREEDY)),  # type: ignore[list-item]
        lambda: llm.chat([]),
    ]
    seen = []
    for output in llm.stream(PROMPT, GREEDY):
        seen.append(output.outputs[0].token_ids)
        if wrong:
            with pytest.raises(RequestError):
                wrong.pop()()
    assert not wrong
    assert seen[-1] == expected
    assert all(ids == expected[: len(ids)] for ids in seen)
    assert_works(llm, expected)


def test_other_requests_are_served_while_a_stream_is_read(llm: LLM, expected: list[int]) -> None:
    stream = llm.stream(PROMPT, GREEDY)
    first = next(stream)
    assert 0 < len(first.outputs[0].token_ids) < 30
    assert token_ids(generate(llm, [PROMPT, random_prompt(40)]))[0] == expected
    *_, last = stream
    assert last.outputs[0].token_ids == expected
    assert last.finished
    assert_works(llm, expected)


class Breakdown:
    """Fails one launch of a runner, in place of its work or behind it."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
        self.calls = 0
        self.fail_at = 0
        self._error = error
        self._launch = llm.engine.core.runner.launch
        monkeypatch.setattr(llm.engine.core.runner, "launch", self)

    def __call__(self, out: SchedulerOutput) -> ModelRunnerOutput:
        self.calls += 1
        if self.calls == self.fail_at:
            if self.calls % 2:
                self._launch(out)
            raise self._error
        result: ModelRunnerOutput = self._launch(out)
        return result


@pytest.mark.parametrize("fail_at", [1, 2, 3, 6])
def test_step_that_raises(
    llm: LLM, expected: list[int], monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    """All unfinished requests are lost and told so; the engine goes on with new ones."""
    breakdown = Breakdown(llm, monkeypatch, ValueError("the device is on fire"))
    breakdown.fail_at = fail_at
    prompts = [PROMPT, random_prompt(50), random_prompt(3)]
    with pytest.raises(
        EngineError, match=r"ValueError: the device is on fire\); 3 unfinished requests were dropped"
    ) as caught:
        generate(llm, prompts)
    assert isinstance(caught.value.__cause__, ValueError)
    assert breakdown.calls == fail_at
    assert_works(llm, expected)
    assert token_ids(generate(llm, prompts))[0] == expected


def test_step_that_raises_ends_streams_with_an_error(
    llm: LLM, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [llm.stream(PROMPT, GREEDY) for _ in range(2)]
    for stream in streams:
        next(stream)
    breakdown = Breakdown(llm, monkeypatch, RuntimeError("gone"))
    breakdown.fail_at = 1
    with pytest.raises(EngineError, match="RuntimeError: gone"):
        list(streams[0])
    with pytest.raises(EngineError, match="dropped"):
        list(streams[1])
    assert_works(llm, expected)


def test_keyboard_interrupt_leaves_a_usable_engine(
    llm: LLM, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    breakdown = Breakdown(llm, monkeypatch, KeyboardInterrupt())
    for fail_at in (2, 3):
        breakdown.calls, breakdown.fail_at = 0, fail_at
        with pytest.raises(KeyboardInterrupt):
            generate(llm, [PROMPT, random_prompt(30)])
        assert_works(llm, expected)


def test_interrupt_between_steps_drops_only_the_callers_requests(
    llm: LLM, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between steps the engine is whole: a stream that others read survives."""
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("paceline.llm._Progress.show", interrupt)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, [random_prompt(30)] * 3)
    *_, last = stream
    assert last.outputs[0].token_ids == expected
    assert_works(llm, expected)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no memory for text")])
def test_failure_behind_a_step_leaves_a_usable_engine(
    llm: LLM, expected: list[int], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """While outputs are made of a step's results, some requests have ended and others have not."""

    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("paceline.engine.output_processor.OutputProcessor.output", fail)
        with pytest.raises((KeyboardInterrupt, EngineError)):
            generate(llm, [PROMPT, random_prompt(30)], [GREEDY, SamplingParams(max_tokens=2)])
    assert_works(llm, expected)
    assert not llm.engine.has_unfinished_requests


# ---- numbers that are none -------------------------------------------------------------------------


@pytest.fixture
def poisoned(models: Models, tmp_path: Path) -> Callable[[str, int], Path]:
    """A copy of the model with NaN in a row of one weight."""

    def poison(name: str, row: int) -> Path:
        path = tmp_path / f"nan-{name}-{row}"
        path.mkdir()
        for file in models.tiny().iterdir():
            (path / file.name).write_bytes(file.read_bytes())
        weights = load_file(path / "model.safetensors")
        weights[name][row] = torch.nan
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return poison


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=1, n=2, top_p=0.9, logprobs=1)])
@pytest.mark.parametrize("k", [0, 3])
def test_model_of_nan_ends_with_an_error(
    poisoned: Callable[[str, int], Path], sampling: SamplingParams, k: int
) -> None:
    path = poisoned("model.norm.weight", 3)
    drafting = {"speculative_model": str(path), "num_speculative_tokens": k} if k else {}
    with open_llm(path, **drafting) as llm:
        for output in generate(llm, [PROMPT, [4]], sampling):
            assert output.finished
            assert output.error is not None
            assert "not finite" in output.error
            assert "hint:" in output.error
            for done in output.outputs:
                assert done.finish_reason == "error"
                assert done.token_ids == []
        assert_idle(llm.engine)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("k", [0, 3])
def test_sequence_that_meets_nan_spoils_nobody(
    models: Models, expected: list[int], poisoned: Callable[[str, int], Path], k: int, delay: int
) -> None:
    """One token's embedding is NaN: who has it in the prompt or comes to it fails, others do not."""
    prompts = [PROMPT, random_prompt(30), random_prompt(41)]
    healthy = token_ids(run(make_engine(models.tiny()), prompts, GREEDY))
    used = {*PROMPT, *prompts[1], *expected, *healthy[1], *prompts[2]}
    count, bad = next((i + 1, t) for i, t in enumerate(healthy[2]) if i > 4 and t not in used)
    path = poisoned("model.embed_tokens.weight", bad)
    drafting = {"speculative_model": str(path), "num_speculative_tokens": k} if k else {}
    engine = make_engine(path, delay=delay, **drafting)
    outputs = run(
        engine,
        [*prompts, [*PROMPT, bad]],
        [GREEDY, GREEDY, SamplingParams(temperature=0, max_tokens=30, logprobs=1), GREEDY],
    )
    assert token_ids(outputs[:2]) == [expected, healthy[1]]
    for output in outputs[2:]:
        assert output.outputs[0].finish_reason == "error"
        assert output.error is not None
        assert "not finite" in output.error
    late = outputs[2].outputs[0]
    # All tokens up to the one behind which the model broke, however many a step brought.
    assert late.token_ids == healthy[2][:count]
    assert late.token_ids[-1] == bad
    assert late.logprobs is not None
    assert len(late.logprobs) == count
    assert outputs[3].outputs[0].token_ids == []
    # Blocks that held NaN were handed out again without harm.
    assert token_ids(run(engine, [PROMPT] * 6, GREEDY)) == [expected] * 6


@pytest.mark.parametrize("delay", [0, 1])
def test_rejected_draft_that_leads_to_nan_does_no_harm(
    models: Models,
    expected: list[int],
    poisoned: Callable[[str, int], Path],
    tmp_path: Path,
    delay: int,
) -> None:
    """A drafter that always proposes the token on which the target breaks."""
    bad = next(token for token in range(VOCAB) if token not in {*PROMPT, *expected})
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    for file in models.tiny().iterdir():
        (drafter / file.name).write_bytes(file.read_bytes())
    weights = load_file(drafter / "model.safetensors")
    weights["lm_head.weight"][:] = 0.0
    weights["model.norm.weight"][:] = 0.0
    save_file(weights, drafter / "model.safetensors", metadata={"format": "pt"})
    # All logits are 0, so that the bias of the request decides what is drafted.
    sampling = SamplingParams(
        temperature=0, max_tokens=30, ignore_eos=True, logit_bias={bad: 1e-6}
    )
    engine = make_engine(
        poisoned("model.embed_tokens.weight", bad),
        delay=delay,
        speculative_model=str(drafter),
        num_speculative_tokens=3,
    )
    output = run(engine, [PROMPT], sampling)[0]
    assert output.error is None
    assert output.outputs[0].token_ids == expected
    assert engine.stats.num_draft_tokens > 0
    assert engine.stats.num_accepted_tokens == 0


def test_drafter_of_nan_costs_drafts_only(
    models: Models, expected: list[int], poisoned: Callable[[str, int], Path]
) -> None:
    drafter = poisoned("model.norm.weight", 0)
    engine = make_engine(models.tiny(), speculative_model=str(drafter), num_speculative_tokens=4)
    outputs = run(engine, [PROMPT, random_prompt(40)], GREEDY)
    assert outputs[0].outputs[0].token_ids == expected
    assert engine.stats.num_draft_tokens > 0


# ---- coming and going ------------------------------------------------------------------------------


def test_close_twice_and_use_after(models: Models) -> None:
    llm = open_llm(models.tiny())
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    llm.close()
    llm.close()
    for use in (
        lambda: generate(llm),
        lambda: next(llm.stream(PROMPT, GREEDY)),
        lambda: llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False),
        lambda: list(stream),
    ):
        with pytest.raises(EngineError, match="closed"):
            use()
    with pytest.raises(EngineError, match="closed"), llm:
        generate(llm)


@pytest.mark.parametrize("after", [1, 3])
def test_leaving_a_stream_frees_its_blocks(llm: LLM, expected: list[int], after: int) -> None:
    for number, output in enumerate(llm.stream(random_prompt(60), GREEDY), 1):
        assert not output.finished
        if number == after:
            break
    # The generator is gone as soon as nothing refers to it.
    assert_idle(llm.engine)
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert_idle(llm.engine)
    assert_works(llm, expected)


def test_two_engines_in_one_process(models: Models, expected: list[int]) -> None:
    other_expected = models.greedy("llama", PROMPT, 20)
    with open_llm(models.tiny()) as one, open_llm(models.family("llama")) as other:
        streams = [one.stream(PROMPT, GREEDY), other.stream(PROMPT, GREEDY)]
        last: list[Any] = [None, None]
        alive = [0, 1]
        while alive:
            for i in list(alive):
                try:
                    last[i] = next(streams[i]).outputs[0].token_ids
                except StopIteration:
                    alive.remove(i)
        assert last[0] == expected
        assert last[1][:20] == other_expected
    with pytest.raises(EngineError, match="closed"):
        generate(one)


def test_generate_from_several_threads(llm: LLM, expected: list[int]) -> None:
    """One batch for all; everyone gets the own outputs, and an error stays with its caller."""
    barrier = threading.Barrier(4)
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        torch.set_num_threads(1)  # the setting is a thread's own
        barrier.wait()
        try:
            if number == 3:
                found[number] = generate(llm, [[-1]])
            elif number == 2:
                found[number] = [list(llm.stream(PROMPT, GREEDY))[-1]]
            else:
                prompts = [random_prompt(5 + number), PROMPT] * 3
                found[number] = generate(llm, prompts)
        except PacelineError as error:
            found[number] = error

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert isinstance(found[3], RequestError)
    assert token_ids(found[2]) == [expected]
    for number in (0, 1):
        ids = token_ids(found[number])
        assert ids[1] == ids[3] == ids[5] == expected
        assert ids[0] == ids[2] == ids[4] != expected
        assert [len(o.prompt_token_ids) for o in found[number]] == [5 + number, 40] * 3
    assert_works(llm, expected)


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
