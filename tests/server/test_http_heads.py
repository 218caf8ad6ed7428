"""What comes before a body: heads that are too long, too slow or no HTTP, on real sockets."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.server import http_protocol
from server.serving import RunningServer, wait_for

BODY = json.dumps({"prompt": "a", "max_tokens": 1}).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer() as running:
        yield running


@pytest.fixture
def raw(server: RunningServer) -> Iterator[socket.socket]:
    port = int(server.url.rsplit(":", 1)[1].split("/")[0])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        yield connection


def answer(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and error of an answer after which the connection is closed."""
    data = b""
    while part := connection.recv(65536):
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    error: dict[str, Any] = json.loads(body)["error"]
    return int(head.split()[1]), error


def test_a_head_without_an_end_is_refused(raw: socket.socket) -> None:
    raw.sendall(b"GET /health HTTP/1.1\r\nx: ")
    with pytest.raises((BrokenPipeError, ConnectionResetError)):  # noqa: PT012 (at some point)
        for _ in range(64):
            raw.sendall(b"y" * 65536)
            time.sleep(0.005)


def test_a_long_head_gets_an_answer(raw: socket.socket) -> None:
    raw.sendall(b"GET /health HTTP/1.1\r\nx: " + b"y" * http_protocol.MAX_HEAD_BYTES)
    status, error = answer(raw)
    assert status == 431
    assert error["code"] == "headers_too_large"
    assert "65536 bytes" in error["message"]


def test_a_head_that_does_not_come_ends_the_connection(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
    port = int(server.url.rsplit(":", 1)[1].split("/")[0])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as silent,
        socket.create_connection(("127.0.0.1", port), timeout=20) as slow,
    ):
        slow.sendall(b"GET /health HTT")
        assert answer(slow)[0] == 408
        assert silent.recv(1) == b""


def test_a_slow_body_and_later_heads_have_their_own_time(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.3)
    port = int(server.url.rsplit(":", 1)[1].split("/")[0])
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    head += b"content-length: %d\r\n\r\n" % len(BODY)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        for _ in range(2):
            connection.sendall(head + BODY[:5])
            time.sleep(0.6)
            connection.sendall(BODY[5:])
            data = b""
            while not data.endswith(b"}}}"):
                data += connection.recv(65536)
            assert data.startswith(b"HTTP/1.1 200")
        connection.sendall(head[:20])
        assert answer(connection)[0] == 408
    wait_for(server.is_idle)


def test_what_is_no_http_gets_an_error_in_json(raw: socket.socket) -> None:
    raw.sendall(b"hello there\r\n\r\n")
    status, error = answer(raw)
    assert status == 400
    assert "no HTTP request" in error["message"]


def test_a_long_first_line_gets_the_same_answer(raw: socket.socket) -> None:
    raw.sendall(b"GET /v1/models/" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n")
    assert answer(raw)[0] == 431


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
@pytest.mark.parametrize("before", [0, 1], ids=["first", "second"])
def test_a_large_body_is_no_part_of_a_head_that_ends_in_two_pieces(
    raw: socket.socket, cut: int, before: int
) -> None:
    body = json.dumps({"prompt": "a" * 200_000}).encode()
    head = b"POST /detokenize HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
    for _ in range(before):
        raw.sendall(b"GET /ping HTTP/1.1\r\nhost: a\r\n\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")
    raw.sendall(head[:-cut])
    time.sleep(0.1)
    raw.sendall(head[-cut:] + body)
    assert raw.recv(65536).startswith(b"HTTP/1.1 400")  # it has no tokens


def test_a_head_that_begins_behind_a_large_body(raw: socket.socket) -> None:
    body = json.dumps({"prompt": "a" * 120_000}).encode()
    head = b"POST /detokenize HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
    following = b"GET /ping HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    raw.sendall(head + body + following[:10])
    time.sleep(0.2)
    raw.sendall(following[10:])
    data = b""
    while part := raw.recv(65536):
        data += part
    assert b"HTTP/1.1 200" in data


def test_a_later_head_has_the_same_limit(raw: socket.socket) -> None:
    raw.sendall(b"GET /ping HTTP/1.1\r\nhost: a\r\n\r\n")
    assert raw.recv(65536).startswith(b"HTTP/1.1 200")
    raw.sendall(b"GET /ping HTTP/1.1\r\nx: " + b"y" * http_protocol.MAX_HEAD_BYTES + b"\r\n\r\n")
    assert answer(raw)[0] == 431


@pytest.mark.parametrize("offer", [b"h2c", b"websocket"])
@pytest.mark.parametrize("pieces", [1, 3])
def test_an_offer_of_another_protocol_is_passed_over(
    raw: socket.socket, offer: bytes, pieces: int
) -> None:
    """Java's HttpClient offers HTTP/2 unless told not to; twice, as connections are kept."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
    head += b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: " + offer + b"\r\n"
    head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BODY)
    request = head + BODY
    size = -(-len(request) // pieces)
    for _ in range(2):
        for start in range(0, len(request), size):
            raw.sendall(request[start : start + size])
            time.sleep(0.05)
        data = b""
        while not data.endswith(b"}}}"):
            data += raw.recv(65536)
        assert data.startswith(b"HTTP/1.1 200")


def test_an_offer_without_a_body(raw: socket.socket) -> None:
    raw.sendall(
        b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    )
    assert raw.recv(65536).startswith(b"HTTP/1.1 200")


def test_data_behind_a_last_request_is_passed_over_with_and_without_an_offer(
    server: RunningServer,
) -> None:
    port = int(server.url.rsplit(":", 1)[1].split("/")[0])
    for offer in (b"connection: close\r\n", b"connection: close, upgrade\r\nupgrade: h2c\r\n"):
        request = b"GET /ping HTTP/1.1\r\nhost: a\r\n" + offer + b"\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(request + request)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_tunnels_are_refused(raw: socket.socket) -> None:
    raw.sendall(b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org\r\n\r\n")
    assert answer(raw)[0] == 400
