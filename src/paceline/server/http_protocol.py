# mypy: disable-error-code="import-untyped"
"""uvicorn's HTTP protocol with limits on what comes before a request's body.

Without them, whoever reaches the port holds memory and connections before any key is checked.
Offers to change the protocol are passed over, as RFC 9110 (7.8) allows: some clients, Java's among
them, offer HTTP/2 with every first request.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.server.errors import APIError

MAX_HEAD_BYTES = 64 * 1024  # of a request line and headers
_END_OF_HEAD = b"\r\n\r\n"
HEAD_TIMEOUT_S = 30.0  # from a connection, or a request's first byte, to the end of its headers


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. Heads that are too long or too slow, or no HTTP, get an error and its end."""

    parser: Any
    headers: list[tuple[bytes, bytes]]

    _head_bytes = 0
    _head_tail = b""  # the blank line at its end may come in parts
    _in_head = True  # from the end of one request to the end of the next one's headers
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._in_head:
            known = self._head_tail + data
            end = known.find(_END_OF_HEAD)
            self._head_bytes += (len(known) if end < 0 else end) - len(self._head_tail)
            self._head_tail = known[1 - len(_END_OF_HEAD) :]
            if self._head_bytes > MAX_HEAD_BYTES:
                text = (
                    f"the request's first line and headers are above {MAX_HEAD_BYTES} bytes. "
                    "hint: send less"
                )
                return self._refuse(APIError(431, text, code="headers_too_large"))
        while data and not self.transport.is_closing():
            try:
                self.parser.feed_data(data)
                if self._head_timer is not None and not self._head_bytes:
                    # The next request has begun, behind a body: how much of this is its head?
                    self._head_bytes, self._head_tail = 1, data[1 - len(_END_OF_HEAD) :]
                return
            except httptools.HttpParserError:
                self.send_400_response("")
            except httptools.HttpParserUpgrade as stopped:  # behind the head
                if self.parser.get_method() == b"CONNECT":
                    return self.send_400_response("")
                data = self._head_without_upgrade() + data[stopped.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's

    def _head_without_upgrade(self) -> bytes:
        """The head that the parser stopped at, for another one to go on with its body."""
        version = self.parser.get_http_version().encode()
        lines = [b" ".join((self.parser.get_method(), self.url, b"HTTP/" + version))]
        lines += [b": ".join(header) for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:  # the next request of a connection
            self._expect_head()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():  # comes again, without the offer
            return
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self._in_head, self._head_bytes, self._head_tail = True, 0, b""

    def send_400_response(self, msg: str) -> None:
        """In place of uvicorn's, which is plain text."""
        self._refuse(APIError(400, "this is no HTTP request. hint: see the server's /docs"))

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        if self._head_bytes:
            text = f"the headers did not come within {HEAD_TIMEOUT_S:g} s"
            self._refuse(APIError(408, text, code="header_timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: APIError) -> None:
        self._stop_timer()
        headers: dict[str, Any] = {
            "content-type": "application/json",
            "content-length": len(error.content),
            "connection": "close",
        }
        lines = [f"HTTP/1.1 {error.status} ", *(f"{k}: {v}" for k, v in headers.items()), "", ""]
        self.transport.write("\r\n".join(lines).encode() + error.content)
        self.transport.close()
