"""What the engine sends for one HTTP request, from the socket to whoever reads it.

Deltas that come while nobody reads are merged, so that a slow reader costs the memory of its own
text and no more, and gets fewer, longer pieces. Knows no sockets and no HTTP.

    async for deltas in stream: ...   # everything since the last look, one delta an output
    stream.close()                    # the engine is told to stop if it has not finished
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from paceline.errors import EngineError, PacelineError, RequestError
from paceline.server.messages import Delta


class DeltaStream:
    """An asynchronous iterator over lists of deltas; used from one event loop.

    counts: outputs (``n``) of each request by its id. on_close: called once, with the ids of the
    requests that have not finished. on_read: called with deltas as they are read, with those
    that nobody will read when the stream is closed, and with errors.

    Reading raises RequestError (the engine refused a request), EngineError (a step failed) or what
    was given to ``fail``; then the stream is over.
    """

    def __init__(
        self,
        counts: Mapping[str, int],
        on_close: Callable[[list[str]], None],
        on_read: Callable[[list[Delta]], None] | None = None,
    ) -> None:
        self.counts = counts
        self._on_read = on_read
        self._unfinished = dict(counts)  # outputs that have not finished, of requests that have not
        self._on_close = on_close
        self._pending: dict[tuple[str, int], Delta] = {}
        self._error: PacelineError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self.abandoned = False  # the client has left

    # ---- the engine's side -----------------------------------------------------------------------

    def put(self, delta: Delta) -> bool:
        """Take what the engine sent; whether it was the last of its request."""
        if self._closed or delta.request_id not in self._unfinished:
            return True
        if delta.finish_reason == "error":
            kind = RequestError if delta.error_status == 400 else EngineError
            del self._unfinished[delta.request_id]
            self._tell([delta])
            self.fail(kind(delta.error or "the request failed"))
            return True
        key = (delta.request_id, delta.index)
        earlier = self._pending.get(key)
        if earlier is None:
            self._pending[key] = delta
        else:
            _merge(earlier, delta)
        if delta.finish_reason is not None:
            self._unfinished[delta.request_id] -= 1
            if not self._unfinished[delta.request_id]:
                del self._unfinished[delta.request_id]
        self._wake()
        return delta.request_id not in self._unfinished

    def fail(self, error: PacelineError) -> None:
        """End the stream; its reader gets what is pending, then ``error``."""
        if self._error is None and not self._closed:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- the reader's side -----------------------------------------------------------------------

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> list[Delta]:
        while not self._pending:
            if self._error is not None:
                self.close()
                raise self._error
            if self._closed or not self._unfinished:
                self.close()
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._take_pending()

    def close(self) -> None:
        """Read no more; what has not finished is aborted. A waiting reader stops. May be repeated.

        Waits for nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._take_pending()
        self._wake()
        self._on_close(list(self._unfinished))

    def _take_pending(self) -> list[Delta]:
        deltas = list(self._pending.values())
        self._pending.clear()
        self._tell(deltas)
        return deltas

    def _tell(self, deltas: list[Delta]) -> None:
        if self._on_read is not None:
            self._on_read(deltas)

    def abandon(self) -> None:
        """Close because nobody is there to read."""
        self.abandoned = True
        self.close()


def _merge(earlier: Delta, later: Delta) -> None:
    """Append a delta to one of the same output that nobody has read."""
    earlier.text += later.text
    earlier.token_ids += later.token_ids
    if later.logprobs is not None:
        earlier.logprobs = [*(earlier.logprobs or ()), *later.logprobs]
    if later.prompt_logprobs is not None:
        earlier.prompt_logprobs = later.prompt_logprobs
    earlier.finish_reason = later.finish_reason
    earlier.stop_reason = later.stop_reason
    earlier.speculative = later.speculative
    earlier.times = later.times
