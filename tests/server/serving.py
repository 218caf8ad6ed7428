"""Servers and engines for the tests: real ones in a thread, and stand-ins without an engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

from paceline.config import EngineConfig
from paceline.engine.tokenizer import Tokenizer
from paceline.engine_args import EngineArgs
from paceline.hub import local_directory
from paceline.server.convert import ServingContext
from paceline.server.delta_stream import DeltaStream
from paceline.server.errors import unavailable
from paceline.server.messages import AddRequest, Delta, Ready
from paceline.server.metrics import Metrics
from paceline.server.observer import Observer
from paceline.server.routes import Api
from paceline.server.run import Serving
from paceline.server.settings import ServerSettings

MODEL, DRAFTER = "paceline/demo", "paceline/demo-draft"
MAX_LEN = 512
ENGINE: dict[str, Any] = {
    "model": MODEL,
    "speculative_model": DRAFTER,
    "num_speculative_tokens": 3,
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": MAX_LEN,
    "max_num_seqs": 8,
}


def engine_config(**args: Any) -> EngineConfig:
    return EngineArgs.from_kwargs(**{**ENGINE, **args}).resolve()


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> float:
    """Wait until it holds; the seconds that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"not within {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - began


class RunningServer:
    """A server on a free port, in a thread with an event loop of its own; a context manager."""

    def __init__(self, engine: dict[str, Any] | None = None, **settings: Any) -> None:
        config = engine_config(**(engine or {}))
        settings = {"port": 0, "shutdown_timeout": 5.0, **settings}
        self.serving = Serving(
            config, ServerSettings(**settings), log_stats=False, handle_signals=False
        )
        self.status: int | None = None
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        async def main() -> int:
            self._loop = asyncio.get_running_loop()
            return await self.serving.run()

        try:
            self.status = asyncio.run(main())
        except BaseException as error:
            self._error = error

    def __enter__(self) -> RunningServer:
        self._thread.start()
        wait_for(lambda: self._error or (self.serving.url and self._answers()), 60.0)
        if self._error is not None:
            raise self._error
        return self

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/version").status_code == 200
        except httpx.TransportError:
            return False

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        """As a signal would."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self.serving.stop)

    @property
    def url(self) -> str:
        return self.serving.url

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def is_idle(self) -> bool:
        """Whether nothing runs and every block is free, as the engine itself says."""
        health = self.get("/health").json()
        return (
            health["status"] == "ok"
            and health["num_running"] == health["num_waiting"] == 0
            and health["num_free_blocks"] == health["num_blocks"]
        )


# ---- without an engine ---------------------------------------------------------------------------


class StubClient:
    """Stands for ``EngineClient``: the test says what the engine sends."""

    def __init__(self, max_num_seqs: int = 4) -> None:
        self.state = "ready"
        self.cause = ""
        self.ready = Ready(MAX_LEN, max_num_seqs, 64, 16, 0.0)
        self.stats = None
        self.seconds_silent = 0.1
        self.num_in_flight = 0
        self.requests: list[AddRequest] = []
        self.streams: list[DeltaStream] = []
        self.aborted: list[str] = []

    def submit(self, requests: list[AddRequest]) -> DeltaStream:
        if self.state != "ready":
            raise unavailable(f"the engine is {self.state}")
        stream = DeltaStream({one.request_id: one.sampling.n for one in requests}, self._close)
        self.num_in_flight += sum(one.sampling.n for one in requests)
        self.requests += requests
        self.streams.append(stream)
        return stream

    def _close(self, unfinished: list[str]) -> None:
        self.aborted += unfinished


def stub_api(client: Any, **settings: Any) -> Api:
    path = local_directory(MODEL)
    assert path is not None
    context = ServingContext(Tokenizer.load(path), MODEL, MAX_LEN, 4096)
    observer = Observer()
    metrics = Metrics(observer, MODEL, 512)
    names = (MODEL, "alias")
    return Api(client, context, ServerSettings(**settings), names, MODEL, observer, metrics, {})


def delta(request_id: str, text: str = "", finish: str | None = None, **fields: Any) -> Delta:
    """A delta with one made-up id a character."""
    values: dict[str, Any] = {
        "request_id": request_id,
        "index": 0,
        "text": text,
        "token_ids": [ord(char) for char in text],
        "logprobs": None,
        "finish_reason": finish,
        "stop_reason": None,
        "num_prompt_tokens": 3,
        "num_cached_tokens": 0,
        "prompt_logprobs": None,
        "speculative": None,
        "times": None,
        "error": None,
    }
    return Delta(**{**values, **fields})
