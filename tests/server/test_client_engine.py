"""``EngineClient`` and a real engine process: start, service, death, restart, end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from model_dirs import write_model
from paceline.errors import ConfigError, EngineError
from paceline.sampling_params import SamplingParams
from paceline.server import engine_client
from paceline.server.engine_client import EngineClient
from paceline.server.errors import APIError
from paceline.server.messages import AddRequest
from paceline.server.observer import Observer
from server.serving import engine_config, wait_for

PROMPT = [10, 20, 30, 40]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=480, ignore_eos=True, seed=1)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def with_client(use: Callable[[EngineClient], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        client = EngineClient(engine_config(), Observer(), log_stats=False, **options)
        await client.start()
        try:
            await asyncio.wait_for(use(client), 60)
        finally:
            await client.stop()
            assert client.pid is None

    asyncio.run(main())


async def text_of(client: EngineClient, name: str, sampling: SamplingParams = GREEDY) -> str:
    stream = client.submit([AddRequest(name, PROMPT, sampling)])
    return "".join([one.text async for deltas in stream for one in deltas])


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A process that has ended stays listed until its parent, or the system, takes note.
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_requests_aborts_and_an_orderly_end(tmp_path: Path) -> None:
    async def use(client: EngineClient) -> None:
        pid = client.pid
        assert pid is not None
        alone = await text_of(client, "alone")
        together = [text_of(client, str(i)) for i in range(5)]
        assert await asyncio.gather(*together) == [alone] * 5
        assert client.num_in_flight == 0

        left = client.submit(
            [AddRequest("left", PROMPT, ENDLESS), AddRequest("too", PROMPT, ENDLESS)]
        )
        await left.__anext__()
        assert client.num_in_flight == 2
        await until(lambda: client.stats is not None and client.stats.num_running == 2)
        left.close()
        assert client.num_in_flight == 0

        def freed() -> bool:
            stats = client.stats
            assert stats is not None
            return stats.num_running == 0 and stats.num_free_blocks == stats.num_blocks

        await until(freed)
        assert await text_of(client, "after") == alone
        await client.stop()
        assert not is_running(pid)
        with pytest.raises(APIError, match="shutting down"):
            client.submit([AddRequest("late", PROMPT, GREEDY)])

    with_client(use)
    assert list(tmp_path.iterdir()) == []  # no sockets left behind


def test_a_killed_engine_ends_all_streams_at_once_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_client, "_RESTART_DELAY_S", 0.2)

    async def use(client: EngineClient) -> None:
        alone = await text_of(client, "alone")
        streams = [client.submit([AddRequest(f"s{i}", PROMPT, ENDLESS)]) for i in range(12)]
        await streams[0].__anext__()
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        killed = time.monotonic()
        for stream in streams:
            with pytest.raises(APIError) as caught:
                async for _ in stream:
                    pass
            assert caught.value.status == 503
            assert "signal 9" in str(caught.value)
        assert time.monotonic() - killed < 1.0
        assert client.num_in_flight == 0
        with pytest.raises(APIError) as refused:
            client.submit([AddRequest("now", PROMPT, GREEDY)])
        assert (refused.value.status, refused.value.retry_after) == (503, 5)
        await until(lambda: client.state == "ready")
        assert client.num_restarts == 1
        assert await text_of(client, "again") == alone

    with_client(use, restart=True)


def test_without_restart_a_dead_engine_stays_dead() -> None:
    async def use(client: EngineClient) -> None:
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: client.state == "dead")
        assert "signal 9" in client.cause
        with pytest.raises(APIError, match="restart the server"):
            client.submit([AddRequest("x", PROMPT, GREEDY)])

    with_client(use)


def test_signals_for_the_whole_group_do_not_end_the_engine() -> None:
    async def use(client: EngineClient) -> None:
        assert client.pid is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(client.pid, number)
        await asyncio.sleep(0.2)
        assert await text_of(client, "x")

    with_client(use)


def test_what_keeps_an_engine_from_loading_is_raised(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    config = engine_config(model=str(path), speculative_model=None, num_speculative_tokens=None)
    for file in path.glob("*.safetensors"):
        file.write_bytes(b"broken")

    async def main() -> None:
        client = EngineClient(config, Observer())
        with pytest.raises(ConfigError):
            await client.start()
        assert client.state == "stopped"

    asyncio.run(main())


def test_an_engine_that_dies_while_it_loads_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")

    async def main() -> None:
        with pytest.raises(EngineError, match="ended with status 1"):
            await EngineClient(engine_config(), Observer()).start()

    asyncio.run(main())


ORPHAN = """
import asyncio, os
from paceline.server.engine_client import EngineClient
from paceline.server.observer import Observer
from server.serving import engine_config

async def main():
    client = EngineClient(engine_config(), Observer())
    await client.start()
    print(client.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_an_engine_does_not_outlive_its_server(tmp_path: Path) -> None:
    tests, source = Path(__file__).parents[1], Path(engine_client.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{tests}"}
    environment["TMPDIR"] = str(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    ) as server:
        assert server.stdout is not None
        engine = int(server.stdout.readline())
        assert is_running(engine)
        assert len(list(tmp_path.iterdir())) == 1
        server.kill()
        server.wait()
    wait_for(lambda: not is_running(engine), 5.0)
    assert list(tmp_path.iterdir()) == []  # it took the sockets along
