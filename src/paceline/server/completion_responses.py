"""Text completions as clients get them: whole bodies, and chunks of a stream.

The counterpart of ``responses``: the same use, several prompts in one response. Choices are
numbered through: prompt times ``n``, plus the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from paceline.server.convert import EngineRequest, ServingContext
from paceline.server.logprobs import CompletionLogprobs, prompt_logprobs
from paceline.server.messages import Delta, TokenLogprobs
from paceline.server.protocol import CompletionRequest
from paceline.server.response_parts import (
    DONE,
    Account,
    ResponseHead,
    TextChunks,
    event,
    new_id,
)

_encode = msgspec.json.Encoder().encode


class _CompletionAnswer:
    """What a stream and a whole body share.

    requests: by the id under which the engine serves them, in the order of the prompts.
    """

    def __init__(
        self,
        body: CompletionRequest,
        requests: Mapping[str, EngineRequest],
        context: ServingContext,
    ) -> None:
        self._body = body
        self._tokenizer = context.tokenizer
        self._requests = list(requests.values())
        self._places = {name: place for place, name in enumerate(requests)}
        self._n = self._requests[0].sampling.n
        self._count = self._n * len(self._requests)
        self._account = Account(context, self._count)
        self._head = ResponseHead(
            new_id("cmpl"), "text_completion", body.model or context.model_name
        )
        # The engine cannot generate nothing, so it made one token that nobody asked for.
        self._echo_only = bool(body.echo) and body.max_tokens == 0
        self._logprobs = [CompletionLogprobs(body.logprobs or 0) for _ in range(self._count)]

    def _number(self, delta: Delta) -> int:
        """Which choice a delta belongs to."""
        return self._places[delta.request_id] * self._n + delta.index

    def _wanted(self, delta: Delta) -> Delta:
        """The delta without what nobody asked for."""
        if not self._echo_only:
            return delta
        ended = delta.finish_reason is not None
        return msgspec.structs.replace(
            delta,
            text="",
            token_ids=[],
            logprobs=None,
            finish_reason="length" if ended else None,
            stop_reason=None,
        )

    def _echo(self, number: int, positions: Sequence[TokenLogprobs | None] | None) -> str:
        """The prompt before a choice's text, if it is to be repeated; its log-probabilities."""
        if not self._body.echo:
            return ""
        request = self._requests[number // self._n]
        if positions is not None and self._body.logprobs is not None:
            logprobs = self._logprobs[number]
            logprobs.add_text(self._tokenizer.decode_token(request.prompt_token_ids[0]))
            logprobs.add(position for position in positions if position is not None)
        return request.prompt_text


class CompletionStream(_CompletionAnswer):
    """Server-sent events of a streamed text completion."""

    def __init__(
        self,
        body: CompletionRequest,
        requests: Mapping[str, EngineRequest],
        context: ServingContext,
    ) -> None:
        super().__init__(body, requests, context)
        self._begun = [False] * self._count
        # Outputs whose prompt's log-probabilities have not come: those come with output 0.
        self._early: dict[str, list[Delta]] = {}
        self._prompts: dict[str, Sequence[TokenLogprobs | None]] = {}
        self._is_plain = body.logprobs is None and not body.continuous_usage
        self._plain = TextChunks(self._head, b',"text":', b"", body.include_usage)

    def event(self, delta: Delta) -> bytes:
        """The chunk of one delta; empty when it adds nothing that can be told yet."""
        if self._is_plain and delta.finish_reason is None:
            number = self._number(delta)
            if self._begun[number]:
                self._account.add(delta)
                return self._plain.chunk(number, delta.text)
        if not self._body.echo or self._body.logprobs is None:
            return self._full_event(delta)
        return self._with_prompt(delta)

    def _with_prompt(self, delta: Delta) -> bytes:
        """The prompt's log-probabilities come first."""
        name = delta.request_id
        if delta.prompt_logprobs is not None:
            self._prompts[name] = delta.prompt_logprobs
        elif name not in self._prompts:
            self._early.setdefault(name, []).append(delta)
            return b""
        deltas = [delta, *self._early.pop(name, ())]
        return b"".join([self._full_event(each) for each in deltas])

    def _full_event(self, delta: Delta) -> bytes:
        delta, number, text = self._wanted(delta), self._number(delta), ""
        self._account.add(delta)
        if not self._begun[number]:
            self._begun[number] = True
            text = self._echo(number, self._prompts.get(delta.request_id))
        text += delta.text
        self._logprobs[number].add(delta.logprobs or ())
        if not text and delta.finish_reason is None:
            return b""
        choice: dict[str, Any] = {
            "index": number,
            "text": text,
            "logprobs": self._logprobs[number].take() if self._body.logprobs is not None else None,
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        chunk: dict[str, Any] = {**self._head.fields, "choices": [choice]}
        if self._body.continuous_usage:
            chunk["usage"] = self._account.usage()
        elif self._body.include_usage:
            chunk["usage"] = None
        return event(chunk)

    def tail(self) -> bytes:
        """What ends the stream after the last delta: usage if asked for, and the end mark."""
        return self._account.usage_event(self._head, self._body.include_usage) + DONE


class CompletionResponse(_CompletionAnswer):
    """The whole body of a text completion."""

    def __init__(
        self,
        body: CompletionRequest,
        requests: Mapping[str, EngineRequest],
        context: ServingContext,
    ) -> None:
        super().__init__(body, requests, context)
        self._texts: list[list[str]] = [[] for _ in range(self._count)]
        self._endings: list[tuple[str | None, int | str | None]] = [(None, None)] * self._count
        self._prompts: dict[int, Sequence[TokenLogprobs | None]] = {}
        self._positions: list[list[TokenLogprobs]] = [[] for _ in range(self._count)]

    def add(self, delta: Delta) -> None:
        """Take a delta."""
        delta, number = self._wanted(delta), self._number(delta)
        self._account.add(delta)
        if delta.prompt_logprobs is not None:
            self._prompts[self._places[delta.request_id]] = delta.prompt_logprobs
        self._texts[number].append(delta.text)
        self._positions[number] += delta.logprobs or ()
        if delta.finish_reason is not None:
            self._endings[number] = (delta.finish_reason, delta.stop_reason)

    def encode(self) -> bytes:
        """The body, after the last delta."""
        result: dict[str, Any] = {
            **self._head.fields,
            "choices": [self._choice(number) for number in range(self._count)],
            "usage": self._account.usage(),
        }
        self._account.add_metrics(result)
        return _encode(result)

    def _choice(self, number: int) -> dict[str, Any]:
        prompt = self._prompts.get(number // self._n)
        text = self._echo(number, prompt) + "".join(self._texts[number])
        logprobs = self._logprobs[number]
        logprobs.add(self._positions[number])
        finish_reason, stop_reason = self._endings[number]
        choice = {
            "index": number,
            "text": text,
            "logprobs": logprobs.take() if self._body.logprobs is not None else None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }
        if self._body.prompt_logprobs is not None and prompt is not None:
            choice["prompt_logprobs"] = prompt_logprobs(prompt, self._body.prompt_logprobs)
        return choice
