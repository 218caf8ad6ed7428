"""Errors as clients see them: a status and OpenAI's body, made in one place from any exception.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

Knows the tree of ``paceline.errors`` and HTTP statuses; no sockets, no framework.
"""

from __future__ import annotations

import json
import logging
import re
from typing import Any

from paceline.errors import CapacityError, ConfigError, EngineError, PacelineError, RequestError

logger = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable",
}


class APIError(PacelineError):
    """An error with its HTTP status.

    param: the field of the request's body that is wrong. code: a word for programs. retry_after:
    seconds after which to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The JSON value."""
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def content(self) -> bytes:
        """The body as JSON. ASCII only: a message may quote half a surrogate pair."""
        return json.dumps(self.body).encode()

    @property
    def headers(self) -> dict[str, str]:
        """Headers beside the content's own."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


# Fields that the engine's own messages begin with.
_FIELD = re.compile(r"`?(logit_bias|stop_token_ids|logprobs|prompt_logprobs)\b")


def _field_of(message: str) -> str | None:
    named = _FIELD.match(message)
    return None if named is None else named[1]


def unavailable(message: str, code: str = "engine_unavailable", retry_after: int = 5) -> APIError:
    """503: not now, maybe later."""
    return APIError(503, message, code=code, retry_after=retry_after)


def as_api_error(error: BaseException) -> APIError:
    """What a client is told of ``error``; one that nobody raised on purpose is logged."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestError | ConfigError | CapacityError):
        return APIError(400, str(error), param=_field_of(str(error)))
    if isinstance(error, EngineError):
        return APIError(500, str(error), code="engine_error")
    logger.error("a request failed by a fault of the server", exc_info=error)
    return APIError(
        500,
        f"the server failed on this request ({type(error).__name__}). hint: the server's log has "
        "the details; please report it",
        code="internal_error",
    )
