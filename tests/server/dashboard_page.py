"""For tests of the dashboard's page: a document as the server sends it, and a server that sends it.

The server has the real files with their real headers; the test says what the data is.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from paceline.server.dashboard import pages

_BLANK = b'<!doctype html><link rel="icon" href="data:,">'  # without asking for a favicon
REASONS = [
    *("fixed", "disabled by batch size", "token budget", "free blocks"),
    *("end of sequence", "drafter context", "catch-up", "no drafter"),
]


def document(seconds: int = 90, **changes: Any) -> dict[str, Any]:
    """What the server says after so many seconds of even load. changes: of the topmost fields."""
    now = time.time()
    engine = {
        "version": "0.1.0",
        "model": "someone/model",
        "drafter": "someone/drafter",
        "num_speculative_tokens": 5,
        "dtype": "bfloat16",
        "device": "cuda",
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "max_model_len": 32768,
        "num_blocks": 1234,
        "block_size": 16,
    }
    return {
        "now": now,
        "uptime_s": 7391.5,
        "status": "ok",
        "alive": True,
        "engine": engine,
        "samples": [sample(now - seconds + i + 1) for i in range(seconds)],
        "positions": [
            {"position": 1, "proposed": 1000, "accepted": 820},
            {"position": 2, "proposed": 500, "accepted": 250},
        ],
        "requests": [request(i, now) for i in range(3)],
        **changes,
    }


def sample(moment: float, **changes: Any) -> dict[str, Any]:
    """One second. changes: of its fields."""
    return {
        "t": moment,
        "prompt_tokens": 345.6,
        "generation_tokens": 1234.5,
        "steps": 31.4,
        "batched_tokens": 2048.0,
        "running": 48,
        "waiting": 7,
        "kv_use": 0.625,
        "preemptions": 0,
        "prefix_hit_rate": 0.875,
        "ttft": [0.0612, 0.183, 1.27],
        "itl": [0.0213, 0.0345, 0.0789],
        "queue": [0.0004, 0.0123, 0.456],
        "drafted": 2000.0,
        "accepted": 1300.0,
        "k": {"5": 75, "1": 25},
        "reasons": {"fixed": 75, "end of sequence": 25},
        **changes,
    }


IDLE = {
    **dict.fromkeys(
        ("prompt_tokens", "generation_tokens", "steps", "batched_tokens", "kv_use"), 0.0
    ),
    **dict.fromkeys(("running", "waiting"), 0),
    "prefix_hit_rate": None,
    "k": {},
    "reasons": {},
}


def request(i: int, now: float) -> dict[str, Any]:
    """The i-th of the requests that ended last; the third was aborted before its first token."""
    ran = i < 2
    return {
        "id": f"chatcmpl-{i:032x}",
        "kind": "chat",
        "finished": now - i,
        "status": ("stop", "length", "abort")[i],
        "prompt_tokens": 5237,
        "cached_tokens": 2608,
        "output_tokens": 393 if ran else 0,
        "queue_s": 0.00177 if ran else None,
        "ttft_s": 0.174 if ran else None,
        "total_s": 14.3,
        "tokens_per_s": 61.6 if ran else None,
        "acceptance": 0.51 if ran else None,
        "mean_k": 2.8 if ran else None,
    }


class PageServer:
    """Serves the page under a prefix, as a proxy would; a context manager.

    data: what is sent, None for an answer without. status: of that answer. key: if any, which the
    data needs. asked: how often data was asked for.
    """

    prefix = "/behind/a/proxy"

    def __init__(self) -> None:
        self.data: dict[str, Any] | None = document()
        self.status = 200
        self.key: str | None = None
        self.asked = 0
        self._pages = {path: asyncio.run(page()) for path, page in pages().items()}
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}{self.prefix}/dashboard"

    def __enter__(self) -> PageServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(20)

    def answer(self, path: str, authorization: str | None) -> tuple[int, dict[str, str], bytes]:
        if path == "/dashboard/data":
            self.asked += 1
            if self.key is not None and authorization != f"Bearer {self.key}":
                return 401, {}, b"{}"
            if self.data is None:
                return self.status, {}, b"{}"
            return 200, {"content-type": "application/json"}, json.dumps(self.data).encode()
        if path == "/blank":
            return 200, {"content-type": "text/html"}, _BLANK
        page = self._pages.get(path)
        if page is None:
            return 404, {}, b"nothing here"
        return page.status_code, dict(page.headers), bytes(page.body)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.removeprefix(server.prefix)
                status, headers, body = server.answer(path, self.headers.get("authorization"))
                self.send_response(status)
                for name, value in (headers | {"content-length": str(len(body))}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler
