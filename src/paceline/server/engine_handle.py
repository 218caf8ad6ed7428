"""One engine process and the sockets to it, from start to end.

Knows how a process is started, watched and ended, and how messages reach an event loop; not what
they mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import zmq

import paceline
from paceline.server.messages import FromEngine, ToEngine, decode_from_engine, encode

_LONGEST_SOCKET_PATH = 100  # systems take 103 bytes or a few more
_SOCKETS = ("requests", "results")
_RECONNECT_MS = 10
_LAST_WORDS_S = 0.03  # for what a process sent as it ended to pass through ZeroMQ's thread


class EngineHandle:
    """A running process; made by ``start``."""

    module = "paceline.server.engine_process"  # what runs in it; benchmarks put another there

    def __init__(
        self,
        on_message: Callable[[FromEngine], None],
        on_end: Callable[[int], None],
    ) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._directory = _private_directory()
        self._context = zmq.Context()
        self._requests = self._context.socket(zmq.PUSH)
        self._results = self._context.socket(zmq.PULL)
        for socket in (self._requests, self._results):
            socket.set_hwm(0)  # what is in flight is bounded by the server's limits
            socket.linger = 0
        requests, results = self._addresses()
        # Connected, not bound: then sending never waits for a process that has not come up, or has
        # just died.
        self._requests.reconnect_ivl = _RECONNECT_MS
        self._requests.connect(requests)
        self._results.bind(results)
        self._readable = int(self._results.getsockopt(zmq.FD))
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, on_message: Callable[[FromEngine], None], on_end: Callable[[int], None]
    ) -> EngineHandle:
        """Start a process.

        on_message: called in the event loop with each message. on_end: called once, with the exit
        status (minus the signal), unless ``close`` was called before.
        """
        handle = cls(on_message, on_end)
        try:
            await handle._spawn()
        except BaseException:
            await handle.close()
            raise
        return handle

    async def _spawn(self) -> None:
        source = str(Path(paceline.__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
        spawning = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # the working directory is no place to import from
                "-m",
                self.module,
                *self._addresses(),
                stdin=asyncio.subprocess.PIPE,  # closes when this process dies, however it does
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # a terminal's Ctrl-C is for this process to deal with
            )
        )
        try:
            self._process = await asyncio.shield(spawning)
        except asyncio.CancelledError:
            self._process = await spawning  # for ``close`` to end: nobody else would know of it
            raise
        loop = asyncio.get_running_loop()
        loop.add_reader(self._readable, self._read)
        self._watcher = loop.create_task(self._watch(self._process))

    def _addresses(self) -> list[str]:
        return [f"ipc://{self._directory / name}" for name in _SOCKETS]

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def send(self, message: ToEngine) -> None:
        """Queue a message; waits for nothing."""
        self._requests.send(encode(message))

    def _read(self) -> None:
        """Take everything that is there: the descriptor tells of new messages only."""
        while not self._results.closed and self._results.poll(0):
            self._on_message(decode_from_engine(self._results.recv(zmq.NOBLOCK)))

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        await asyncio.sleep(_LAST_WORDS_S)
        self._read()
        self._on_end(status)

    async def wait(self, seconds: float) -> None:
        """Until the process has ended, or that long."""
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), seconds)

    async def close(self) -> None:
        """Kill the process if it runs, and let go of everything."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self._process is not None:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
            await self._process.wait()
        if not self._results.closed:
            asyncio.get_running_loop().remove_reader(self._readable)
        self._requests.close()
        self._results.close()
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)


def _private_directory() -> Path:
    """A new directory that only this user can enter, with a path short enough for sockets."""
    directory = Path(tempfile.mkdtemp(prefix="paceline-"))
    longest = max(len(os.fsencode(directory / name)) for name in _SOCKETS)
    if longest <= _LONGEST_SOCKET_PATH:
        return directory
    directory.rmdir()
    return Path(tempfile.mkdtemp(prefix="paceline-", dir="/tmp"))
