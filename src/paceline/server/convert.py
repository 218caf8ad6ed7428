"""From a client's body to what the engine is asked for, and how the answer is to be read.

Renders chat templates, tokenises, fills in defaults, turns tools and response formats into
structured outputs. Every fault of a body is an ``APIError`` 400 here, or found by the engine's own
admission. Pure functions of body and context: no sockets, no engine.

    requests = completion_to_engine(parse_body(CompletionRequest, data), context)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paceline.engine.tokenizer import Tokenizer
from paceline.errors import PromptTooLongError, RequestError
from paceline.sampling_params import SamplingParams, StructuredOutputsParams
from paceline.server.errors import APIError
from paceline.server.message_parser import MessageForm
from paceline.server.protocol import (
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
    shown,
)
from paceline.server.reasoning import begins_inside
from paceline.server.structured import structured_outputs
from paceline.server.tools import ToolUse, check_count, tool_use

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for text completions
_SAMPLING_NAMES = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "prompt_logprobs",
    "skip_special_tokens",
)
T = TypeVar("T")

# Characters of a text that `/tokenize` takes: ids of long texts take a hundred times their memory.
_MOST_TOKENISED, _PER_TOKEN = 1 << 20, 16  # or so many a token of the context


@dataclass(frozen=True, slots=True)
class ServingContext:
    """What conversion must know of the running server.

    model_name: what responses call the model when a body does not name it. vocab_size: ids of the
    model run below it. default_sampling: ``EngineConfig.default_sampling``. chat_template: instead
    of the model's own. tool_parser, reasoning_parser: names from ``TOOL_PARSERS`` and
    ``REASONING_PARSERS``, None to look for no calls, no reasoning. spec_decode_metrics: what
    responses say in ``metrics.speculative_decoding``; num_speculative_tokens: the largest k.
    """

    tokenizer: Tokenizer
    model_name: str
    max_model_len: int
    vocab_size: int
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    spec_decode_metrics: str = "none"
    num_speculative_tokens: int | None = None


@dataclass(slots=True)
class EngineRequest:
    """One prompt for the engine.

    prompt_text: what ``echo`` repeats. form: how a chat answer's text is read.
    """

    prompt_token_ids: list[int]
    sampling: SamplingParams
    prompt_text: str = ""
    form: MessageForm = field(default_factory=MessageForm)


def chat_to_engine(body: ChatCompletionRequest, context: ServingContext) -> EngineRequest:
    """A conversation as a request. Raises APIError."""
    tools = tool_use(body, context.tool_parser)
    structured = structured_outputs(body, tools)
    prompt = _render(body, context, tools.offered)
    ids = _attributed(
        "messages",
        type(body),
        lambda: context.tokenizer.encode(
            prompt, bool(body.add_special_tokens), limit=context.max_model_len
        ),
    )
    if body.top_logprobs is not None and not body.logprobs:
        raise APIError(
            400,
            "`top_logprobs` is set, but `logprobs` is not true. hint: set it",
            param="top_logprobs",
        )
    given: dict[str, Any] = {"max_tokens": _chat_max_tokens(body)}
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    _check_length(len(ids), given["max_tokens"], context.max_model_len, "messages")
    sampling = _sampling(body, context, given, structured)
    reasoning = None
    # A grammar holds from the first token on and leaves no room for reasoning.
    if context.reasoning_parser is not None and structured is None:
        begun = _last_text(body) if body.continue_final_message else None
        reasoning = begins_inside(context.reasoning_parser, prompt, begun)
    return EngineRequest(ids, sampling, form=tools.form(reasoning))


def completion_to_engine(body: CompletionRequest, context: ServingContext) -> list[EngineRequest]:
    """A text completion's prompts as requests, in order. Raises APIError."""
    prompts = _prompts(body, context)
    echo_only = bool(body.echo) and body.max_tokens == 0
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    given: dict[str, Any] = {"max_tokens": 1 if echo_only else max_tokens}
    if body.logprobs is not None:
        given["logprobs"] = body.logprobs
        if body.echo:
            given["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    for ids in prompts:
        _check_length(len(ids), body.max_tokens, context.max_model_len, "prompt")
    sampling = _sampling(body, context, given, structured_outputs(body, ToolUse()))
    skip = body.skip_special_tokens is not False
    texts = [""] * len(prompts)
    if body.echo:
        texts = _texts(body) or [context.tokenizer.decode(ids, skip) for ids in prompts]
    return [EngineRequest(ids, sampling, text) for ids, text in zip(prompts, texts, strict=True)]


def tokenize(body: TokenizeRequest, context: ServingContext) -> dict[str, Any]:
    """The response of ``/tokenize``. Raises APIError."""
    tokenizer = context.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "give either `prompt` or `messages`", param="prompt")
    if body.prompt is not None:
        prompt, param, special = body.prompt, "prompt", body.add_special_tokens is not False
    else:
        check_count(body.tools)
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] or None
        prompt, param = _render(body, context, tools), "messages"
        special = bool(body.add_special_tokens)
    most = max(_MOST_TOKENISED, _PER_TOKEN * context.max_model_len)
    if len(prompt) > most:
        raise APIError(
            400,
            f"the text has {len(prompt)} characters, and at most {most} are tokenised at a time. "
            "hint: send parts of it",
            param=param,
        )
    ids = _attributed(
        param, type(body), lambda: tokenizer.encode(prompt, add_special_tokens=special)
    )
    result: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": context.max_model_len,
        "tokens": ids,
    }
    if body.return_token_strs:
        result["token_strs"] = [tokenizer.token_text(token) for token in ids]
    return result


def detokenize(body: DetokenizeRequest, context: ServingContext) -> dict[str, Any]:
    """The response of ``/detokenize``. Raises APIError."""
    _check_ids(body.tokens, context.vocab_size, "tokens")
    return {"prompt": context.tokenizer.decode(body.tokens, skip_special_tokens=False)}


# ---- prompts -------------------------------------------------------------------------------------


def _render(
    body: ChatCompletionRequest | TokenizeRequest,
    context: ServingContext,
    tools: list[dict[str, Any]] | None,
) -> str:
    """The conversation as prompt text."""
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    generation = body.add_generation_prompt
    if generation is None:
        generation = not body.continue_final_message
    templates = context.tokenizer.chat_templates
    if not templates.templates and context.chat_template is None:
        raise APIError(
            400,
            "the model has no chat template (it may be a base model). hint: send the prompt to "
            "`/v1/completions`, or start the server with `--chat-template`",
            param="messages",
        )
    sources = [context.chat_template] if context.chat_template else templates.templates.values()
    messages = body.messages or []
    if not any("developer" in source for source in sources):
        # OpenAI's newer name of the role; templates drop messages of roles they do not know.
        messages = [
            {**message, "role": "system"} if message.get("role") == "developer" else message
            for message in messages
        ]
    return _attributed(
        "messages",
        type(body),
        lambda: templates.render(
            messages,
            chat_template=context.chat_template,
            tools=tools,
            add_generation_prompt=generation,
            continue_final_message=bool(body.continue_final_message),
            chat_template_kwargs=variables,
        ),
    )


def _last_text(body: ChatCompletionRequest) -> str:
    content = body.messages[-1].get("content") if body.messages else None
    return content if isinstance(content, str) else ""


def _texts(body: CompletionRequest) -> list[str] | None:
    """The prompts as texts, None if they are ids."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    texts = [entry for entry in prompt if isinstance(entry, str)]
    return texts or None


def _prompts(body: CompletionRequest, context: ServingContext) -> list[list[int]]:
    """Token ids of each prompt, none of them empty."""
    if not body.prompt and not isinstance(body.prompt, str):
        raise APIError(400, "`prompt` is an empty list. hint: give a prompt", param="prompt")
    texts = _texts(body)
    if texts is None:
        nested: list[Any] = list(body.prompt)
        prompts = nested if isinstance(nested[0], list) else [nested]
        for ids in prompts:
            _check_ids(ids, context.vocab_size, "prompt")
    else:
        special = body.add_special_tokens is not False
        prompts = _attributed(
            "prompt",
            type(body),
            lambda: context.tokenizer.encode_batch(texts, special, limit=context.max_model_len),
        )
    if not all(prompts):
        raise APIError(
            400, "`prompt` is empty: it has no tokens. hint: give at least one", param="prompt"
        )
    return prompts


def _check_ids(ids: list[int], vocab_size: int, param: str) -> None:
    for place, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            got = token if abs(token) < 1 << 63 else "a larger number"
            raise APIError(
                400,
                f"`{param}` has {got} at place {place}, but token ids of this model run from 0 "
                f"to {vocab_size - 1}",
                param=param,
            )


def _check_length(count: int, max_tokens: int | None, limit: int, param: str) -> None:
    """Prompt and asked output must fit the context."""
    if count >= limit:
        raise APIError(
            400,
            f"the prompt has {count} tokens, but the model's maximum context length is {limit} "
            "tokens and one place is needed for output. hint: shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )
    if max_tokens is not None and count + max_tokens > limit:
        raise APIError(
            400,
            f"the prompt has {count} tokens and {max_tokens} are asked for, but the model's "
            f"maximum context length is {limit} tokens. hint: ask for at most {limit - count}, or "
            "leave the limit out to get what fits",
            param="max_tokens",
            code="context_length_exceeded",
        )


# ---- sampling ------------------------------------------------------------------------------------


def _chat_max_tokens(body: ChatCompletionRequest) -> int | None:
    """``max_completion_tokens``, under its old name or its new one."""
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise APIError(
            400,
            f"`max_completion_tokens` is {new}, but `max_tokens` is {old}. hint: give one of them",
            param="max_tokens",
        )
    return old if new is None else new


def _sampling(
    body: SamplingFields,
    context: ServingContext,
    given: dict[str, Any],
    structured: StructuredOutputsParams | None,
) -> SamplingParams:
    """Sampling parameters: the body's, else the model's defaults, else the engine's."""
    if body.stream and body.prompt_logprobs is not None:
        raise APIError(
            400,
            "`prompt_logprobs` is not there with `stream`. hint: leave one of them out",
            param="prompt_logprobs",
        )
    if body.stream_options is not None and not body.stream:
        raise APIError(
            400,
            "`stream_options` is set, but `stream` is not true. hint: set it, or leave the options "
            "out",
            param="stream_options",
        )
    n = 1 if body.n is None else body.n
    if body.best_of not in (None, n):
        raise APIError(
            400,
            f"`best_of` must equal `n`, which is {shown(n)}, got {shown(body.best_of)}. hint: use "
            "`n` and choose among the outputs",
            param="best_of",
        )
    values = {"max_tokens": None, **context.default_sampling}
    for name in _SAMPLING_NAMES:
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    values.update((name, value) for name, value in given.items() if value is not None)
    if structured is not None:
        values["structured_outputs"] = structured
    try:
        return SamplingParams(**values)
    except RequestError as error:
        raise _client_error(error, type(body)) from error


def _attributed(param: str, kind: type[Body], make: Callable[[], T]) -> T:
    """What ``make`` returns; a RequestError is the client's, about ``param`` if about no other."""
    try:
        return make()
    except RequestError as error:
        raise _client_error(error, kind, param) from error


def _client_error(error: RequestError, kind: type[Body], param: str | None = None) -> APIError:
    """The engine's messages name the field at fault between backticks, first."""
    named = re.search(r"`(\w+)`", str(error))
    if named is not None and named[1] in kind.model_fields:
        param = named[1]
    code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else None
    return APIError(400, str(error), param=param, code=code)
