"""The endpoints: from a request to the objects that answer it.

Knows the order of things (limits, body, conversion, engine, delivery) and what the small endpoints
say. Forms of bodies and responses are in ``protocol``, ``convert`` and ``responses``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.server.completion_responses import CompletionResponse, CompletionStream
from paceline.server.convert import (
    EngineRequest,
    ServingContext,
    chat_to_engine,
    completion_to_engine,
    detokenize,
    tokenize,
)
from paceline.server.delivery import BodyDelivery, EventDelivery
from paceline.server.delta_stream import DeltaStream
from paceline.server.engine_client import EngineClient
from paceline.server.errors import APIError
from paceline.server.limits import BodyReader, check_room
from paceline.server.memory import give_back_memory
from paceline.server.messages import AddRequest
from paceline.server.metrics import Metrics
from paceline.server.observer import Observer
from paceline.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
    parse_body,
)
from paceline.server.response_parts import new_id
from paceline.server.responses import ChatResponse, ChatStream
from paceline.server.settings import ServerSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Bodies above this are read and tokenised in a thread, so that a long prompt does not hold up the
# streams of others; below it the hop costs more than the work.
_LONG_BODY = 32 * 1024
_HUGE_BODY = 1 << 20  # what reading it took is given back to the system


@dataclass
class Api:
    """The endpoints of one server, and what they share.

    names: what clients may call the model. root: where the model came from. about: of the engine,
    for the dashboard.
    """

    client: EngineClient
    context: ServingContext
    settings: ServerSettings
    names: tuple[str, ...]
    root: str
    observer: Observer
    metrics: Metrics
    about: dict[str, Any]
    draining: bool = False  # told to end: nothing new is begun
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._bodies = BodyReader(self.settings.max_body_size)

    def drain(self) -> None:
        """Begin nothing new."""
        self.draining = True
        self._bodies.drain()

    # ---- generation ------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""

        def prepare(data: bytes) -> tuple[ChatCompletionRequest, EngineRequest]:
            body = parse_body(ChatCompletionRequest, data)
            self._check_model(body.model)
            return body, chat_to_engine(body, self.context)

        arrived = time.monotonic()
        body, wanted = await self._prepare(request, prepare)
        requests = {new_id("chatcmpl"): wanted}
        stream = self._submit(body, requests, "chat", arrived)
        timeout = self.settings.request_timeout
        if body.stream:
            return EventDelivery(stream, ChatStream(body, wanted, self.context), timeout)
        return BodyDelivery(stream, ChatResponse(body, wanted, self.context), timeout)

    async def completions(self, request: Request) -> Response:
        """Complete one or several prompts."""

        def prepare(data: bytes) -> tuple[CompletionRequest, list[EngineRequest]]:
            body = parse_body(CompletionRequest, data)
            self._check_model(body.model)
            self._check_room(body.num_prompts)  # before any is tokenised
            return body, completion_to_engine(body, self.context)

        arrived = time.monotonic()
        body, wanted = await self._prepare(request, prepare)
        requests = {new_id("cmpl"): one for one in wanted}
        stream = self._submit(body, requests, "completion", arrived)
        timeout = self.settings.request_timeout
        if body.stream:
            return EventDelivery(stream, CompletionStream(body, requests, self.context), timeout)
        return BodyDelivery(stream, CompletionResponse(body, requests, self.context), timeout)

    async def _prepare(self, request: Request, prepare: Callable[[bytes], T]) -> T:
        """Read the body and make of it what ``prepare`` does; refuse early where that is sure."""
        self._check_open()
        self._check_room(1)
        data = await self._bodies.read(request)
        if len(data) > _LONG_BODY:
            try:
                return await asyncio.to_thread(prepare, data)
            finally:
                if len(data) > _HUGE_BODY:
                    give_back_memory()
        return prepare(data)

    def _submit(
        self,
        body: SamplingFields,
        requests: Mapping[str, EngineRequest],
        kind: str,
        arrived: float,
    ) -> DeltaStream:
        self._check_room(sum(one.sampling.n for one in requests.values()))
        if self.settings.enable_log_requests:
            for name, one in requests.items():
                _log_request(name, one, stream=bool(body.stream))
        streams = bool(body.stream)
        reports = self.settings.per_request_spec_decode_metrics != "none"
        stream = self.client.submit(
            [
                AddRequest(name, one.prompt_token_ids, one.sampling, streams, reports)
                for name, one in requests.items()
            ]
        )
        for name, one in requests.items():
            count = len(one.prompt_token_ids)
            self.observer.begin(name, kind, arrived, one.sampling.n, count, stream=streams)
        return stream

    def _check_open(self) -> None:
        if self.draining:
            raise APIError(503, "the server is shutting down", code="shutting_down", retry_after=5)

    def _check_room(self, wanted: int) -> None:
        ready = self.client.ready
        if ready is not None:
            in_flight, queue = self.client.num_in_flight, self.settings.max_queue
            check_room(wanted, in_flight, ready.max_num_seqs, queue)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise APIError(
                404,
                f"there is no model `{name[:200]}` here. hint: this server has "
                f"{', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )

    # ---- text and ids ----------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a conversation."""

        def answer(data: bytes) -> dict[str, Any]:
            body = parse_body(TokenizeRequest, data)
            self._check_model(body.model)
            return tokenize(body, self.context)

        return _json(await self._prepare(request, answer))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""

        def answer(data: bytes) -> dict[str, Any]:
            body = parse_body(DetokenizeRequest, data)
            self._check_model(body.model)
            return detokenize(body, self.context)

        return _json(await self._prepare(request, answer))

    # ---- about the server ------------------------------------------------------------------------

    async def models(self) -> Response:
        """The one model there is, under all its names."""
        return _json({"object": "list", "data": [self._model(name) for name in self.names]})

    async def model(self, name: str) -> Response:
        """One model."""
        self._check_model(name)
        return _json(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "paceline",
            "root": self.root,
            "parent": None,
            "max_model_len": self.context.max_model_len,
        }

    async def health(self) -> Response:
        """Whether requests are served: the engine lives and steps. 200 or 503."""
        status = self._status()
        report: dict[str, Any] = {"status": status}
        stats = self.client.stats
        if self.client.cause:
            report["cause"] = self.client.cause
        if stats is not None:
            report |= {
                "num_running": stats.num_running,
                "num_waiting": stats.num_waiting,
                "num_free_blocks": stats.num_free_blocks,
                "num_blocks": stats.num_blocks,
                "seconds_since_sign_of_life": round(self.client.seconds_silent, 3),
            }
        return _json(report, 200 if status == "ok" else 503)

    def _status(self) -> str:
        if self.draining:
            return "shutting down"
        if self.client.state != "ready":
            return self.client.state
        hangs = self.client.seconds_silent > self.settings.engine_stall_timeout
        return "hanging" if hangs else "ok"

    async def prometheus(self, request: Request) -> Response:
        """Metrics in Prometheus' format."""
        body, content_type = self.metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def dashboard_data(self) -> Response:
        """What the dashboard shows; nothing that a client said."""
        seen = self.observer
        return _json(
            {
                "now": time.time(),
                "uptime_s": time.time() - seen.started,
                "status": self._status(),
                "alive": self._status() in ("ok", "shutting down"),
                "engine": self.about,
                "samples": list(seen.samples),
                "positions": seen.positions(),
                "requests": list(seen.recent),
            }
        )

    async def ping(self) -> Response:
        """The same as /health, with nothing in it."""
        return Response(status_code=200 if self._status() == "ok" else 503)

    async def version(self) -> Response:
        """The version of Paceline."""
        return _json({"version": __version__})


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _log_request(name: str, request: EngineRequest, *, stream: bool) -> None:
    sampling = request.sampling
    logger.info(
        "%s: %d prompt tokens, max_tokens %s, n %d, temperature %g, %s",
        name,
        len(request.prompt_token_ids),
        sampling.max_tokens,
        sampling.n,
        sampling.temperature,
        "streamed" if stream else "whole",
    )
