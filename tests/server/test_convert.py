from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tiny_model import build_tokenizer
from wire_forms import context, tokenizer

from paceline.engine.tokenizer import Tokenizer
from paceline.sampling_params import SamplingParams
from paceline.server.convert import (
    EngineRequest,
    chat_to_engine,
    completion_to_engine,
    detokenize,
    tokenize,
)
from paceline.server.errors import APIError
from paceline.server.message_parser import MessageForm
from paceline.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_body,
)
from paceline.server.tool_parsers import detect_tool_parser

HELLO = [{"role": "user", "content": "Hi"}]
HELLO_PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def function(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def chat(fields: dict[str, Any], **server: Any) -> EngineRequest:
    body = parse_body(ChatCompletionRequest, json.dumps({"messages": HELLO, **fields}))
    return chat_to_engine(body, context(**server))


def complete(fields: dict[str, Any], **server: Any) -> list[EngineRequest]:
    body = parse_body(CompletionRequest, json.dumps({"prompt": "Hello", **fields}))
    return completion_to_engine(body, context(**server))


def prompt_of(request: EngineRequest) -> str:
    return tokenizer().decode(request.prompt_token_ids, skip_special_tokens=False)


# ---- prompts -------------------------------------------------------------------------------------


def test_a_chat_becomes_the_models_prompt() -> None:
    request = chat({})
    assert prompt_of(request) == HELLO_PROMPT
    assert request.prompt_token_ids[0] == tokenizer().token_id("<|im_start|>")
    assert request.form == MessageForm()


def test_template_options() -> None:
    assert prompt_of(chat({"add_generation_prompt": False})).endswith("<|im_end|>\n")
    options = {"thinks": True}
    assert prompt_of(chat({"chat_template_kwargs": options})).endswith("<think>\n")
    assert prompt_of(chat({"reasoning_effort": "low"})).endswith("effort: low")
    going_on = [*HELLO, {"role": "assistant", "content": "Well, "}]
    fields = {"messages": going_on, "continue_final_message": True}
    assert prompt_of(chat(fields)).endswith("assistant\nWell, ")
    own = "{{ messages[0].content }}!"
    assert prompt_of(chat({}, chat_template=own)) == "Hi!"


def test_a_model_without_a_template() -> None:
    base = Tokenizer(build_tokenizer(), {}, Path("nowhere"))
    with pytest.raises(APIError, match=r"no chat template .*hint: send the prompt to `/v1/compl"):
        chat({}, tokenizer=base)
    own = "{{ messages[0].content }}!"
    assert base.decode(chat({}, tokenizer=base, chat_template=own).prompt_token_ids) == "Hi!"


def test_developer_is_the_system_role() -> None:
    fields = {"messages": [{"role": "developer", "content": "Be brief."}, *HELLO]}
    assert prompt_of(chat(fields)).startswith("<|im_start|>system\nBe brief.")
    knows = "{% if messages[0].role == 'developer' %}yes{% endif %}"
    assert prompt_of(chat(fields, chat_template=knows)) == "yes"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("Hello", ["Hello"]),
        (["Hello", "you"], ["Hello", "you"]),
        ([72, 73], None),
        ([[72], [73, 74]], None),
    ],
)
def test_prompts(prompt: Any, texts: list[str] | None) -> None:
    requests = complete({"prompt": prompt, "echo": True})
    if texts is None:
        ids = prompt if isinstance(prompt[0], list) else [prompt]
        assert [request.prompt_token_ids for request in requests] == ids
        assert [r.prompt_text for r in requests] == [tokenizer().decode(one) for one in ids]
    else:
        assert [request.prompt_text for request in requests] == texts
        assert [prompt_of(request) for request in requests] == texts


# ---- sampling ------------------------------------------------------------------------------------


def test_defaults_are_the_models_then_the_engines() -> None:
    defaults = {"temperature": 0.7, "top_k": 20}
    request = chat(
        {"temperature": 0, "stop": "x", "logit_bias": {"5": 1}}, default_sampling=defaults
    )
    assert request.sampling == SamplingParams(
        temperature=0, top_k=20, stop="x", logit_bias={5: 1.0}, max_tokens=None
    )


def test_length_limits() -> None:
    assert chat({}).sampling.max_tokens is None
    assert chat({}, default_sampling={"max_tokens": 9}).sampling.max_tokens == 9
    assert chat({"max_tokens": 5}).sampling.max_tokens == 5
    assert chat({"max_completion_tokens": 5, "max_tokens": 5}).sampling.max_tokens == 5
    assert complete({})[0].sampling.max_tokens == 16
    # What nobody asked for may be cut by the end of the context.
    assert complete({"prompt": [1] * 508})[0].sampling.max_tokens == 16


def test_logprobs() -> None:
    assert chat({}).sampling.logprobs is None
    assert chat({"logprobs": True}).sampling.logprobs == 0
    assert chat({"logprobs": True, "top_logprobs": 3}).sampling.logprobs == 3
    request = complete({"logprobs": 2, "echo": True})[0]
    assert (request.sampling.logprobs, request.sampling.prompt_logprobs) == (2, 2)
    assert complete({"logprobs": 2})[0].sampling.prompt_logprobs is None


def test_echo_of_the_prompt_alone() -> None:
    assert complete({"echo": True, "max_tokens": 0})[0].sampling.max_tokens == 1


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"stop": ""}, "stop", "empty string"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "integer"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "-100"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "give one"),
        ({"max_tokens": 512}, "max_tokens", "ask for at most"),
        (
            {"messages": [{"role": "user", "content": "a" * 2000}]},
            "messages",
            "context length is 512",
        ),
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"role": "user"}]}, "messages", "template"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
            "text only",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "`logprobs` is not true"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "`stream`"),
        ({"stream_options": {}}, "stream_options", "`stream` is not true"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "may not set"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "exclude each other",
        ),
        ({"n": 2, "temperature": 0}, "n", "greedy"),
    ],
)
def test_wrong_values_in_a_chat(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(APIError) as caught:
        chat(fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert message in str(caught.value)


def test_as_many_are_made_as_are_returned() -> None:
    assert complete({"best_of": 1})[0].sampling.n == 1
    assert complete({"best_of": 2, "n": 2})[0].sampling.n == 2
    assert chat({"best_of": 1}).sampling.n == 1
    with pytest.raises(APIError, match="`best_of` must equal `n`"):
        chat({"best_of": 3})


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty list"),
        ({"prompt": [[]]}, "prompt", "no tokens"),
        ({"prompt": ["a", ""]}, "prompt", "no tokens"),
        ({"prompt": [-1]}, "prompt", "run from 0"),
        ({"prompt": [[1], [1, 10**30]]}, "prompt", "a larger number at place 1"),
        ({"prompt": [1] * 512}, "prompt", "512 tokens"),
        ({"best_of": 2}, "best_of", "must equal `n`, which is 1, got 2"),
        ({"best_of": 1, "n": 2}, "best_of", "must equal `n`, which is 2, got 1"),
        ({"best_of": 0}, "best_of", "use `n`"),
        ({"best_of": -1}, "best_of", "use `n`"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"logprobs": -1}, "logprobs", "at least 0"),
    ],
)
def test_wrong_values_in_a_completion(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(APIError) as caught:
        complete(fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert message in str(caught.value)


# ---- tools and structured outputs ----------------------------------------------------------------


def test_the_model_may_call_tools() -> None:
    request = chat({"tools": [function("f", type="object")]}, tool_parser="hermes")
    assert '"name": "f"' in prompt_of(request)
    assert request.form.tool_parser == "hermes"
    assert request.sampling.structured_outputs is None
    none = chat({"tools": [function("f")], "tool_choice": "none"})
    assert prompt_of(none) == HELLO_PROMPT
    assert none.form == MessageForm()
    assert chat({"tools": [], "tool_choice": "auto"}).form == MessageForm()


def schema_of(request: EngineRequest) -> Any:
    structured = request.sampling.structured_outputs
    assert structured is not None
    assert isinstance(structured.json, str)
    return json.loads(structured.json)


def test_a_named_function_is_a_schema() -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}
    choice = {"type": "function", "function": {"name": "g"}}
    tools = [function("f"), function("g", **parameters)]
    request = chat({"tools": tools, "tool_choice": choice})
    assert schema_of(request) == parameters
    assert request.form.called_function == "g"
    bare = chat({"tools": [{"function": {"name": "g"}}], "tool_choice": choice})
    assert schema_of(bare) == {"type": "object", "properties": {}, "additionalProperties": False}
    untyped = chat({"tools": [function("g")], "tool_choice": choice})
    assert schema_of(untyped) == {"type": "object"}


def test_required_calls_are_a_schema() -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer"}}}
    with_reference = {"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}}
    tools = [function("f", **with_reference, **{"$defs": {"P": point}}), function("g", **point)]
    fields = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    request = chat(fields)
    schema = schema_of(request)
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    first, second = schema["items"]["anyOf"]
    assert first["properties"]["name"] == {"type": "string", "enum": ["f"]}
    assert first["properties"]["parameters"] == with_reference
    assert second["properties"]["parameters"] == point
    assert schema["$defs"] == {"P": point}
    assert request.form == MessageForm(calls_required=True, one_call=True)


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
            "json",
            '{"a": 1}',
        ),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"]),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"guided_json": '{"a": 1}'}, "json", '{"a": 1}'),
    ],
)
def test_structured_outputs(fields: dict[str, Any], kind: str, value: Any) -> None:
    structured = chat(fields, reasoning_parser="qwen3").sampling.structured_outputs
    assert structured is not None
    assert structured.kind == kind
    got = getattr(structured, kind)
    assert (json.loads(got) if kind == "json" else got) == (
        json.loads(value) if kind == "json" else value
    )
    assert structured.disable_any_whitespace == ("response_format" in fields)
    assert complete(fields)[0].sampling.structured_outputs == structured


def test_free_text_is_no_structure() -> None:
    assert chat({"response_format": {"type": "text"}}).sampling.structured_outputs is None


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [function("f")]}, "tool_choice", "`--tool-call-parser`"),
        ({"tool_choice": "required"}, "tool_choice", "no `tools`"),
        ({"tools": [function("f")], "tool_choice": "sometimes"}, "tool_choice", "must be"),
        ({"tools": [function("f"), function("f")]}, "tools[1].function.name", "two functions"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type", "function"),
        (
            {
                "tools": [function("f")],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
            "tool_choice",
            "`tools` has: f",
        ),
        (
            {
                "tools": [
                    function("f", **{"$defs": {"P": {"type": "null"}}}),
                    function("g", **{"$defs": {"P": {"type": "string"}}}),
                ],
                "tool_choice": "required",
            },
            "tools",
            "rename one",
        ),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "response_format",
            "exclude each other",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"guided_choice": []}, "guided_choice", "empty"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be one of"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "`json_schema.schema`",
        ),
        (
            {"tools": [function(f"f{i}") for i in range(1025)], "tool_choice": "required"},
            "tools",
            "1025 entries, and at most 1024",
        ),
        (
            {"tools": [function("f", type="string")], "tool_choice": "required"},
            "tools[0].function.parameters",
            "have the type 'string', but arguments are an object",
        ),
    ],
)
def test_wrong_tools_and_structures(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(APIError) as caught:
        chat(fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert message in str(caught.value)


def test_a_format_leaves_no_room_for_calls() -> None:
    fields = {"tools": [function("f")], "response_format": {"type": "json_object"}}
    with pytest.raises(APIError, match="no room for tool calls"):
        chat(fields, tool_parser="hermes")
    assert chat({**fields, "tool_choice": "none"}).sampling.structured_outputs is not None


def test_reasoning() -> None:
    thinks = {"chat_template_kwargs": {"thinks": True}}
    assert chat(thinks).form.reasoning is None
    assert chat(thinks, reasoning_parser="qwen3").form.reasoning is True
    assert chat({}, reasoning_parser="qwen3").form.reasoning is False
    assert chat({}, reasoning_parser="deepseek_r1").form.reasoning is True
    # The grammar begins with the first token, so there is no reasoning before it.
    fields = {**thinks, "response_format": {"type": "json_object"}}
    assert chat(fields, reasoning_parser="qwen3").form.reasoning is None


# ---- text and ids --------------------------------------------------------------------------------


def test_tokenize_and_back() -> None:
    body = parse_body(TokenizeRequest, '{"prompt": "Hi you", "return_token_strs": true}')
    result = tokenize(body, context())
    assert result["tokens"] == tokenizer().encode("Hi you")
    assert result["count"] == len(result["tokens"]) == len(result["token_strs"])
    assert result["max_model_len"] == 512
    back = parse_body(DetokenizeRequest, json.dumps({"tokens": result["tokens"]}))
    assert detokenize(back, context()) == {"prompt": "Hi you"}
    conversation = parse_body(TokenizeRequest, json.dumps({"messages": HELLO}))
    assert tokenize(conversation, context())["tokens"] == chat({}).prompt_token_ids
    for tokens in ([-1], [10**6], [2**64]):
        with pytest.raises(APIError, match="run from 0"):
            detokenize(DetokenizeRequest(tokens=tokens), context())
    for wrong in ({}, {"prompt": "a", "messages": HELLO}):
        with pytest.raises(APIError, match="either"):
            tokenize(parse_body(TokenizeRequest, json.dumps(wrong)), context())


# ---- a real template -----------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.skipif("LLM_TEST_MODELS" not in os.environ, reason="$LLM_TEST_MODELS is not set")
def test_tools_in_the_template_of_qwen() -> None:
    folder = Path(os.environ["LLM_TEST_MODELS"]) / "qwen2.5-coder-0.5b-instruct"
    if not folder.is_dir():
        pytest.skip(f"$LLM_TEST_MODELS has no {folder.name}")
    loaded = Tokenizer.load(folder)
    template = loaded.chat_templates.templates["default"]
    parser = detect_tool_parser(template)
    assert parser == "hermes"
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
    }
    messages = [
        {"role": "developer", "content": "Be brief."},
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    request = chat(
        {"messages": messages, "tools": [function("weather", type="object")]},
        tokenizer=loaded,
        vocab_size=151936,
        tool_parser=parser,
    )
    text = loaded.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert '{"type": "function", "function": {"name": "weather", "parameters"' in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>' in text
    assert "<tool_response>\nsunny\n</tool_response>" in text
    assert text.endswith("<|im_start|>assistant\n")


def test_texts_that_must_be_too_long_have_openais_code() -> None:
    with pytest.raises(APIError, match="at least") as raised:
        complete({"prompt": "x" * 200_000})
    assert b'"code": "context_length_exceeded"' in raised.value.content


def test_longer_contexts_take_longer_texts() -> None:
    text = "x" * ((1 << 20) + 1)
    assert tokenize(TokenizeRequest(prompt=text), context(max_model_len=1 << 17))["count"] > 0


def test_texts_to_tokenise_are_bounded() -> None:
    most = 16 * context().max_model_len
    assert most < 1 << 20
    with pytest.raises(APIError, match="has 1048577 characters, and at most 1048576"):
        tokenize(TokenizeRequest(prompt="x" * ((1 << 20) + 1)), context())
    body = {"messages": HELLO, "tools": [function(f"f{i}") for i in range(1025)]}
    with pytest.raises(APIError, match="1025 entries, and at most 1024"):
        tokenize(parse_body(TokenizeRequest, json.dumps(body)), context())
