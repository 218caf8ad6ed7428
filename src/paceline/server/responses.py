"""From the engine's deltas to what clients get: whole bodies, and chunks of a stream.

One object a response; it is fed every delta of its requests in order. Chat completions here, text
completions in ``completion_responses``, what both share in ``response_parts``. Knows no sockets and
no framework: what comes out are bytes.

    stream = ChatStream(body, request, context)
    for delta in deltas:
        send(stream.event(delta))  # may be empty
    send(stream.tail())
"""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.server.convert import EngineRequest, ServingContext
from paceline.server.logprobs import chat_logprobs, prompt_logprobs
from paceline.server.message_parser import MessageDelta, MessageParser
from paceline.server.messages import Delta, TokenLogprobs
from paceline.server.protocol import ChatCompletionRequest
from paceline.server.response_parts import (
    DONE,
    Account,
    ResponseHead,
    TextChunks,
    event,
    new_id,
)
from paceline.server.tool_parsers import ToolDelta

_encode = msgspec.json.Encoder().encode


class _ChatAnswer:
    """What a stream and a whole body share: one parser an output, and the account."""

    def __init__(
        self, body: ChatCompletionRequest, request: EngineRequest, context: ServingContext
    ) -> None:
        self._body = body
        self._form = request.form
        self._tokenizer = context.tokenizer
        self._account = Account(context, request.sampling.n)
        self._parsers = [MessageParser(request.form) for _ in range(request.sampling.n)]

    def _read(self, delta: Delta) -> MessageDelta:
        """The message's new parts."""
        parser = self._parsers[delta.index]
        message = parser.push(delta.text)
        if delta.finish_reason is None:
            return message
        last = parser.finish()
        calls = message.calls + last.calls
        return MessageDelta(
            message.reasoning + last.reasoning, message.content + last.content, calls
        )

    def _finish_reason(self, delta: Delta) -> str | None:
        """OpenAI's: a function that the client named ends with "stop" like any text, and so does a
        call that a stop string cut.
        """
        calls = self._parsers[delta.index].ends_with_calls and self._form.called_function is None
        return "tool_calls" if calls and delta.finish_reason == "stop" else delta.finish_reason

    def _logprobs(self, positions: list[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        content = chat_logprobs(positions, self._body.top_logprobs or 0, self._tokenizer)
        return {"content": content, "refusal": None}


class ChatStream(_ChatAnswer):
    """Server-sent events of a streamed chat completion."""

    def __init__(
        self, body: ChatCompletionRequest, request: EngineRequest, context: ServingContext
    ) -> None:
        super().__init__(body, request, context)
        model = body.model or context.model_name
        self._head = ResponseHead(new_id("chatcmpl"), "chat.completion.chunk", model)
        self._begun = [False] * request.sampling.n
        self._positions: list[list[TokenLogprobs]] = [[] for _ in self._begun]
        self._is_plain = request.form.is_content and not body.logprobs and not body.continuous_usage
        self._plain = TextChunks(self._head, b',"delta":{"content":', b"}", body.include_usage)

    def event(self, delta: Delta) -> bytes:
        """The chunk of one delta; empty when it adds nothing that can be told yet."""
        index = delta.index
        if self._is_plain and delta.finish_reason is None and self._begun[index]:
            self._account.add(delta)
            return self._plain.chunk(index, delta.text)
        return self._full_event(delta)

    def _full_event(self, delta: Delta) -> bytes:
        self._account.add(delta)
        index, message = delta.index, self._read(delta)
        self._positions[index] += delta.logprobs or ()
        if not message and delta.finish_reason is None:
            return b""
        choice: dict[str, Any] = {
            "index": index,
            "delta": self._message_delta(index, message),
            "logprobs": self._logprobs(self._positions[index]),
            "finish_reason": self._finish_reason(delta),
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        self._positions[index] = []
        chunk: dict[str, Any] = {**self._head.fields, "choices": [choice]}
        if self._body.continuous_usage:
            chunk["usage"] = self._account.usage()
        elif self._body.include_usage:
            chunk["usage"] = None
        return event(chunk)

    def _message_delta(self, index: int, message: MessageDelta) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if not self._begun[index]:
            self._begun[index] = True
            delta = {"role": "assistant", "content": None if message.calls else ""}
        if message.reasoning:
            delta["reasoning_content"] = message.reasoning
        if message.content:
            delta["content"] = message.content
        if message.calls:
            delta["tool_calls"] = [self._call_delta(index, call) for call in message.calls]
        return delta

    def _call_delta(self, index: int, call: ToolDelta) -> dict[str, Any]:
        """A call's first chunk names it, the others only add to its arguments."""
        if call.name is None:
            return {"index": call.number, "function": {"arguments": call.arguments}}
        return {"index": call.number, **_tool_call(call.name, call.arguments)}

    def tail(self) -> bytes:
        """What ends the stream after the last delta: usage if asked for, and the end mark."""
        return self._account.usage_event(self._head, self._body.include_usage) + DONE


class ChatResponse(_ChatAnswer):
    """The whole body of a chat completion."""

    def __init__(
        self, body: ChatCompletionRequest, request: EngineRequest, context: ServingContext
    ) -> None:
        super().__init__(body, request, context)
        model = body.model or context.model_name
        self._head = ResponseHead(new_id("chatcmpl"), "chat.completion", model)
        count = request.sampling.n
        self._reasoning: list[list[str]] = [[] for _ in range(count)]
        self._content: list[list[str]] = [[] for _ in range(count)]
        self._calls: list[list[ToolDelta]] = [[] for _ in range(count)]
        self._positions: list[list[TokenLogprobs]] = [[] for _ in range(count)]
        self._endings: list[tuple[str | None, int | str | None]] = [(None, None)] * count
        self._prompt: list[TokenLogprobs | None] | None = None

    def add(self, delta: Delta) -> None:
        """Take a delta."""
        self._account.add(delta)
        index, message = delta.index, self._read(delta)
        self._reasoning[index].append(message.reasoning)
        self._content[index].append(message.content)
        self._calls[index] += message.calls
        self._positions[index] += delta.logprobs or ()
        self._prompt = delta.prompt_logprobs or self._prompt
        if delta.finish_reason is not None:
            self._endings[index] = (self._finish_reason(delta), delta.stop_reason)

    def encode(self) -> bytes:
        """The body, after the last delta."""
        result: dict[str, Any] = {
            **self._head.fields,
            "choices": [self._choice(index) for index in range(len(self._endings))],
            "usage": self._account.usage(),
        }
        if self._prompt is not None:
            count = self._body.prompt_logprobs or 0
            result["prompt_logprobs"] = prompt_logprobs(self._prompt, count)
        self._account.add_metrics(result)
        return _encode(result)

    def _choice(self, index: int) -> dict[str, Any]:
        calls: list[dict[str, Any]] = []
        for call in self._calls[index]:
            if call.name is not None:
                calls.append(_tool_call(call.name, call.arguments))
            else:
                calls[-1]["function"]["arguments"] += call.arguments
        content = "".join(self._content[index])
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
        }
        if self._form.reasoning is not None:
            message["reasoning_content"] = "".join(self._reasoning[index]) or None
        if calls:
            message["tool_calls"] = calls
        finish_reason, stop_reason = self._endings[index]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(self._positions[index]),
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }


def _tool_call(name: str, arguments: str) -> dict[str, Any]:
    """A call as OpenAI writes it, with an id that the client's answer refers to."""
    return {
        "id": new_id("call", "_"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
