"""The web application: routes, middleware, errors and its own description, around an ``Api``.

Knows the framework and nothing else does.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline import __version__
from paceline.errors import PacelineError
from paceline.server.auth import ApiKeys, RequireKey, own_path
from paceline.server.dashboard import pages
from paceline.server.errors import APIError, as_api_error
from paceline.server.observer import Observer
from paceline.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from paceline.server.routes import Api

_BODIES = (ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
_SCHEMA = "#/components/schemas/"
_TEXT_ONLY = "this server takes and gives text only"
_ONE_CALL = "use `/v1/chat/completions`, with the whole conversation in `messages`"
# Paths of OpenAI's and of vLLM's servers that are not here.
_INSTEAD = {
    "/classify": _TEXT_ONLY,
    "/generate": "use `/v1/completions`",
    "/inference/v1/generate": "use `/v1/completions`, whose `prompt` may be token ids",
    "/invocations": "use `/v1/completions` or `/v1/chat/completions`",
    "/pooling": _TEXT_ONLY,
    "/rerank": _TEXT_ONLY,
    "/score": _TEXT_ONLY,
    "/v1/audio/speech": _TEXT_ONLY,
    "/v1/audio/transcriptions": _TEXT_ONLY,
    "/v1/audio/translations": _TEXT_ONLY,
    "/v1/batches": "send the requests one by one; the server batches them",
    "/v1/embeddings": _TEXT_ONLY,
    "/v1/files": _TEXT_ONLY,
    "/v1/images/generations": _TEXT_ONLY,
    "/v1/messages": _ONE_CALL,
    "/v1/moderations": _TEXT_ONLY,
    "/v1/rerank": _TEXT_ONLY,
    "/v1/responses": _ONE_CALL,
    "/v1/score": _TEXT_ONLY,
    "/v2/rerank": _TEXT_ONLY,
}
_ERROR_SCHEMA = {
    "title": "Error",
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def make_app(api: Api, api_keys: tuple[str, ...] = ()) -> FastAPI:
    """The ASGI application. api_keys: of which clients must send one, unless there are none."""
    settings = api.settings
    app = FastAPI(
        title="Paceline",
        version=__version__,
        openapi_url=None if settings.disable_fastapi_docs else "/openapi.json",
    )
    app.root_path = settings.root_path  # the argument of this name is deprecated
    _add_routes(app, api)
    app.add_exception_handler(PacelineError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_fault)
    if api_keys:
        app.add_middleware(RequireKey, keys=ApiKeys(api_keys))
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
    app.add_middleware(CountResponses, observer=api.observer, paths=paths)  # outermost: sees all
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _add_routes(app: FastAPI, api: Api) -> None:
    errors: dict[int | str, dict[str, Any]] = {
        status: {
            "description": "an error in OpenAI's form",
            "content": {"application/json": {"schema": {"$ref": f"{_SCHEMA}Error"}}},
        }
        for status in ("4XX", "5XX")
    }
    streamed: dict[int | str, dict[str, Any]] = {
        200: {
            "description": "the answer; events if `stream` is set",
            "content": {"text/event-stream": {}},
        },
        **errors,
    }
    for path, endpoint, body, responses in (
        ("/v1/chat/completions", api.chat, ChatCompletionRequest, streamed),
        ("/v1/completions", api.completions, CompletionRequest, streamed),
        ("/tokenize", api.tokenize, TokenizeRequest, errors),
        ("/detokenize", api.detokenize, DetokenizeRequest, errors),
    ):
        schema = {"$ref": _SCHEMA + body.__name__}
        content = {"required": True, "content": {"application/json": {"schema": schema}}}
        app.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            responses=responses,
            openapi_extra={"requestBody": content},
        )
    for path, getter in (
        ("/v1/models", api.models),
        ("/v1/models/{name:path}", api.model),
        ("/health", api.health),
        ("/version", api.version),
        ("/dashboard/data", api.dashboard_data),
    ):
        app.add_api_route(path, getter, methods=["GET"], responses=errors)
    app.add_api_route("/metrics", api.prometheus, methods=["GET"], response_class=PlainTextResponse)
    for method in ("GET", "POST"):
        app.add_api_route("/ping", api.ping, methods=[method], response_class=Response)
    for path, page in pages().items():
        app.add_api_route(path, page, methods=["GET"], include_in_schema=False)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description, with the bodies, which are read by hand."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        template = _SCHEMA + "{model}"
        _, bodies = models_json_schema(
            [(body, "validation") for body in _BODIES], ref_template=template
        )
        known = schema.setdefault("components", {}).setdefault("schemas", {})
        known |= {**bodies["$defs"], "Error": _ERROR_SCHEMA}
        app.openapi_schema = schema
    return app.openapi_schema


class CountResponses:
    """ASGI middleware: tells the observer of every response's route and status.

    paths: of all routes. A request that was refused before it was routed counts for the route whose
    path it names.
    """

    def __init__(self, app: ASGIApp, observer: Observer, paths: frozenset[str]) -> None:
        self._app = app
        self._observer = observer
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = own_path(scope)
                named = path if path in self._paths else "other"
                route = getattr(scope.get("route"), "path", named)
                self._observer.responses[str(route), message["status"]] += 1
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)


# ---- errors --------------------------------------------------------------------------------------


async def _on_error(_: Request, error: Exception) -> Response:
    return _response(as_api_error(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    """What the framework itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path = own_path(request.scope)
    instead = _INSTEAD.get(path) if error.status_code == 404 else None
    hint = instead or "see docs/server.md for the paths"
    message = f"{request.method} {path[:200]}: {error.detail}. hint: {hint}"
    told = APIError(error.status_code, message, code="unsupported" if instead else None)
    return _response(told, dict(error.headers or {}))


async def _on_fault(_: Request, error: Exception) -> Response:
    """A fault of ours; the server logs where it happened."""
    return _response(
        APIError(
            500,
            f"the server failed on this request ({type(error).__name__}). hint: its log has the "
            "details; please report it",
            code="internal_error",
        )
    )


def _response(error: APIError, headers: dict[str, str] | None = None) -> Response:
    return Response(
        error.content,
        error.status,
        {**(headers or {}), **error.headers},
        media_type="application/json",
    )
