from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server import protocol
from paceline.server.errors import APIError
from paceline.server.protocol import (
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_body,
)

HELLO = {"messages": [{"role": "user", "content": "Hi"}]}


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse_body(ChatCompletionRequest, json.dumps({**HELLO, **fields}))


def test_what_clients_send() -> None:
    body = chat(
        model="tiny",
        stream=True,
        stream_options={"include_usage": True},
        temperature=1,
        stop=["a", "b"],
        logit_bias={"5": -100},
        tools=[{"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}],
        tool_choice={"type": "function", "function": {"name": "f"}},
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"a": 1}}},
        structured_outputs={"json": {"type": "object"}},
        chat_template_kwargs={"enable_thinking": False},
        top_k=5,
        seed=2**63,
    )
    assert body.include_usage
    assert not body.continuous_usage
    assert body.response_format is not None
    assert body.response_format.json_schema is not None
    assert body.response_format.json_schema.schema_ == {"a": 1}
    for prompt in ("a", ["a", "b"], [1, 2], [[1], [2]]):
        assert parse_body(CompletionRequest, json.dumps({"prompt": prompt})).prompt == prompt


def test_fields_without_effect_and_null() -> None:
    chat(user="u", store=True, metadata={"a": "b"}, service_tier="auto", safety_identifier="s")
    body = chat(temperature=None, stop=None, prediction=None, functions=None, frobnicate=None)
    assert body.temperature is None


NO_OPS: dict[str, Any] = {
    "bad_words": [],
    "cache_salt": None,
    "detokenize": True,
    "early_stopping": False,
    "echo": False,
    "include_reasoning": True,
    "length_penalty": 1.0,
    "modalities": ["text"],
    "priority": 0,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "spaces_between_special_tokens": True,
    "use_beam_search": False,
    "vllm_xargs": {},
}


@pytest.mark.parametrize("name", NO_OPS)
def test_values_that_ask_for_nothing_are_taken(name: str) -> None:
    assert chat(temperature=0.5, **{name: NO_OPS[name]}) == chat(temperature=0.5)


def test_all_of_them_at_once_and_as_null() -> None:
    assert chat(**NO_OPS) == chat()
    assert chat(length_penalty=1) == chat()
    assert chat(**dict.fromkeys(protocol._NO_EFFECT)) == chat()
    assert not set(protocol._NO_EFFECT) & set(ChatCompletionRequest.model_fields)
    with pytest.raises(APIError, match="`frobnicate`"):
        chat(**NO_OPS, frobnicate=1)


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words": ["x"]},
        {"priority": 1},
        {"priority": False},
        {"length_penalty": 0.5},
        {"detokenize": False},
        {"include_reasoning": False},
        {"vllm_xargs": {"a": 1}},
        {"modalities": ["text", "audio"]},
        {"cache_salt": "x"},
        {"use_beam_search": True},
        {"spaces_between_special_tokens": False},
    ],
    ids=str,
)
def test_their_other_values_are_refused_by_name(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(APIError, match=f"`{name}` is not supported: ") as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param, caught.value.code) == (
        400,
        name,
        "unsupported",
    )
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temprature": 1}, "temprature", "did you mean `temperature`?"),
        ({"frobnicate": 1}, "frobnicate", "unknown field `frobnicate`. hint: leave it out"),
        ({"prediction": {"type": "content"}}, "prediction", "not there yet"),
        ({"functions": []}, "functions", "use `tools`"),
        ({"modalities": ["audio"]}, "modalities", "text"),
        ({"chat_template": "{{ x }}"}, "chat_template", "`--chat-template`"),
        ({"temperature": "1"}, "temperature", 'must be a number, got the text "1"'),
        ({"n": True}, "n", "must be an integer, got true"),
        ({"n": 1.0}, "n", "must be an integer, got 1.0"),
        ({"stream": 1}, "stream", "must be true or false, got 1"),
        ({"stop": 3}, "stop", "must be a text or a list of texts, got 3"),
        ({"stop": ["a", 3]}, "stop", "must be a text or a list of texts, got a list"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5", "must be a number"),
        ({"messages": "Hi"}, "messages", 'must be a list, got the text "Hi"'),
        ({"messages": [1]}, "messages[0]", "must be an object, got 1"),
        ({"tool_choice": 3}, "tool_choice", '"auto", "none", "required"'),
        ({"tools": [{"function": {}}]}, "tools[0].function.name", "is missing"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json", "an object"),
        ({"structured_outputs": {"jsn": 3}}, "structured_outputs.jsn", "unknown field"),
        ({"guided_json": 3}, "guided_json", "a JSON schema"),
        ({"messages": None}, "messages", "must be a list, got null"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(APIError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        (ChatCompletionRequest, b"{}", "`messages` is missing"),
        (ChatCompletionRequest, b"[]", "the body must be a JSON object"),
        (ChatCompletionRequest, b"", "no JSON"),
        (ChatCompletionRequest, b'{"messages": [', "no JSON"),
        (ChatCompletionRequest, b'{"messages": [{"a": "\\ud800"}]}', "no JSON"),
        (ChatCompletionRequest, b"[" * 10_000, "no JSON"),
        (ChatCompletionRequest, b'{"messages": [], "temperature": NaN}', "finite"),
        (ChatCompletionRequest, b'{"messages": [], "temperature": 1e999}', "finite"),
        (ChatCompletionRequest, b'{"messages": [], "seed": ' + b"9" * 5000 + b"}", "no JSON"),
        (ChatCompletionRequest, b"\xff", "no JSON"),
        (CompletionRequest, b'{"prompt": ["a", 1]}', "a list of token ids"),
        (CompletionRequest, b'{"prompt": [true]}', "a list of token ids"),
        (CompletionRequest, b'{"prompt": "a", "suffix": "b"}', "fill-in-the-middle"),
        (TokenizeRequest, b'{"prompt": ["a"]}', "`prompt` must be a text, got a list"),
        (DetokenizeRequest, b'{"tokens": [1.5]}', "`tokens[0]` must be an integer, got 1.5"),
        (TokenizeRequest, b'{"promt": "a"}', "did you mean `prompt`?"),
    ],
)
def test_broken_bodies(kind: type[Body], data: bytes, message: str) -> None:
    with pytest.raises(APIError) as caught:
        parse_body(kind, data)
    assert caught.value.status == 400
    assert message in str(caught.value)


FIELDS = st.sampled_from([*ChatCompletionRequest.model_fields, "prediction", "x"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.dictionaries(FIELDS, VALUES, max_size=4))
def test_any_body_is_taken_or_refused(fields: dict[str, Any]) -> None:
    refused: APIError | None = None
    try:
        body = chat(**fields)
    except APIError as error:
        refused = error
    if refused is None:
        assert all(getattr(body, name) == value for name, value in fields.items() if value)
    else:
        assert refused.status == 400
        assert len(str(refused)) < 1000


def test_bodies_have_a_json_schema() -> None:
    for kind in (ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest):
        schema = kind.model_json_schema()
        assert schema["additionalProperties"] is False
    structured = CompletionRequest.model_json_schema()["$defs"]["StructuredOutputs"]
    assert "json" in structured["properties"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"prompt": [' + "true," * 200_000 + "1]}", "`prompt` must be a text"),
        ('{"prompt": [' + "1," * 200_000 + "true]}", "`prompt` must be a text"),
        ('{"prompt": "a", "stop": [' + "1," * 200_000 + "1]}", "`stop` must be a text or a list"),
        ('{"prompt": "a", "guided_choice": [' + "1," * 200_000 + "1]}", "must be a text, got 1"),
        (
            '{"prompt": "a"' + "".join(f', "u{i}": 1' for i in range(200_000)) + "}",
            "the body has 200000 values of a wrong type",
        ),
    ],
)
def test_a_body_of_many_faults_is_refused_without_listing_them(body: str, message: str) -> None:
    start = time.thread_time()
    with pytest.raises(APIError, match=message):
        parse_body(CompletionRequest, body)
    assert time.thread_time() - start < 1.5


@pytest.mark.parametrize(
    ("prompt", "count"), [("a", 1), ([], 1), ([1, 2], 1), (["a", "b"], 2), ([[1], [2], [3]], 3)]
)
def test_prompts_are_counted(prompt: object, count: int) -> None:
    assert CompletionRequest.model_validate({"prompt": prompt}).num_prompts == count
