"""Bodies that clients send, as pydantic models, and how a wrong one is refused.

Knows names, JSON types and what is not supported; the meaning of values is checked where they are
used (``convert``, ``SamplingParams``, the engine). No tokenizer, no engine, no framework.

Names are OpenAI's, and vLLM's for what OpenAI has not. A field that is null counts as not sent.
Accepted, and without any effect here: ``user``, ``store``, ``metadata``, ``service_tier``,
``safety_identifier``, ``prompt_cache_key``, ``prompt_cache_retention``. Fields of OpenAI's and
vLLM's that this server lacks are accepted at the values that ask for nothing. Every other unknown
field is refused, so that no request silently means something else than its sender thinks.

    body = parse_body(ChatCompletionRequest, b'{"messages": [{"role": "user", "content": "Hi"}]}')
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError
from pydantic_core import ErrorDetails, from_json, to_json

from paceline.no_effect import NoEffect, closest
from paceline.server.errors import APIError

_MOST_FAULTS = 10_000
_WITHOUT_EFFECT = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
_TEXT_ONLY = "this server takes and gives text only"
_NO_BEAMS = "there is no beam search"
_SAMPLE = "use `n` with a `temperature` above 0"
_BIAS = "use `logit_bias` or `structured_outputs`"

# Fields of OpenAI's or vLLM's that change nothing at these values, beside null; others are refused.
_NO_EFFECT: dict[str, NoEffect] = {
    "allowed_token_ids": NoEffect((), "tokens cannot be limited to a list", _BIAS),
    "audio": NoEffect((), _TEXT_ONLY),
    "bad_words": NoEffect(([],), "words cannot be forbidden", _BIAS),
    "cache_salt": NoEffect(
        (), "all share the prefix cache", "start the server with `--no-enable-prefix-caching`"
    ),
    "chat_template": NoEffect(
        (), "templates are programs", "start the server with `--chat-template`"
    ),
    "detokenize": NoEffect((True,), "answers have their text"),
    "documents": NoEffect(([],), "there is no retrieval", "put them into the messages"),
    "early_stopping": NoEffect((False,), _NO_BEAMS, _SAMPLE),
    "echo": NoEffect((False,), "a chat has no text to repeat", "ask `/v1/completions`"),
    "function_call": NoEffect((), "OpenAI has replaced it", "use `tool_choice`"),
    "functions": NoEffect((), "OpenAI has replaced it", "use `tools`"),
    "guided_decoding_backend": NoEffect((), "there is one backend"),
    "guided_whitespace_pattern": NoEffect((), "whitespace is free or absent"),
    "include_reasoning": NoEffect(
        (True,), "reasoning is part of the answer", "read `content` and leave the rest"
    ),
    "kv_transfer_params": NoEffect(({},), "the KV cache stays in one engine"),
    "length_penalty": NoEffect((1.0,), _NO_BEAMS, _SAMPLE),
    "logits_processors": NoEffect(([],), "no code of clients is run", _BIAS),
    "mm_processor_kwargs": NoEffect(({},), _TEXT_ONLY),
    "modalities": NoEffect((["text"],), _TEXT_ONLY),
    "prediction": NoEffect((), "predicted outputs are not there yet"),
    "priority": NoEffect((0,), "requests are served in the order in which they come"),
    "request_id": NoEffect((), "the server numbers requests itself"),
    "return_token_ids": NoEffect((False,), "answers have no token ids", "use `/tokenize`"),
    "return_tokens_as_token_ids": NoEffect((False,), "logprobs have tokens as text"),
    "spaces_between_special_tokens": NoEffect(
        (True,), "text is written as the model's tokenizer writes it"
    ),
    "suffix": NoEffect(
        ("",), "models differ in it", "write the prompt in the model's own fill-in-the-middle form"
    ),
    "thinking_token_budget": NoEffect((), "reasoning has no budget", "use `max_tokens`"),
    "truncate_prompt_tokens": NoEffect((), "no prompt is cut", "shorten the prompt yourself"),
    "use_beam_search": NoEffect((False,), _NO_BEAMS, _SAMPLE),
    "verbosity": NoEffect(
        ("medium",), "models know no such setting", "say in the messages how long to answer"
    ),
    "vllm_xargs": NoEffect(({},), "nothing reads them"),
    "web_search_options": NoEffect(
        (), "nothing searches", "offer a search of your own among the `tools`"
    ),
}
# What a field must be, where pydantic's own words would not say it.
_FORMS = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "a text or a list of texts",
    "tool_choice": (
        '"auto", "none", "required" or {"type": "function", "function": {"name": "..."}}'
    ),
    "guided_json": "a JSON schema, as an object or as text",
}
_KINDS = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a text",
}

BodyT = TypeVar("BodyT", bound="Body")
T = TypeVar("T")


class _Hashable(FailFast):
    """Unions of annotated types need to hash what annotates them."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


# A list that is refused at its first wrong element: one can hold millions.
ListOf = Annotated[list[T], _Hashable()]


class Body(BaseModel):
    """What all bodies share: JSON types are taken strictly, unknown fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class FunctionDefinition(Body):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments")
    strict: bool | None = Field(None, description="no effect: `tool_choice` decides")


class Tool(Body):
    """An entry of ``tools``."""

    type: str = "function"
    function: FunctionDefinition


class JsonSchema(Body):
    """The ``json_schema`` of a ``response_format``."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="no effect: the schema always holds")


class ResponseFormat(Body):
    """``response_format``: "text", "json_object" or "json_schema"."""

    type: str
    json_schema: JsonSchema | None = None


class StreamOptions(Body):
    """When a stream says how many tokens were used."""

    include_usage: bool | None = Field(None, description="once, in a last chunk")
    continuous_usage_stats: bool | None = Field(None, description="in every chunk")


class StructuredOutputs(Body):
    """What the text must match: exactly one of the first five."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema")
    regex: str | None = None
    choice: ListOf[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


class SamplingFields(Body):
    """Sampling parameters and more that chat and text completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = Field(None, description="must equal `n`")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | ListOf[str] | None = None
    stop_token_ids: ListOf[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = Field(None, description="token id -> -100 to 100")
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: ListOf[str] | None = None
    guided_grammar: str | None = None

    metadata: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    user: Any = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ChatFields(Body):
    """How a conversation becomes a prompt."""

    messages: ListOf[dict[str, Any]]
    tools: ListOf[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(None, description="handed to the chat template")


class ChatCompletionRequest(SamplingFields, ChatFields):
    """Body of ``/v1/chat/completions``."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(SamplingFields):
    """Body of ``/v1/completions``."""

    prompt: str | ListOf[str] | ListOf[int] | ListOf[ListOf[int]]
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def num_prompts(self) -> int:
        """How many there are, before any is read."""
        one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return 1 if one else len(self.prompt)


class TokenizeRequest(Body):
    """Body of ``/tokenize``: a text, or a conversation as the chat endpoint takes it."""

    model: str | None = None
    prompt: str | None = None
    messages: ListOf[dict[str, Any]] | None = None
    tools: ListOf[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Body of ``/detokenize``."""

    model: str | None = None
    tokens: ListOf[int]


def parse_body(kind: type[BodyT], data: bytes | bytearray | str) -> BodyT:
    """The JSON text of a request as a body.

    Raises:
        APIError: 400, with the field as ``param``; its message says what is wrong.
    """
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        if error.error_count() > _MOST_FAULTS:  # to list them would take seconds, and gigabytes
            raise APIError(
                400,
                f"the body has {error.error_count()} values of a wrong type. hint: send a short "
                "one like it, and the answer will name the field",
            ) from None
        faults = error.errors(include_url=False, include_context=False)
    unused = {f["loc"][0] for f in faults if _changes_nothing(f)}
    if unused:
        sent = from_json(data)
        return parse_body(kind, to_json({k: v for k, v in sent.items() if k not in unused}))
    raise _as_api_error(kind, faults)


def _as_api_error(kind: type[Body], faults: list[ErrorDetails]) -> APIError:
    """The first fault that can be named, unknown fields before others: a misspelt one may be why
    another is missing."""
    fault = next((f for f in faults if _is_unknown(f)), faults[0])
    where, reason = fault["loc"], fault["type"]
    if not where:
        if reason == "json_invalid":
            return APIError(400, f"the body is no JSON that can be read: {fault['msg']}")
        return APIError(400, "the body must be a JSON object")
    param = _path(where)
    if _is_unknown(fault):
        return _unknown(kind, where)
    if reason == "missing":
        return APIError(400, f"`{param}` is missing", param=param)
    field = str(where[0])
    if field in _FORMS and len(where) > 1:  # it may take several forms
        return APIError(
            400, f"`{field}` must be {_FORMS[field]}, got {shown(_given(faults))}", param=field
        )
    if field in ("structured_outputs", "response_format", "guided_json"):
        param = _path(part for part in where if part not in ("str", "dict[str,any]"))
    form = _KINDS.get(reason)
    if form is None:
        return APIError(400, f"`{param}` is wrong: {fault['msg']}", param=param)
    return APIError(400, f"`{param}` must be {form}, got {shown(fault['input'])}", param=param)


def _is_unknown(fault: ErrorDetails) -> bool:
    return fault["type"] == "extra_forbidden"


def _changes_nothing(fault: ErrorDetails) -> bool:
    """Whether the fault is a field that this body lacks, with a value that asks for nothing."""
    if not _is_unknown(fault) or len(fault["loc"]) != 1:
        return False
    entry = _NO_EFFECT.get(str(fault["loc"][0]))
    return fault["input"] is None or (entry is not None and entry.takes(fault["input"]))


def _unknown(kind: type[Body], where: tuple[int | str, ...]) -> APIError:
    """What to say of a field that the body does not have."""
    name, param = str(where[-1]), _path(where)
    if len(where) > 1:
        return APIError(400, f"unknown field `{param}`. hint: leave it out", param=param)
    if name in _NO_EFFECT:
        entry = _NO_EFFECT[name]
        return APIError(
            400,
            f"`{name}` is not supported: {entry.why}. hint: {entry.hint or 'leave it out'}",
            param=name,
            code="unsupported",
        )
    close = closest(name, [n for n in kind.model_fields if n not in _WITHOUT_EFFECT])
    hint = f"did you mean `{close}`?" if close else "leave it out"
    return APIError(400, f"unknown field `{param}`. hint: {hint}", param=name, code="unknown_field")


def _path(where: Any) -> str:
    """A place in the body as JavaScript writes it: ``messages[0].role``."""
    path = ""
    for part in where:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path[:200]


def _given(faults: list[ErrorDetails]) -> object:
    """What a client sent for a field of several forms: the widest input that a fault shows."""
    return min(faults, key=lambda fault: len(fault["loc"]))["input"]


def shown(value: object) -> str:
    """A value as JSON would name its kind, and itself where it is short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'the text "{value}"' if len(value) <= 40 else "a text"
    if isinstance(value, int | float):
        return (
            str(value) if not isinstance(value, int) or value.bit_length() < 128 else "an integer"
        )
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, list | tuple) else type(value).__name__
