"""API keys: a request without one of them is answered with 401 before anything of it is read.

Keys are kept and compared as digests, all of them every time, so that the time an answer takes
tells nothing about them. They are never logged. Knows ASGI, no routes.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.server.dashboard import PATHS
from paceline.server.errors import APIError
from paceline.server.limits import send_error

# For load balancers, probes and scrapers, and what browsers show. The dashboard's page asks for a
# key where there are any; its data needs one.
OPEN_PATHS = frozenset(
    {"/health", "/ping", "/version", "/metrics", "/docs", "/redoc", "/openapi.json", *PATHS}
)


class ApiKeys:
    """The keys of a server."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode("utf-8", "surrogateescape")) for key in keys]

    def accept(self, authorization: bytes | None) -> bool:
        """Whether the ``Authorization`` header has one of the keys, in UTF-8 as clients send it."""
        scheme, _, key = (authorization or b"").partition(b" ")
        given = _digest(key.strip())
        # No early end: the time must not depend on which key matches.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches) and scheme.lower() == b"bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def own_path(scope: Scope) -> str:
    """The path as the server's routes have it: a proxy may leave its own prefix or take it off."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class RequireKey:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and own_path(scope) not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization")
            if not self._keys.accept(given):
                problem = "wrong API key" if given else "no API key"
                error = APIError(
                    401,
                    f"{problem}. hint: send the header `Authorization: Bearer KEY`; the OpenAI "
                    "client does with `api_key=`",
                    code="invalid_api_key",
                )
                await send_error(error, send)
                return
        await self._app(scope, receive, send)
