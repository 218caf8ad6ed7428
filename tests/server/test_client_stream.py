"""``DeltaStream``: what a reader gets, whenever it looks, and what happens when it leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import EngineError, RequestError
from paceline.server.delta_stream import DeltaStream
from paceline.server.messages import TokenLogprobs
from server.serving import delta


def make(**counts: int) -> tuple[DeltaStream, list[str]]:
    aborted: list[str] = []
    return DeltaStream(counts, aborted.extend), aborted


async def read(stream: DeltaStream) -> list[Any]:
    return [deltas async for deltas in stream]


def test_what_is_read_is_told_once() -> None:
    async def main() -> None:
        told: list[str] = []
        closed: list[str] = []
        stream = DeltaStream(
            {"a": 1, "b": 1, "c": 1},
            closed.extend,
            lambda deltas: told.extend(f"{d.request_id}:{d.text}" for d in deltas),
        )
        stream.put(delta("a", "x"))
        stream.put(delta("a", "y"))
        assert told == []  # nobody has read it
        await anext(stream)
        assert told == ["a:xy"]
        stream.put(delta("b", "z", "stop"))
        stream.put(delta("c", "", "error", error="a step failed"))
        assert told == ["a:xy", "c:"]
        stream.close()
        stream.close()
        assert told == ["a:xy", "c:", "b:z"]  # finished, if unread
        stream.put(delta("a", "late"))
        assert (told[3:], closed) == ([], ["a"])

    asyncio.run(main())


def test_a_reader_that_keeps_up_gets_every_delta_by_itself() -> None:
    async def main() -> None:
        stream, aborted = make(a=1)
        reading = asyncio.create_task(read(stream))
        for text, finish in (("x", None), ("y", None), ("z", "stop")):
            await asyncio.sleep(0)
            stream.put(delta("a", text, finish))
            await asyncio.sleep(0)
        got = await reading
        assert [[d.text for d in deltas] for deltas in got] == [["x"], ["y"], ["z"]]
        assert aborted == []

    asyncio.run(main())


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1), st.text(max_size=3))))
def test_a_reader_that_lags_gets_the_same_in_fewer_pieces(
    pieces: list[tuple[str, int, str]],
) -> None:
    """Text, ids and logprobs of each output add up, whatever was merged."""

    async def main() -> None:
        stream, _ = make(a=2, b=2)
        for name, index, text in pieces:
            positions = [TokenLogprobs([ord(char)], [-1.0], [1], [char]) for char in text]
            stream.put(delta(name, text, index=index, logprobs=positions))
        ends = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
        last = [stream.put(delta(name, "", "length", index=index)) for name, index in ends]
        assert last == [False, True, False, True]
        (got,) = await read(stream)
        assert len(got) == 4
        for one in got:
            expected = "".join(t for n, i, t in pieces if (n, i) == (one.request_id, one.index))
            assert one.text == expected
            assert "".join(map(chr, one.token_ids)) == expected
            assert "".join(p.texts[0] for p in one.logprobs or ()) == expected
            assert one.finish_reason == "length"

    asyncio.run(main())


def test_leaving_early_aborts_what_has_not_finished() -> None:
    async def main() -> None:
        stream, aborted = make(a=1, b=1)
        assert stream.put(delta("a", "x", "stop"))
        stream.close()
        stream.close()
        assert aborted == ["b"]
        assert await read(stream) == []
        assert stream.put(delta("b", "late"))

    asyncio.run(main())


def test_leaving_wakes_a_waiting_reader() -> None:
    async def main() -> None:
        stream, aborted = make(a=1)
        reading = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        stream.abandon()
        assert await reading == []
        assert stream.abandoned
        assert aborted == ["a"]

    asyncio.run(main())


@pytest.mark.parametrize(("status", "kind"), [(400, RequestError), (500, EngineError)])
def test_an_error_comes_after_what_was_there_before(status: int, kind: type[Exception]) -> None:
    async def main() -> None:
        stream, aborted = make(a=2, b=1)
        stream.put(delta("a", "x"))
        assert stream.put(delta("a", "", "error", error="no", error_status=status))
        assert [d.text for d in await stream.__anext__()] == ["x"]
        with pytest.raises(kind, match="no"):
            await stream.__anext__()
        assert aborted == ["b"]

    asyncio.run(main())


def test_failing_ends_the_stream_once() -> None:
    async def main() -> None:
        stream, aborted = make(a=1)
        reading = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        stream.fail(EngineError("first"))
        stream.fail(EngineError("second"))
        with pytest.raises(EngineError, match="first"):
            await reading
        assert aborted == ["a"]

    asyncio.run(main())


def test_a_cancelled_reader_may_be_followed_by_another() -> None:
    async def main() -> None:
        stream, _ = make(a=1)
        reading = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        stream.put(delta("a", "x", "stop"))
        assert [d.text for deltas in await read(stream) for d in deltas] == ["x"]

    asyncio.run(main())
