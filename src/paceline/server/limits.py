"""What bounds a request: the size of its body, the time it may take, and its place in the queue.

Knows HTTP and the numbers in flight; nothing of bodies' contents.
"""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request
from starlette.types import Send

from paceline.server.errors import APIError, unavailable

_BODY_TIMEOUT_S = 60.0  # a body that trickles in may not hold a connection for ever
_LAST_BODIES_S = 1.0  # nor a server that ends


class BodyReader:
    """Reads the bodies of a server's requests; used from its event loop.

    max_bytes: of one.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._under_way: set[asyncio.Timeout] = set()
        self._draining = False

    async def read(self, request: Request) -> bytes:
        """The whole body. Raises APIError: 413 if too large, 408 or 503 if it does not come."""
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and len(announced) < 20 and int(announced) > self._max_bytes:
            raise _too_large(self._max_bytes)
        limit = asyncio.timeout(_BODY_TIMEOUT_S)
        self._under_way.add(limit)
        try:
            async with limit:
                return await self._join(request)
        except TimeoutError:
            if self._draining:
                raise unavailable("the server is shutting down", "shutting_down") from None
            raise APIError(
                408, f"the body did not come within {_BODY_TIMEOUT_S:.0f} s", code="body_timeout"
            ) from None
        except ClientDisconnect:
            raise APIError(400, "the client left before its body had come") from None
        finally:
            self._under_way.discard(limit)

    async def _join(self, request: Request) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self._max_bytes:
                raise _too_large(self._max_bytes)
            parts.append(part)
        return b"".join(parts)

    def drain(self) -> None:
        """The server ends: bodies that are under way have a moment to come."""
        self._draining = True
        end = asyncio.get_running_loop().time() + _LAST_BODIES_S
        for limit in self._under_way:
            limit.reschedule(end)


def _too_large(max_bytes: int) -> APIError:
    return APIError(
        413,
        f"the body is above {max_bytes} bytes. hint: send less, or start the server with a larger "
        "`--max-body-size`",
        code="body_too_large",
    )


def check_room(wanted: int, in_flight: int, max_running: int, max_queue: int) -> None:
    """Raise APIError unless ``wanted`` more outputs may join ``in_flight`` ones.

    max_running: outputs that the engine computes at a time; max_queue: how many may wait.
    """
    limit = max_running + max_queue
    if wanted > limit:
        raise APIError(
            400,
            f"the request asks for {wanted} outputs (prompts times `n`), but the server holds at "
            f"most {limit} (max_num_seqs {max_running} and max_queue {max_queue}). hint: send "
            "several requests",
            code="too_many_outputs",
        )
    if in_flight + wanted > limit:
        raise APIError(
            429,
            f"the server is full: {in_flight} outputs in flight of {limit} (max_num_seqs "
            f"{max_running} and max_queue {max_queue}). hint: try again later",
            code="queue_full",
            retry_after=1,
        )


async def send_error(error: APIError, send: Send) -> None:
    """Answer with an error, from anywhere that has no response to return."""
    content = error.content
    headers = {
        "content-type": "application/json",
        "content-length": str(len(content)),
        **error.headers,
    }
    await send(
        {
            "type": "http.response.start",
            "status": error.status,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
    )
    await send({"type": "http.response.body", "body": content})
