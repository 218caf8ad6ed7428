from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from wire_forms import chunks, context, cut, delta, position, tokenizer

from paceline.outputs import SpeculativeMetrics
from paceline.sampling_params import SamplingParams
from paceline.server.completion_responses import CompletionResponse, CompletionStream
from paceline.server.convert import EngineRequest, ServingContext
from paceline.server.message_parser import MessageForm
from paceline.server.messages import Delta, TokenLogprobs
from paceline.server.protocol import ChatCompletionRequest, CompletionRequest
from paceline.server.responses import ChatResponse, ChatStream

PLAIN = MessageForm()
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def chat_request(form: MessageForm = PLAIN, n: int = 1) -> EngineRequest:
    return EngineRequest([1, 2], SamplingParams(n=n), form=form)


def whole_chat(
    deltas: Sequence[Delta],
    form: MessageForm = PLAIN,
    n: int = 1,
    server: ServingContext | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """The body, checked against OpenAI's own types."""
    body = ChatCompletionRequest(messages=[{}], **fields)
    response = ChatResponse(body, chat_request(form, n), server or context())
    for one in deltas:
        response.add(one)
    result: dict[str, Any] = json.loads(response.encode())
    for choice in result["choices"]:
        assert choice["finish_reason"] is not None
    ChatCompletion.model_validate(result)
    return result


def streamed_chat(
    deltas: Sequence[Delta],
    form: MessageForm = PLAIN,
    n: int = 1,
    server: ServingContext | None = None,
    **fields: Any,
) -> list[dict[str, Any]]:
    """The chunks, checked against OpenAI's own types."""
    body = ChatCompletionRequest(messages=[{}], stream=True, **fields)
    stream = ChatStream(body, chat_request(form, n), server or context())
    result = chunks(b"".join([stream.event(one) for one in deltas]) + stream.tail())
    for chunk in result:
        ChatCompletionChunk.model_validate(chunk)
    return result


def joined(stream: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """What a client makes of a stream: one message, and how it ended."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    choices = [c for chunk in stream for c in chunk["choices"] if c["index"] == index]
    for choice in choices:
        part = choice["delta"]
        message["content"] += part.get("content") or ""
        message["reasoning_content"] += part.get("reasoning_content") or ""
        for call in part.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append(dict(call["function"]))
            else:
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    assert choices[0]["delta"]["role"] == "assistant"
    assert not any("role" in choice["delta"] for choice in choices[1:])
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    message["finish_reason"] = choices[-1]["finish_reason"]
    return message


def as_deltas(pieces: Sequence[str], reason: str = "stop") -> list[Delta]:
    return [*(delta(piece) for piece in pieces), delta("", tokens=0, finish_reason=reason)]


# ---- chat ----------------------------------------------------------------------------------------


def test_a_whole_chat() -> None:
    result = whole_chat([delta("Hel"), delta("lo", finish_reason="stop", stop_reason="x")])
    assert result["object"] == "chat.completion"
    assert result["id"].startswith("chatcmpl-")
    assert result["model"] == "tiny"
    (choice,) = result["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "x")
    assert result["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert "metrics" not in result


def test_a_streamed_chat() -> None:
    texts = ["Hé", "", 'l"o\n', " 🚲"]
    stream = streamed_chat([*map(delta, texts), delta("!", finish_reason="length")], model="tiny")
    assert [c["choices"][0]["delta"] for c in stream] == [
        {"role": "assistant", "content": "Hé"},
        {"content": 'l"o\n'},
        {"content": " 🚲"},
        {"content": "!"},
    ]
    assert joined(stream)["finish_reason"] == "length"
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in stream}) == 1
    assert not any("usage" in chunk for chunk in stream)


def test_usage_of_streams() -> None:
    deltas = [delta("a"), delta("b", tokens=3), delta("", tokens=1, finish_reason="stop")]
    *parts, last = streamed_chat(deltas, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in parts)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = streamed_chat(deltas, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in stream] == [1, 4, 5, 5]


def test_outputs_are_kept_apart() -> None:
    deltas = [
        delta("a", index=0),
        delta("x", index=1),
        delta("b", index=0, finish_reason="stop"),
        delta("y", index=1, finish_reason="length"),
    ]
    result = whole_chat(deltas, n=2)
    assert [c["message"]["content"] for c in result["choices"]] == ["ab", "xy"]
    assert result["usage"]["prompt_tokens"] == 7  # once, whatever n is
    stream = streamed_chat(deltas, n=2)
    assert [joined(stream, index)["content"] for index in (0, 1)] == ["ab", "xy"]


def test_tool_calls() -> None:
    form = MessageForm(tool_parser="hermes")
    result = whole_chat(as_deltas(["Sure.\n", CALL, CALL]), form)
    message = result["choices"][0]["message"]
    assert message["content"] == "Sure."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f", "arguments": '{"x": 1}'}
    ] * 2
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert result["choices"][0]["finish_reason"] == "tool_calls"
    alone = whole_chat(as_deltas([CALL]), form)["choices"][0]["message"]
    assert alone["content"] is None
    one = whole_chat(as_deltas([CALL, CALL]), MessageForm(tool_parser="hermes", one_call=True))
    assert len(one["choices"][0]["message"]["tool_calls"]) == 1
    cut_off = whole_chat(as_deltas([CALL[:40]], "length"), form)["choices"][0]
    assert cut_off["finish_reason"] == "length"


def test_forced_calls() -> None:
    named = whole_chat(as_deltas(['{"x"', ": 1}"]), MessageForm(called_function="f"))["choices"][0]
    assert named["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert named["finish_reason"] == "stop"
    text = '[{"name": "f", "parameters": {}}]'
    required = whole_chat(as_deltas(list(text)), MessageForm(calls_required=True))["choices"][0]
    assert required["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert required["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("text", "one_call", "reason"),
    [
        ('[{"name": "f", "parameters": {"x": "a', False, "stop"),
        ('[{"name": "f", "parameters": {"x": "a"}}', False, "tool_calls"),
        ('[{"name": "f", "parameters": {}}, {"name": "f", "parameters": {"x', False, "stop"),
        ('[{"name": "f", "parameters": {}}, {"name": "f", "parameters": {"x', True, "tool_calls"),
        ('[{"name": "f", "para', False, "stop"),
    ],
)
def test_a_call_that_a_stop_string_cut(text: str, one_call: bool, reason: str) -> None:
    form = MessageForm(calls_required=True, one_call=one_call)
    (choice,) = whole_chat(as_deltas(list(text)), form)["choices"]
    assert choice["finish_reason"] == reason
    assert not choice["message"]["content"]
    if reason == "tool_calls":
        for call in choice["message"]["tool_calls"]:
            json.loads(call["function"]["arguments"])


TEXTS = st.lists(
    st.sampled_from(["<think>", "</think>", CALL, CALL[:33], "<tool", "a", "é ", "\n"]), max_size=6
).map("".join)
FORMS = st.builds(
    MessageForm,
    reasoning=st.none() | st.booleans(),
    tool_parser=st.sampled_from([None, "hermes", "llama3_json"]),
    one_call=st.booleans(),
)


@given(pieces=cut(TEXTS), form=FORMS)
def test_streams_say_what_bodies_say(pieces: list[str], form: MessageForm) -> None:
    whole = whole_chat([delta("".join(pieces), finish_reason="stop")], form)["choices"][0]
    for deltas in (as_deltas(pieces), as_deltas(list("".join(pieces)))):
        got = joined(streamed_chat(deltas, form))
        message = whole["message"]
        assert got["content"] == (message["content"] or "")
        assert got["reasoning_content"] == (message.get("reasoning_content") or "")
        calls = [call["function"] for call in message.get("tool_calls", ())]
        assert got["tool_calls"] == calls
        assert got["finish_reason"] == whole["finish_reason"]


# ---- log-probabilities ---------------------------------------------------------------------------


def test_logprobs_of_a_chat() -> None:
    deltas = [
        delta("a", logprobs=[position("a", "b", "c")]),
        delta("", logprobs=[position("b", "b", "c")], finish_reason="stop"),
    ]
    logprobs = whole_chat(deltas, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]
    first, second = logprobs["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("a", -2.5, [97])
    assert [top["token"] for top in first["top_logprobs"]] == ["b", "c"]
    assert [top["token"] for top in second["top_logprobs"]] == ["b", "c"]
    none = whole_chat(deltas, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in none] == [[], []]
    assert whole_chat(deltas)["choices"][0]["logprobs"] is None
    stream = streamed_chat(deltas, logprobs=True, top_logprobs=2)
    tokens = [t for chunk in stream for t in chunk["choices"][0]["logprobs"]["content"]]
    assert tokens == [first, second]


def test_bytes_of_part_of_a_character() -> None:
    ids = tokenizer().encode("🚲")
    assert len(ids) > 1
    deltas = [delta(logprobs=[TokenLogprobs([i], [-1.0], [1], ["\ufffd"])]) for i in ids]
    deltas.append(delta("🚲", tokens=0, finish_reason="stop"))
    content = whole_chat(deltas, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "🚲"


def test_withheld_text_keeps_its_logprobs() -> None:
    form = MessageForm(tool_parser="hermes")
    deltas = [
        delta("<tool", logprobs=[position("a")]),
        delta("!", logprobs=[position("b")]),
        delta("", tokens=0, finish_reason="stop"),
    ]
    first, last = streamed_chat(deltas, form, logprobs=True)
    choice = first["choices"][0]
    assert choice["delta"]["content"] == "<tool!"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["a", "b"]
    assert last["choices"][0]["logprobs"]["content"] == []


def test_a_probability_of_zero_is_no_infinity() -> None:
    place = TokenLogprobs([5], [float("-inf")], [9], ["a"])
    result = whole_chat([delta("a", logprobs=[place], finish_reason="stop")], logprobs=True)
    assert result["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


# ---- text completions ----------------------------------------------------------------------------


def completion_parts(
    count: int, n: int, **fields: Any
) -> tuple[CompletionRequest, dict[str, EngineRequest]]:
    requests = {
        f"r{place}": EngineRequest([40 + place], SamplingParams(n=n), f"prompt {place}: ")
        for place in range(count)
    }
    return CompletionRequest(prompt="x", **fields), requests


def whole_completion(
    deltas: Sequence[Delta], count: int = 1, n: int = 1, **fields: Any
) -> dict[str, Any]:
    body, requests = completion_parts(count, n, **fields)
    response = CompletionResponse(body, requests, context())
    for one in deltas:
        response.add(one)
    result: dict[str, Any] = json.loads(response.encode())
    check_completion(result)
    return result


def streamed_completion(
    deltas: Sequence[Delta], count: int = 1, n: int = 1, **fields: Any
) -> list[dict[str, Any]]:
    body, requests = completion_parts(count, n, stream=True, **fields)
    stream = CompletionStream(body, requests, context())
    result = chunks(b"".join([stream.event(one) for one in deltas]) + stream.tail())
    for chunk in result:
        check_completion(chunk)
    return result


def check_completion(value: dict[str, Any]) -> None:
    """Against the SDK's type, which lacks two nulls that OpenAI's servers send: the reason of what
    has not finished, and the log-probability of a first token."""
    value = copy.deepcopy(value)
    for choice in value["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        logprobs = choice["logprobs"]
        if logprobs and logprobs["token_logprobs"][:1] == [None]:
            logprobs["token_logprobs"][0], logprobs["top_logprobs"][0] = 0.0, {}
    Completion.model_validate(value)


def several() -> list[Delta]:
    """Two prompts with two outputs each; what is streamed of them, mixed."""
    parts = [("r1", 0, "a"), ("r0", 1, "b"), ("r0", 0, "c"), ("r1", 1, "d"), ("r1", 0, "e")]
    deltas = [delta(text, name=name, index=index) for name, index, text in parts]
    ends = [("r0", 0), ("r0", 1), ("r1", 0), ("r1", 1)]
    return deltas + [delta("!", name=n, index=i, finish_reason="length") for n, i in ends]


@pytest.mark.parametrize("echo", [False, True])
def test_several_prompts_and_outputs(echo: bool) -> None:
    result = whole_completion(several(), 2, 2, echo=echo)
    texts = [choice["text"] for choice in result["choices"]]
    expected = ["c!", "b!", "ae!", "d!"]
    if echo:
        expected = [f"prompt {i // 2}: {text}" for i, text in enumerate(expected)]
    assert texts == expected
    assert [choice["index"] for choice in result["choices"]] == [0, 1, 2, 3]
    assert result["usage"]["prompt_tokens"] == 14
    assert result["usage"]["completion_tokens"] == 9
    stream = streamed_completion(several(), 2, 2, echo=echo)
    for index, text in enumerate(expected):
        choices = [c for chunk in stream for c in chunk["choices"] if c["index"] == index]
        assert "".join(choice["text"] for choice in choices) == text
        assert choices[-1]["finish_reason"] == "length"


def test_logprobs_of_a_completion() -> None:
    prompt = [None, position("b", "b", "c")]
    deltas = [
        delta("a", name="r0", logprobs=[position("a", "b", "c")], prompt_logprobs=prompt),
        delta("bc", name="r0", logprobs=[position("b"), position("c")], finish_reason="stop"),
    ]
    (choice,) = whole_completion(deltas, logprobs=2, echo=True, prompt_logprobs=1)["choices"]
    logprobs = choice["logprobs"]
    first = tokenizer().decode([40])
    assert logprobs["tokens"] == [first, "b", "a", "b", "c"]
    assert logprobs["token_logprobs"] == [None, -0.5, -2.5, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["top_logprobs"][:3] == [
        None,
        {"b": -0.5, "c": -1.5},
        {"a": -2.5, "b": -0.5, "c": -1.5},
    ]
    assert choice["prompt_logprobs"][0] is None
    assert [entry["decoded_token"] for entry in choice["prompt_logprobs"][1].values()] == ["b"]
    stream = streamed_completion(deltas, logprobs=2, echo=True)
    parts = [chunk["choices"][0]["logprobs"] for chunk in stream]
    assert {key: [v for part in parts for v in part[key]] for key in logprobs} == logprobs


def test_the_prompts_logprobs_reach_every_output() -> None:
    prompt = [None, position("b")]
    deltas = [
        delta("x", name="r0", index=1, logprobs=[position("a")]),
        delta("y", name="r0", index=0, logprobs=[position("a")], prompt_logprobs=prompt),
        delta("", name="r0", index=1, finish_reason="stop"),
        delta("", name="r0", index=0, finish_reason="stop"),
    ]
    stream = streamed_completion(deltas, n=2, logprobs=0, echo=True)
    for index in (0, 1):
        choices = [c for chunk in stream for c in chunk["choices"] if c["index"] == index]
        assert "".join(c["text"] for c in choices) == "prompt 0: " + "yx"[index]
        tokens = [token for c in choices for token in c["logprobs"]["tokens"]]
        assert tokens == [tokenizer().decode([40]), "b", "a"]


def test_echo_of_the_prompt_alone() -> None:
    prompt = [None, position("b")]
    deltas = [
        delta(
            "z",
            name="r0",
            logprobs=[position("z")],
            prompt_logprobs=prompt,
            finish_reason="stop",
        )
    ]
    fields: dict[str, Any] = {"echo": True, "max_tokens": 0, "logprobs": 1}
    result = whole_completion(deltas, **fields)
    (choice,) = result["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("prompt 0: ", "length")
    assert choice["logprobs"]["tokens"] == [tokenizer().decode([40]), "b"]
    assert result["usage"]["completion_tokens"] == 0
    (chunk,) = streamed_completion(deltas, **fields)
    assert chunk["choices"] == [choice]


# ---- drafts --------------------------------------------------------------------------------------


def test_metrics_of_speculation() -> None:
    server = context(spec_decode_metrics="summary", num_speculative_tokens=5)
    rounds = [(5, 2), (5, 4), (5, 0), (5, 0)]
    drafts = SpeculativeMetrics(4, 20, 6, rounds)
    deltas = [delta("a", finish_reason="stop", speculative=drafts)]
    report = {
        "mean_acceptance_length": 2.5,
        "draft_acceptance_rate": 0.3,
        "acceptance_histogram": [2, 0, 1, 0, 1, 0],
        "acceptance_histogram_by_draft_length": {"5": [2, 0, 1, 0, 1, 0]},
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 20,
        "num_spec_tokens": 5,
    }
    assert whole_chat(deltas, server=server)["metrics"] == {"speculative_decoding": report}
    *_, last = streamed_chat(deltas, server=server, stream_options={"include_usage": True})
    assert last["metrics"] == {"speculative_decoding": report}
    plain = whole_chat([delta("a", finish_reason="stop")], server=server)
    assert plain["metrics"] == {"speculative_decoding": None}
    both = [delta(index=i, finish_reason="stop", speculative=drafts) for i in (0, 1)]
    assert whole_chat(both, n=2, server=server)["metrics"] == {"speculative_decoding": None}
    idle = [delta("a", finish_reason="stop", speculative=SpeculativeMetrics())]
    got = whole_chat(idle, server=server)["metrics"]["speculative_decoding"]
    assert got["mean_acceptance_length"] is None
    assert got["acceptance_histogram"] == [0] * 6


def test_detailed_metrics_have_every_round_in_order() -> None:
    server = context(spec_decode_metrics="detailed", num_speculative_tokens=3)
    drafts = SpeculativeMetrics(3, 7, 3, [(3, 1), (1, 0), (3, 2)])
    deltas = [delta("a", finish_reason="stop", speculative=drafts)]
    got = whole_chat(deltas, server=server)["metrics"]["speculative_decoding"]
    assert got["per_step_drafted"] == [3, 1, 3]
    assert got["per_step_accepted"] == [1, 0, 2]
    assert got["acceptance_histogram"] == [1, 1, 1, 0]
    assert got["acceptance_histogram_by_draft_length"] == {"1": [1, 0], "3": [0, 1, 1, 0]}
