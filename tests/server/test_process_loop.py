"""The loop of the engine process on a real engine, with messages scripted instead of sockets."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from e2e.engines import assert_idle
from paceline.engine.llm_engine import LLMEngine
from paceline.engine.structured import SequenceGrammar
from paceline.errors import EngineError, RequestError
from paceline.sampling_params import SamplingParams, StructuredOutputsParams
from paceline.server.engine_process import MAX_FAILED_STEPS, EngineLoop, _error_delta
from paceline.server.messages import (
    Abort,
    AddRequest,
    Delta,
    Deltas,
    FromEngine,
    Shutdown,
    Stats,
    ToEngine,
    decode_for_engine,
    decode_from_engine,
    encode,
)
from server.serving import engine_config

PROMPT = [10, 20, 30, 40]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class ScriptedChannel:
    """Delivers a batch of messages at each look; when there is no more, and nothing runs, the end.

    Everything passes through its bytes, as it does between processes.
    """

    def __init__(self, *batches: list[ToEngine]) -> None:
        self.batches = list(batches)
        self.sent: list[FromEngine] = []
        self.looks = 0

    def receive(self, timeout: float) -> list[ToEngine]:
        self.looks += 1
        batch = self.batches.pop(0) if self.batches else ([Shutdown()] if timeout else [])
        if not batch:  # an empty batch is a look in vain
            time.sleep(min(timeout, 0.01))
        return [decode_for_engine(encode(message)) for message in batch]

    def send(self, message: FromEngine) -> None:
        self.sent.append(decode_from_engine(encode(message)))

    @property
    def deltas(self) -> list[Delta]:
        return [d for message in self.sent if isinstance(message, Deltas) for d in message.deltas]

    def of(self, name: str, index: int = 0) -> list[Delta]:
        return [d for d in self.deltas if (d.request_id, d.index) == (name, index)]


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    engine = LLMEngine(engine_config(), log_stats=False)
    yield engine
    engine.close()


def serve(engine: LLMEngine, *batches: list[ToEngine]) -> ScriptedChannel:
    channel = ScriptedChannel(*batches)
    EngineLoop(engine, channel).run()
    assert_idle(engine)
    return channel


def offline(engine: LLMEngine, sampling: SamplingParams) -> Any:
    engine.add_request(engine.make_request("offline", PROMPT, sampling))
    outputs: list[Any] = []
    while not outputs:
        outputs = engine.step()
    return outputs[0]


@pytest.mark.parametrize("stream", [True, False])
def test_deltas_add_up_to_what_the_engine_gives_offline(engine: LLMEngine, stream: bool) -> None:
    sampling = SamplingParams(n=2, seed=5, max_tokens=12, logprobs=2, prompt_logprobs=1)
    expected = offline(engine, sampling)
    channel = serve(engine, [AddRequest("a", PROMPT, sampling, stream)])
    for output in expected.outputs:
        deltas = channel.of("a", output.index)
        assert "".join(d.text for d in deltas) == output.text
        assert [token for d in deltas for token in d.token_ids] == output.token_ids
        positions = [position for d in deltas for position in d.logprobs or ()]
        assert [p.ids for p in positions] == [list(entry) for entry in output.logprobs]
        assert [p.ids[0] for p in positions] == output.token_ids
        assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason == output.finish_reason
        assert deltas[-1].speculative is not None
        assert len(deltas) > 1 if stream else len(deltas) == 1
    with_prompt = [d for d in channel.deltas if d.prompt_logprobs is not None]
    assert [d.index for d in with_prompt] == [0]
    prompt = with_prompt[0].prompt_logprobs or []
    assert prompt[0] is None
    assert [p.ids[0] for p in prompt if p is not None] == PROMPT[1:]
    assert {d.num_prompt_tokens for d in channel.deltas} == {len(PROMPT)}


def test_stop_strings_never_leak_into_deltas(engine: LLMEngine) -> None:
    text = offline(engine, GREEDY).outputs[0].text
    stop = text[4:7]
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=[stop])
    deltas = serve(engine, [AddRequest("a", PROMPT, sampling)]).of("a")
    assert "".join(d.text for d in deltas) == text[: text.index(stop)]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)


def test_what_one_step_adds_comes_in_one_message(engine: LLMEngine) -> None:
    channel = serve(engine, [AddRequest(name, PROMPT, GREEDY) for name in "abc"])
    sizes = [len(message.deltas) for message in channel.sent if isinstance(message, Deltas)]
    assert max(sizes) == 3
    assert len(sizes) <= 13


def test_an_aborted_request_is_gone_at_once(engine: LLMEngine) -> None:
    endless = SamplingParams(max_tokens=400, ignore_eos=True, seed=1)
    many = SamplingParams(n=2, max_tokens=400, ignore_eos=True, seed=1)
    channel = serve(
        engine,
        [AddRequest("a", PROMPT, endless), AddRequest("b", PROMPT, many)],
        [],
        [],
        [Abort(["a", "b", "unknown"]), AddRequest("c", PROMPT, GREEDY)],
    )
    assert channel.of("a")
    assert all(d.finish_reason is None for d in [*channel.of("a"), *channel.of("b")])
    assert channel.of("c")[-1].finish_reason == "length"
    assert channel.looks < 30  # 400 tokens take more steps


def test_one_output_that_ended_before_the_abort(engine: LLMEngine) -> None:
    """Outputs of a request end at different steps; the abort comes between."""
    seeds = range(40)
    stops = [SamplingParams(n=3, max_tokens=300, seed=seed, stop=["\n"]) for seed in seeds]
    for sampling in stops:
        channel = serve(engine, [AddRequest("a", PROMPT, sampling)], *[[]] * 6, [Abort(["a"])])
        ended = [d for d in channel.deltas if d.finish_reason]
        if 0 < len(ended) < 3:
            return
    raise AssertionError("no seed ended one output before the others")


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([5, 99999], GREEDY, "prompt token 1 is 99999"),
        ([], GREEDY, "no tokens"),
        ([5] * 600, GREEDY, "max_model_len is 512"),
        ([5], SamplingParams(logprobs=50), "above max_logprobs"),
        ([5], SamplingParams(logit_bias={99999: 1.0}), "logit_bias has the id 99999"),
        (
            [5],
            SamplingParams(structured_outputs=StructuredOutputsParams(json='{"type": "\\ud800"}')),
            r"it has \ud800, half of a character",
        ),
    ],
)
def test_a_wrong_request_is_told_so_and_harms_nobody(
    engine: LLMEngine, prompt: list[int], sampling: SamplingParams, message: str
) -> None:
    expected = offline(engine, GREEDY).outputs[0].text
    channel = serve(
        engine,
        [AddRequest("good", PROMPT, GREEDY)],
        [AddRequest("bad", prompt, sampling)],
    )
    (refused,) = channel.of("bad")
    assert (refused.finish_reason, refused.error_status) == ("error", 400)
    assert message in (refused.error or "")
    assert "".join(d.text for d in channel.of("good")) == expected


def test_an_id_in_use_is_refused(engine: LLMEngine) -> None:
    channel = serve(engine, [AddRequest("a", PROMPT, GREEDY), AddRequest("a", PROMPT, GREEDY)])
    assert [d.error_status for d in channel.deltas if d.error] == [400]


class Failing:
    """Fails launches of a runner, by number."""

    def __init__(self, launch: Callable[..., Any], numbers: range) -> None:
        self.launch, self.numbers, self.calls = launch, numbers, 0

    def __call__(self, out: Any) -> Any:
        self.calls += 1
        if self.calls in self.numbers:
            raise ValueError("the device is on fire")
        return self.launch(out)


def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = offline(engine, GREEDY).outputs[0].text
    before = engine.stats.num_request_prompt_tokens
    runner = engine.core.runner
    monkeypatch.setattr(runner, "launch", Failing(runner.launch, range(3, 4)))
    channel = serve(
        engine,
        [AddRequest("a", PROMPT, GREEDY), AddRequest("b", PROMPT, GREEDY)],
        [],
        [],
        [],
        [AddRequest("c", PROMPT, GREEDY)],
    )
    for name in "ab":
        last = channel.of(name)[-1]
        assert (last.finish_reason, last.error_status) == ("error", 500)
        assert "the device is on fire" in (last.error or "")
    assert "".join(d.text for d in channel.of("c")) == expected
    stats = [message for message in channel.sent if isinstance(message, Stats)]
    assert all(a.num_steps <= b.num_steps for a, b in itertools.pairwise(stats))
    assert stats[-1].num_request_prompt_tokens - before >= 2 * len(PROMPT)


def test_steps_that_fail_in_a_row_end_the_engine(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = engine.core.runner
    monkeypatch.setattr(runner, "launch", Failing(runner.launch, range(1, 100)))
    names = [f"r{i}" for i in range(MAX_FAILED_STEPS)]
    channel = ScriptedChannel(*[[AddRequest(name, PROMPT, GREEDY)] for name in names])
    with pytest.raises(EngineError, match="steps failed in a row"):
        EngineLoop(engine, channel).run()
    assert [channel.of(name)[-1].error_status for name in names] == [500] * MAX_FAILED_STEPS
    assert_idle(engine)


class SlowCompiler:
    """Stands before ``LLMEngine.prepare``: a grammar is ready once the test says so."""

    def __init__(self, engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: Future[Any] = Future()
        self.prepare_now = engine.prepare
        monkeypatch.setattr(engine, "prepare", self)

    def __call__(self, sampling: SamplingParams) -> Future[Any] | None:
        return None if sampling.structured_outputs is None else self.done


def test_others_run_while_a_grammar_is_compiled(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = SlowCompiler(engine, monkeypatch)
    shaped = SamplingParams(max_tokens=40, structured_outputs={"choice": ["yes", "no"]})
    channel = ScriptedChannel(
        [AddRequest("shaped", PROMPT, shaped), AddRequest("left", PROMPT, shaped)],
        [AddRequest("free", PROMPT, GREEDY), Abort(["left"])],
    )
    receive = channel.receive

    def until_free_has_ended(timeout: float) -> list[ToEngine]:
        if not compiler.done.done():
            assert not channel.of("shaped")
            if any(d.finish_reason for d in channel.of("free")):
                compiled = compiler.prepare_now(shaped)
                assert compiled is not None
                compiler.done.set_result(compiled.result(30))
                # The cache may let go of it: nothing is compiled in the engine's thread.
                monkeypatch.setattr(engine._admission.structured, "prepare", pytest.fail)
            return [] if not channel.batches else receive(timeout)
        return receive(0.0) if not channel.of("shaped") else receive(timeout)

    monkeypatch.setattr(channel, "receive", until_free_has_ended)
    EngineLoop(engine, channel).run()
    assert_idle(engine)
    assert "".join(d.text for d in channel.of("shaped")) in ("yes", "no")
    assert not channel.of("left")


def test_a_grammar_that_cannot_be_compiled_is_a_wrong_request(engine: LLMEngine) -> None:
    shaped = SamplingParams(structured_outputs={"regex": "(("})
    compiled = engine.prepare(shaped)
    assert compiled is not None
    assert isinstance(compiled.exception(30), RequestError)
    channel = serve(engine, [AddRequest("bad", PROMPT, shaped)], *[[]] * 500)
    assert channel.of("bad")[0].error_status == 400


def test_an_output_that_fails_ends_the_others_of_its_request(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = SequenceGrammar.fill
    broken: list[SequenceGrammar] = []

    def fail_once(self: SequenceGrammar, *args: Any) -> int:
        if self.num_tokens >= 3 and not broken:
            broken.append(self)
            self.fault = "the structure was too slow"
        return fill(self, *args)

    shaped = SamplingParams(n=3, max_tokens=500, structured_outputs={"regex": "[a-z]{900}"})
    compiled = engine.prepare(shaped)
    assert compiled is not None
    compiled.result(30)
    monkeypatch.setattr(SequenceGrammar, "fill", fail_once)
    channel = serve(engine, [AddRequest("a", PROMPT, shaped)])
    assert len(broken) == 1
    (failed,) = [d for d in channel.deltas if d.finish_reason is not None]
    assert (failed.finish_reason, failed.error_status) == ("error", 400)
    assert failed.error == "the structure was too slow"
    assert sum(len(d.token_ids) for d in channel.deltas) < 3 * 10


@pytest.mark.parametrize("keep", [True, False])
def test_the_last_delta_has_times_and_rounds(engine: LLMEngine, keep: bool) -> None:
    began = time.monotonic()
    channel = serve(engine, [AddRequest("a", PROMPT, GREEDY, keep_rounds=keep)])
    *others, last = channel.of("a")
    assert all(d.times is None and d.speculative is None for d in others)
    assert last.times is not None
    assert last.speculative is not None
    moments = (last.times.scheduled or 0, last.times.first_token or 0, last.times.ended)
    assert began <= moments[0] < moments[1] < moments[2] <= time.monotonic()
    assert len(last.speculative.rounds) == (last.speculative.num_drafts if keep else 0)


def test_the_last_sign_of_life_says_that_nothing_is_held(engine: LLMEngine) -> None:
    channel = serve(engine, [AddRequest("a", PROMPT, GREEDY)])
    stats = [message for message in channel.sent if isinstance(message, Stats)]
    assert (stats[-1].num_running, stats[-1].num_waiting) == (0, 0)
    assert stats[-1].num_free_blocks == stats[-1].num_blocks
    assert stats[-1].num_generation_tokens >= 12


def test_an_error_that_quotes_half_a_character_can_be_sent() -> None:
    sent = decode_from_engine(encode(Deltas([_error_delta("a", "not \ud800", 400)])))
    assert isinstance(sent, Deltas)
    assert sent.deltas[0].error == "not \\ud800"
