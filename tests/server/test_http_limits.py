"""HTTP without an engine: keys, limits, timeouts, disconnects, states. A stub stands in for it.

Requests go through the application itself, so everything but sockets is real.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from paceline.server import limits
from paceline.server.app import make_app
from paceline.server.auth import ApiKeys
from paceline.server.errors import unavailable
from server.serving import StubClient, delta, stub_api

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
TEXT = {"prompt": "hi", "max_tokens": 5}


@asynccontextmanager
async def application(
    client: StubClient, keys: tuple[str, ...] = (), **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    app = make_app(stub_api(client, **settings), keys)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield http


async def submitted(client: StubClient, count: int = 1) -> None:
    """Until the application has sent that many requests to the engine."""
    while len(client.streams) < count:
        await asyncio.sleep(0.001)


def finish(client: StubClient, text: str = "ok") -> None:
    """Let the engine answer all requests."""
    for request in client.requests:
        for stream in client.streams:
            stream.put(delta(request.request_id, text, "stop"))


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# ---- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "one"}, 401),
        ({"authorization": "Basic one"}, 401),
        ({"authorization": "Bearer onetwo"}, 401),
        ({"authorization": "Bearer one"}, 200),
        ({"authorization": "bearer two"}, 200),
        ({"authorization": "Bearer drei µ".encode()}, 200),
        ({"authorization": "Bearer drei µ".encode("latin-1")}, 401),
    ],
)
def test_one_of_the_keys_opens(header: dict[str, str | bytes], status: int) -> None:
    async def main() -> None:
        async with application(StubClient(), ("one", "two", "drei µ")) as http:
            response = await http.get("/v1/models", headers=header)
            assert response.status_code == status
            if status == 401:
                assert error_of(response)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
                assert "one" not in response.text.replace("no API key", "")
            assert (await http.get("/health")).status_code == 200
            assert (await http.post("/tokenize", json=TEXT)).status_code == 401

    asyncio.run(main())


def test_what_needs_no_key_needs_none_below_a_path() -> None:
    async def main() -> None:
        async with application(StubClient(), ("one",), root_path="/llm") as http:
            for path, status in (
                ("/llm/health", 200),
                ("/health", 200),
                ("/llm/openapi.json", 200),
                ("/llm/v1/models", 401),
                ("/v1/models", 401),
                ("/llm", 401),
                ("/llm/llm/health", 401),
            ):
                assert (await http.get(path)).status_code == status

    asyncio.run(main())


def test_keys_are_compared_in_full_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def spy(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr("paceline.server.auth.hmac.compare_digest", spy)
    keys = ApiKeys(["one", "a much longer key", "three"])
    for header in (b"Bearer one", b"Bearer three", b"Bearer nothing", None, b"Bearer \xff"):
        compared.clear()
        keys.accept(header)
        assert compared == [(32, 32)] * 3


# ---- bodies --------------------------------------------------------------------------------------


def test_bodies_above_the_limit_are_refused() -> None:
    async def main() -> None:
        client = StubClient()
        async with application(client, max_body_size=1000) as http:
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                announced = await http.post(path, content=b"x" * 1001)
                assert announced.status_code == 413
                assert "above 1000 bytes" in error_of(announced)["message"]
                assert "hint:" in error_of(announced)["message"]

                async def parts() -> AsyncIterator[bytes]:
                    for _ in range(20):
                        yield b"x" * 100

                chunked = await http.post(path, content=parts())
                assert chunked.status_code == 413
            fits = await http.post("/tokenize", content=json.dumps({"prompt": "x" * 900}).encode())
            assert fits.status_code == 200
        assert client.streams == []

    asyncio.run(main())


def test_a_body_that_does_not_come_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_BODY_TIMEOUT_S", 0.05)

    async def main() -> None:
        async with application(StubClient()) as http:

            async def trickle() -> AsyncIterator[bytes]:
                yield b"{"
                await asyncio.sleep(1.0)
                yield b"}"

            response = await http.post("/v1/completions", content=trickle())
            assert response.status_code == 408
            assert error_of(response)["code"] == "body_timeout"

    asyncio.run(main())


def test_a_server_that_ends_does_not_wait_for_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_LAST_BODIES_S", 0.05)

    async def main() -> None:
        api = stub_api(StubClient())
        transport = httpx.ASGITransport(make_app(api))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:

            async def trickle() -> AsyncIterator[bytes]:
                yield b"{"
                api.drain()
                await asyncio.sleep(5.0)

            start = time.monotonic()
            response = await http.post("/v1/completions", content=trickle())
            assert time.monotonic() - start < 2.0
            assert response.status_code == 503
            assert error_of(response)["code"] == "shutting_down"
            response = await http.post("/v1/completions", json=TEXT)
            assert error_of(response)["code"] == "shutting_down"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/embeddings", "this server takes and gives text only"),
        ("/v1/responses", "use `/v1/chat/completions`"),
        ("/llm/v1/messages", "use `/v1/chat/completions`"),
        ("/nothing", "see docs/server.md"),
    ],
)
def test_paths_that_are_not_here(path: str, hint: str) -> None:
    async def main() -> None:
        async with application(StubClient(), root_path="/llm") as http:
            for response in (await http.get(path), await http.post(path, json={})):
                assert response.status_code == 404
                assert hint in error_of(response)["message"]

    asyncio.run(main())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"{" * 100_000,
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": NaN}',
        b'{"prompt": ' + b"1" * 6000 + b"}",
        b'{"prompt": [' + b"[" * 5000 + b"]" * 5000 + b"]}",
        b'{"\\ud800": 1, "prompt": "x"}',
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_what_is_no_body_is_a_400(path: str, content: bytes) -> None:
    async def main() -> None:
        client = StubClient()
        async with application(client) as http:
            response = await http.post(path, content=content)
            assert response.status_code == 400
            assert error_of(response)["type"] == "invalid_request_error"
        assert client.streams == []

    asyncio.run(main())


def test_unknown_models_paths_and_methods() -> None:
    async def main() -> None:
        client = StubClient()
        async with application(client) as http:
            for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
                response = await http.post(path, json={**body, "model": "other"})
                assert response.status_code == 404
                error = error_of(response)
                assert (error["code"], error["param"]) == ("model_not_found", "model")
                assert "paceline/demo, alias" in error["message"]
            assert error_of(await http.get("/v1/models/nobody"))["code"] == "model_not_found"
            assert (await http.get("/v1/models/paceline/demo")).json()["max_model_len"] == 512
            assert (await http.get("/nothing")).status_code == 404
            assert (await http.get("/v1/completions")).status_code == 405
            assert error_of(await http.get("/nothing"))["type"] == "not_found_error"
        assert client.streams == []

    asyncio.run(main())


# ---- the queue -----------------------------------------------------------------------------------


def test_beyond_the_queue_clients_are_told_to_wait() -> None:
    async def main() -> None:
        client = StubClient(max_num_seqs=4)
        async with application(client, max_queue=2) as http:
            client.num_in_flight = 5
            more = {**TEXT, "n": 2, "temperature": 1.0}
            response = await http.post("/v1/completions", json=more)
            assert response.status_code == 429
            assert response.headers["retry-after"] == "1"
            error = error_of(response)
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert "5 outputs in flight of 6" in error["message"]
            assert client.streams == []
            answering = asyncio.create_task(http.post("/v1/completions", json=TEXT))
            await submitted(client)
            finish(client)
            assert (await answering).status_code == 200
            client.num_in_flight = 6
            assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 429

    asyncio.run(main())


def test_what_could_never_fit_is_refused_for_good() -> None:
    async def main() -> None:
        async with application(StubClient(max_num_seqs=4), max_queue=2) as http:
            body = {"prompt": ["a", "b", "c"], "n": 3, "max_tokens": 5}
            response = await http.post("/v1/completions", json=body)
            assert response.status_code == 400
            assert "asks for 9 outputs" in error_of(response)["message"]
            body = {"prompt": ["a"] * 7, "max_tokens": -1}  # its prompts are counted first
            response = await http.post("/v1/completions", json=body)
            assert "asks for 7 outputs" in error_of(response)["message"]

    asyncio.run(main())


# ---- while it is served --------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_ended(stream: bool) -> None:
    async def main() -> None:
        client = StubClient()
        async with application(client, request_timeout=0.05) as http:
            response = await http.post("/v1/completions", json={**TEXT, "stream": stream})
            assert response.status_code == 503
            assert error_of(response)["code"] == "request_timeout"
            assert client.aborted == [client.requests[0].request_id]

    asyncio.run(main())


def test_an_error_after_the_first_event_is_the_last_event() -> None:
    async def main() -> None:
        client = StubClient()
        async with application(client) as http:
            request = http.post("/v1/chat/completions", json={**CHAT, "stream": True})
            answering = asyncio.create_task(request)
            await submitted(client)
            name = client.requests[0].request_id
            client.streams[0].put(delta(name, "begun"))
            await asyncio.sleep(0.01)
            client.streams[0].fail(unavailable("the engine has died", "engine_dead"))
            response = await answering
            assert response.status_code == 200
            events = [line for line in response.text.split("\n\n") if line]
            assert "begun" in events[0]
            last = json.loads(events[-1].removeprefix("data: "))
            assert last["error"]["code"] == "engine_dead"
            assert "[DONE]" not in response.text

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_event_has_its_own_status(stream: bool) -> None:
    async def main() -> None:
        client = StubClient()
        async with application(client) as http:
            request = http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
            answering = asyncio.create_task(request)
            await submitted(client)
            name = client.requests[0].request_id
            client.streams[0].put(delta(name, "", "error", error="wrong", error_status=400))
            response = await answering
            assert response.status_code == 400
            assert error_of(response)["message"] == "wrong"

    asyncio.run(main())


def test_a_fault_of_the_server_is_a_500_without_details() -> None:
    async def main() -> None:
        client = StubClient()
        async with application(client) as http:
            answering = asyncio.create_task(http.post("/v1/completions", json=TEXT))
            await submitted(client)
            broken = delta(client.requests[0].request_id, "x", "stop")
            broken.token_ids = None  # type: ignore[assignment]
            client.streams[0].put(broken)
            response = await answering
            assert response.status_code == 500
            assert error_of(response)["code"] == "internal_error"

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 2])
def test_a_client_that_leaves_ends_its_request(stream: bool, after: int) -> None:
    """The disconnect is told through ASGI's ``receive``, before or between deltas."""

    async def main() -> None:
        client = StubClient()
        app = make_app(stub_api(client))
        body = json.dumps({**TEXT, "stream": stream}).encode()
        left = asyncio.Event()
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            for message in messages:
                return message
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
        }
        serving = asyncio.create_task(app(scope, receive, send))
        await submitted(client)
        name = client.requests[0].request_id
        for _ in range(after):
            client.streams[0].put(delta(name, "x"))
            await asyncio.sleep(0.005)
        left.set()
        await asyncio.wait_for(serving, 2)
        assert client.aborted == [name]

    asyncio.run(main())


# ---- states --------------------------------------------------------------------------------------


def test_health_says_why_nothing_is_served() -> None:
    async def main() -> None:
        client = StubClient()
        async with application(client, engine_stall_timeout=10) as http:
            assert (await http.get("/health")).json()["status"] == "ok"
            assert (await http.get("/ping")).status_code == 200
            client.seconds_silent = 11.0
            response = await http.get("/health")
            assert (response.status_code, response.json()["status"]) == (503, "hanging")
            client.state, client.cause = "dead", "ended by signal 9"
            response = await http.get("/health")
            assert response.status_code == 503
            assert response.json() == {"status": "dead", "cause": "ended by signal 9"}
            assert (await http.get("/ping")).status_code == 503
            refused = await http.post("/v1/completions", json=TEXT)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "5"
            assert (await http.get("/v1/models")).status_code == 200

    asyncio.run(main())


def test_other_web_pages_may_call_only_where_allowed() -> None:
    async def main() -> None:
        origin = {"origin": "https://page.example", "access-control-request-method": "POST"}
        async with application(StubClient()) as http:
            response = await http.options("/v1/completions", headers=origin)
            assert "access-control-allow-origin" not in response.headers
        allowed = {"allowed_origins": ("https://page.example",)}
        async with application(StubClient(), ("key",), **allowed) as http:
            response = await http.options("/v1/completions", headers=origin)
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == "https://page.example"

    asyncio.run(main())


def test_the_description_has_every_body_and_can_be_turned_off() -> None:
    async def main() -> None:
        async with application(StubClient()) as http:
            schema = (await http.get("/openapi.json")).json()
            known = schema["components"]["schemas"]
            references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(schema)))
            assert references
            assert references <= set(known)
            body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]
            assert "ChatCompletionRequest" in json.dumps(body)
            assert (await http.get("/docs")).status_code == 200
        async with application(StubClient(), disable_fastapi_docs=True) as http:
            assert (await http.get("/openapi.json")).status_code == 404

    asyncio.run(main())
