"""Sends what a ``DeltaStream`` brings to the client: as server-sent events, or as one JSON body.

Both watch the connection meanwhile: when the client leaves, the stream is closed, which aborts what
the engine still does for it. Knows ASGI; what the bytes say is the writers' business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paceline.server.delta_stream import DeltaStream
from paceline.server.errors import APIError, as_api_error
from paceline.server.limits import send_error
from paceline.server.messages import Delta

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects events would undo the streaming
]


class EventWriter(Protocol):
    """Turns deltas into events."""

    def event(self, delta: Delta) -> bytes: ...

    def tail(self) -> bytes:
        """What follows the last delta."""


class BodyWriter(Protocol):
    """Turns deltas into one body."""

    def add(self, delta: Delta) -> None: ...

    def encode(self) -> bytes: ...


class Delivery(Response):
    """A response made of a stream of deltas.

    timeout: seconds the whole may take; 0 is no limit.
    """

    def __init__(self, stream: DeltaStream, timeout: float) -> None:
        super().__init__()
        self._stream = stream
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._watched(receive):
            await self._deliver(send)

    async def _deliver(self, send: Send) -> None:
        raise NotImplementedError

    @contextmanager
    def _watched(self, receive: Receive) -> Iterator[None]:
        """Close the stream when the client leaves, when it takes too long, and in any case."""
        loop = asyncio.get_running_loop()
        watcher = loop.create_task(_close_on_disconnect(receive, self._stream))
        timer = None
        if self._timeout:
            timer = loop.call_later(self._timeout, self._stream.fail, _too_slow(self._timeout))
        try:
            yield
        finally:
            watcher.cancel()
            if timer is not None:
                timer.cancel()
            self._stream.close()


async def _close_on_disconnect(receive: Receive, stream: DeltaStream) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.abandon()


def _too_slow(seconds: float) -> APIError:
    return APIError(
        503,
        f"the request took longer than {seconds:g} s and was ended. hint: ask for fewer tokens, or "
        "start the server with a longer `--request-timeout`",
        code="request_timeout",
    )


class EventDelivery(Delivery):
    """Server-sent events: one piece a stream and step, written as soon as it is there.

    The status waits for the first delta, so that whatever goes wrong before it has a status of its
    own. After that, an error is an event, and the last one.
    """

    def __init__(self, stream: DeltaStream, writer: EventWriter, timeout: float) -> None:
        super().__init__(stream, timeout)
        self._writer = writer
        self._begun = False

    async def _deliver(self, send: Send) -> None:
        try:
            async for deltas in self._stream:
                events = [self._writer.event(delta) for delta in deltas]
                await self._send(send, events[0] if len(events) == 1 else b"".join(events))
            if not self._stream.abandoned:
                await self._send(send, self._writer.tail())
        except Exception as error:
            told = as_api_error(error)
            if not self._begun:
                await send_error(told, send)
                return
            await self._send(send, b"data: " + told.content + b"\n\n")
        if not self._stream.abandoned:
            await send(_part(b"", more=False))

    async def _send(self, send: Send, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            await send(
                {"type": "http.response.start", "status": 200, "headers": list(_EVENT_HEADERS)}
            )
        if data:
            await send(_part(data, more=True))


def _part(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


class BodyDelivery(Delivery):
    """One JSON body, when everything is there."""

    def __init__(self, stream: DeltaStream, writer: BodyWriter, timeout: float) -> None:
        super().__init__(stream, timeout)
        self._writer = writer

    async def _deliver(self, send: Send) -> None:
        try:
            async for deltas in self._stream:
                for delta in deltas:
                    self._writer.add(delta)
            if self._stream.abandoned:
                return
            body = self._writer.encode()
        except Exception as error:
            await send_error(as_api_error(error), send)
            return
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send(_part(body, more=False))
