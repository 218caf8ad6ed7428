"""The engine process is killed under load: nobody is left waiting."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from typing import Any

import httpx
import pytest

from paceline.server.engine_handle import EngineHandle
from paceline.server.run import Serving
from paceline.server.settings import ServerSettings
from server.serving import RunningServer, engine_config, wait_for

STREAMS, WHOLE = 64, 16
ENGINE = {"max_num_seqs": 16, "speculative_model": None, "num_speculative_tokens": None}


def body(seed: int, tokens: int = 400) -> dict[str, object]:
    return {"prompt": "def f(", "seed": seed, "max_tokens": tokens, "ignore_eos": True}


async def stream(client: httpx.AsyncClient, seed: int) -> tuple[str, float]:
    """How one stream ended, and when."""
    last = ""
    request = body(seed) | {"stream": True}
    async with client.stream("POST", "/v1/completions", json=request) as response:
        async for line in response.aiter_lines():
            last = line or last
    if response.status_code != 200:
        code = json.loads(last)["error"]["code"]
        return f"{response.status_code} {code}", time.monotonic()
    if last == "data: [DONE]":
        return "result", time.monotonic()
    return "event " + json.loads(last.removeprefix("data: "))["error"]["code"], time.monotonic()


async def whole(client: httpx.AsyncClient, seed: int) -> tuple[str, float]:
    answer = await client.post("/v1/completions", json=body(seed))
    ended = time.monotonic()
    if answer.status_code == 200:
        return "result", ended
    return f"{answer.status_code} {answer.json()['error']['code']}", ended


async def kill_under_load(server: RunningServer) -> tuple[Counter[str], float]:
    """Ends by their kind, and the seconds from the kill to the last of them."""
    pid = server.serving.client.pid
    assert pid is not None
    limits = httpx.Limits(max_connections=STREAMS + WHOLE)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
        requests = [asyncio.create_task(stream(client, i)) for i in range(STREAMS)]
        requests += [asyncio.create_task(whole(client, i)) for i in range(WHOLE)]
        while server.serving.client.num_in_flight < STREAMS + WHOLE:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # some have begun, most wait
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        ends = await asyncio.gather(*requests)
    return Counter(kind for kind, _ in ends), max(moment for _, moment in ends) - killed


def test_everybody_gets_an_error_within_a_second() -> None:
    with RunningServer(ENGINE, restart_engine=True) as server:
        ends, seconds = asyncio.run(kill_under_load(server))
        assert seconds < 1.0
        assert set(ends) <= {"event engine_dead", "503 engine_dead"}
        assert ends["event engine_dead"] >= 1
        assert ends["503 engine_dead"] >= WHOLE
        assert server.serving.client.num_in_flight == 0
        began = time.monotonic()
        refused = server.post("/v1/completions", **body(0, 1))
        assert refused.status_code == 503
        assert time.monotonic() - began < 1.0
        wait_for(server.is_idle, 30.0)
        assert server.post("/v1/completions", **body(0, 4)).status_code == 200


def test_a_start_that_is_given_up_twice_leaves_no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second signal must not cut the cleaning up that the first one began."""
    handles: list[EngineHandle] = []
    start = EngineHandle.start
    settings = ServerSettings(port=0)
    serving = Serving(engine_config(), settings, log_stats=False, handle_signals=False)

    async def remembered(*args: Any) -> EngineHandle:
        handles.append(await start(*args))
        return handles[-1]

    async def main() -> int:
        run = asyncio.create_task(serving.run())
        while not handles:
            await asyncio.sleep(0.01)
        serving.stop()
        for _ in range(3):  # until the process is being waited for
            await asyncio.sleep(0)
        serving.stop()
        return await run

    monkeypatch.setattr(EngineHandle, "start", remembered)
    assert asyncio.run(main()) == 130
    assert not handles[0]._directory.exists()


def test_a_start_that_is_given_up_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    processes: list[asyncio.subprocess.Process] = []
    spawn = asyncio.create_subprocess_exec

    async def slowly(*args: str, **options: Any) -> asyncio.subprocess.Process:
        processes.append(await spawn(*args, **options))
        await asyncio.sleep(0.1)
        return processes[-1]

    async def main() -> None:
        start = asyncio.create_task(EngineHandle.start(lambda _: None, lambda _: None))
        while not processes:
            await asyncio.sleep(0)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slowly)
    asyncio.run(main())
    assert processes[0].returncode == -signal.SIGKILL
