"""The API process's end of the engine process: starts it, talks to it, notices when it dies.

One event loop uses it. Knows no HTTP; must not import torch.

    client = EngineClient(config, Observer())
    ready = await client.start()
    stream = client.submit([AddRequest("1", ids, SamplingParams())])
    async for deltas in stream: ...
    await client.stop()
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal

from paceline import errors
from paceline.config import EngineConfig
from paceline.errors import EngineError, PacelineError
from paceline.server.delta_stream import DeltaStream
from paceline.server.engine_handle import EngineHandle
from paceline.server.errors import unavailable
from paceline.server.messages import (
    Abort,
    AddRequest,
    Deltas,
    Fatal,
    FromEngine,
    Ready,
    Shutdown,
    Start,
    Stats,
)
from paceline.server.observer import Observer

logger = logging.getLogger(__name__)

State = Literal["starting", "ready", "dead", "stopped"]

_RESTART_DELAY_S = 1.0  # before the first restart; doubled for each that fails
_MAX_RESTART_DELAY_S = 60.0
_STOP_PATIENCE_S = 5.0  # until an engine that was told to leave is killed


class EngineClient:
    """One engine process, and with ``restart`` its successors.

    observer: is told what the engine says. log_stats: whether the engine logs its line every few
    seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        observer: Observer,
        *,
        restart: bool = False,
        log_stats: bool = True,
    ) -> None:
        self._observer = observer
        self._start_message = Start(config, log_stats)
        self._restart = restart
        self._handle: EngineHandle | None = None
        self._streams: dict[str, DeltaStream] = {}  # by id of each unfinished request
        self._settled: asyncio.Future[Ready] | None = None  # of an engine that is starting
        self._restarting: asyncio.Task[None] | None = None
        self._last_message = 0.0
        self.state: State = "stopped"
        self.cause = ""  # why the state is "dead"
        self.ready: Ready | None = None
        self.num_in_flight = 0  # outputs of all unfinished requests
        self.num_restarts = 0

    # ---- life ------------------------------------------------------------------------------------

    async def start(self) -> Ready:
        """Start the process and wait until it serves.

        Raises what the engine raised (ConfigError, CapacityError), or EngineError if it died.
        """
        self.state, self.cause = "starting", ""
        self._settled = asyncio.get_running_loop().create_future()
        self._handle = await EngineHandle.start(self._receive, self._ended)
        self._handle.send(self._start_message)
        try:
            self.ready = await self._settled
        except BaseException:
            await self._kill()
            self.state = "stopped"
            raise
        finally:
            self._settled = None
        return self.ready

    async def stop(self, *, patience: bool = True) -> None:
        """End the engine; whoever still waits gets an error. patience: let it leave by itself."""
        self.state = "stopped"
        if self._restarting is not None:
            self._restarting.cancel()
        self.fail_all(unavailable("the server is shutting down", "shutting_down"))
        if patience and self._handle is not None and self._handle.alive:
            self._handle.send(Shutdown())
            await self._handle.wait(_STOP_PATIENCE_S)
        await self._kill()

    async def _kill(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            await handle.close()

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        return None if self._handle is None else self._handle.pid

    @property
    def stats(self) -> Stats | None:
        """What the engine last said of itself, None while none lives."""
        return self._observer.stats

    @property
    def seconds_silent(self) -> float:
        """Since the engine last said anything; it does so at least once a second between steps."""
        return time.monotonic() - self._last_message

    # ---- requests --------------------------------------------------------------------------------

    def submit(self, requests: Sequence[AddRequest]) -> DeltaStream:
        """Send requests to the engine; one stream brings the deltas of all of them.

        Raises APIError (503) when no engine serves.
        """
        handle = self._handle
        if self.state != "ready" or handle is None:
            raise self._unavailable()
        counts = {one.request_id: one.sampling.n for one in requests}
        stream = DeltaStream(counts, self._close, self._observer.take)
        for one in requests:
            self._streams[one.request_id] = stream
            self.num_in_flight += one.sampling.n
            handle.send(one)
        return stream

    def _forget(self, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self.num_in_flight -= stream.counts[request_id]

    def _close(self, unfinished: list[str]) -> None:
        """A stream's reader has left."""
        for request_id in unfinished:
            self._forget(request_id)
            self._observer.leave(request_id, "abort" if self.state == "ready" else "error")
        if unfinished and self._handle is not None and self.state == "ready":
            self._handle.send(Abort(unfinished))

    def fail_all(self, error: PacelineError) -> None:
        """End every stream with ``error``; their requests are aborted as the readers leave."""
        for stream in set(self._streams.values()):
            stream.fail(error)

    def _unavailable(self) -> PacelineError:
        if self.state == "dead":
            hint = "it is being restarted" if self._restart else "restart the server"
            return unavailable(f"the engine has died ({self.cause}). hint: {hint}", "engine_dead")
        if self.state == "starting":
            return unavailable("the engine is starting. hint: try again later", "engine_starting")
        return unavailable("the server is shutting down", "shutting_down")

    # ---- what comes from the process -------------------------------------------------------------

    def _receive(self, message: FromEngine) -> None:
        self._last_message = time.monotonic()
        if isinstance(message, Deltas):
            streams = self._streams
            for delta in message.deltas:
                stream = streams.get(delta.request_id)
                # None: it was closed while the engine did the step.
                if stream is not None and stream.put(delta):
                    self._forget(delta.request_id)
        elif isinstance(message, Stats):
            self._observer.engine(message)
        elif isinstance(message, Ready):
            self.state = "ready"
            self._settle(lambda settled: settled.set_result(message))
        elif isinstance(message, Fatal):
            self.cause = message.message
            kind = getattr(errors, message.kind, EngineError)
            self._settle(lambda settled: settled.set_exception(kind(message.message)))

    def _settle(self, how: Callable[[asyncio.Future[Ready]], None]) -> None:
        if self._settled is not None and not self._settled.done():
            how(self._settled)

    def _ended(self, status: int) -> None:
        """The process is gone."""
        self.cause = self.cause or _how_it_ended(status)
        self._settle(lambda settled: settled.set_exception(EngineError(_died(self.cause))))
        if self.state != "ready":
            return
        self.state = "dead"
        self._observer.engine(None)
        logger.error("%s; %d requests are lost", _died(self.cause), len(self._streams))
        self.fail_all(self._unavailable())
        if self._restart:
            self._restarting = asyncio.get_running_loop().create_task(self._start_again())

    async def _start_again(self) -> None:
        delay = _RESTART_DELAY_S
        while True:
            await self._kill()
            logger.warning("the engine is restarted in %.0f s", delay)
            await asyncio.sleep(delay)
            try:
                await self.start()
            except PacelineError as error:
                self.state, self.cause = "dead", str(error)
                logger.error("the engine could not be restarted: %s", error)
                delay = min(2 * delay, _MAX_RESTART_DELAY_S)
                continue
            self.num_restarts += 1
            logger.warning("the engine serves again")
            return


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"its process ended with status {status}"
    hint = ", usually because the system ran out of memory" if status == -9 else ""
    return f"its process was ended by signal {-status}{hint}"


def _died(cause: str) -> str:
    return f"the engine died: {cause}"
