"""What serving costs over the engine alone: tokens per second of concurrent streams, first token.

    python benchmarks/serving.py paceline/demo --streams 64
    python benchmarks/serving.py DIR/target --streams 64 256 --max-model-len 4096 --dtype bfloat16

Every round gives the same prompts and seeds to an ``LLM`` and, as that many streams at once, to
``paceline serve`` with the same engine arguments; the two take turns, and while one works the other
waits. Streams are read by a client of plain sockets in this process, which counts events, takes the
last one's usage, and tells what it costs itself. First token: one prompt at a time, from request to
first event, against ``LLM.stream``. Dropped: as many streams leave at once; until every block is
free again. Engine flags are those of ``paceline serve`` and go to both. Prints a table, then one
JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from paceline import LLM, SamplingParams
from paceline.engine_args import EngineArgs

SERVE = "import sys; from paceline.cli.main import main; sys.exit(main())"
PROMPT, OUTPUT = 128, 128
FIGURES = ("rate", "gap_median", "gap_p99", "client_us")


class Server:
    """``paceline serve`` in a process of its own; a context manager. code: Python that runs it."""

    def __init__(self, model: str, flags: list[str], streams: int, code: str = SERVE) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-c", code, "serve", model, "--port", str(self.port)]
        command += ["--max-queue", str(streams), *flags]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed on exit)
        self._process = subprocess.Popen(command, stderr=self._log)

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Server:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
                return self
            except (urllib.error.URLError, OSError):
                if self._process.poll() is not None:
                    self._log.seek(0)
                    end = self._log.read().decode(errors="replace")[-2000:]
                    raise SystemExit(f"the server did not start:\n{end}") from None
                time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._log.close()


class Stream(asyncio.Protocol):
    """One streamed completion, on a connection of its own: what came when.

    It looks at as little as it can, so that it is not what is measured.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        self._request = head.encode() + data
        loop = asyncio.get_running_loop()
        self.begun, self.ended = loop.create_future(), loop.create_future()
        self.sent = 0.0
        self.arrivals: list[float] = []  # of events; those that come together count once
        self._latest: deque[bytes] = deque(maxlen=8)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.sent = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._latest.append(data)
        if self.arrivals:
            self.arrivals.append(time.perf_counter())
        elif b"data: " in data:
            self.arrivals.append(time.perf_counter())
            self.begun.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        for future in (self.begun, self.ended):
            if not future.done():
                future.set_result(None)

    @property
    def first(self) -> float:
        """Seconds from the request to the first event."""
        return self.arrivals[0] - self.sent

    @property
    def tokens(self) -> int:
        """As the usage at the end says."""
        end = b"".join(self._latest)
        found = re.search(rb'"completion_tokens":(\d+)', end)
        if found is None or b"data: [DONE]" not in end:
            raise RuntimeError(f"a stream ended with {end[-300:]!r}")
        return int(found[1])


async def open_streams(port: int, bodies: list[dict[str, Any]]) -> list[Stream]:
    """All requests, sent at once."""
    loop = asyncio.get_running_loop()

    async def one(body: dict[str, Any]) -> Stream:
        _, stream = await loop.create_connection(lambda: Stream(body), "127.0.0.1", port)
        return stream

    return await asyncio.gather(*(one(body) for body in bodies))


async def read_streams(port: int, bodies: list[dict[str, Any]]) -> list[Stream]:
    """The same, when all have ended."""
    streams = await open_streams(port, bodies)
    await asyncio.gather(*(stream.ended for stream in streams))
    return streams


def body_of(ids: list[int], seed: int, tokens: int) -> dict[str, Any]:
    return {
        "prompt": ids,
        "max_tokens": tokens,
        "temperature": 1.0,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@dataclass
class Served:
    """One round of concurrent streams. Gaps are between the events of a stream, in milliseconds."""

    rate: float  # tokens per second
    gap_median: float
    gap_p99: float
    client_us: float  # processor time of this process a token


def served(port: int, prompts: list[list[int]], tokens: int) -> Served:
    """All prompts as concurrent streams."""
    bodies = [body_of(ids, seed, tokens) for seed, ids in enumerate(prompts)]
    start, cpu = time.perf_counter(), time.process_time()
    streams = asyncio.run(read_streams(port, bodies))
    cpu = time.process_time() - cpu
    if any(stream.tokens != tokens for stream in streams):
        raise RuntimeError("a stream did not make all its tokens")
    total = tokens * len(streams)
    gaps = np.concatenate([np.diff(stream.arrivals) for stream in streams]) * 1e3
    seconds = max(stream.arrivals[-1] for stream in streams) - start
    median, p99 = np.percentile(gaps, [50, 99])
    return Served(total / seconds, float(median), float(p99), cpu / total * 1e6)


def dropped(port: int, prompts: list[list[int]], tokens: int) -> float:
    """Seconds from when the readers of all streams leave until the server has every block back."""

    async def leave() -> None:
        bodies = [body_of(ids, seed, tokens) for seed, ids in enumerate(prompts)]
        streams = await open_streams(port, bodies)
        await asyncio.gather(*(stream.begun for stream in streams))
        await asyncio.to_thread(wait_for_health, port, lambda health: health["num_running"])
        for stream in streams:
            stream.transport.abort()

    asyncio.run(leave())
    start = time.perf_counter()
    wait_for_health(
        port,
        lambda health: (
            health["num_running"] == health["num_waiting"] == 0
            and health["num_free_blocks"] == health["num_blocks"]
        ),
    )
    return time.perf_counter() - start


def wait_for_health(port: int, wanted: Callable[[dict[str, Any]], Any]) -> None:
    """Until ``/health`` says so."""
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            if wanted(json.load(answer)):
                return
        time.sleep(0.005)


def offline(llm: LLM, prompts: list[list[int]], tokens: int) -> float:
    """The same by the engine alone."""
    sampling = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=tokens, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    total = sum(len(output.outputs[0].token_ids) for output in outputs)
    return total / (time.perf_counter() - start)


def first_tokens(llm: LLM, port: int, prompts: list[list[int]]) -> list[tuple[float, float]]:
    """Milliseconds to the first token of each prompt, alone, by the engine and served."""
    found = []
    with asyncio.Runner() as runner:
        for seed, ids in enumerate(prompts):
            sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=2, ignore_eos=True)
            start = time.perf_counter()
            stream = llm.stream(ids, sampling)
            next(iter(stream))
            alone = time.perf_counter() - start
            for _ in stream:
                pass
            [stream] = runner.run(read_streams(port, [body_of(ids, seed, 2)]))
            found.append((alone * 1e3, stream.first * 1e3))
    return found


def prompts_of(llm: LLM, count: int, turn: int) -> list[list[int]]:
    vocab = llm.engine.config.model.arch.vocab_size
    rng = np.random.default_rng(turn)
    return rng.integers(0, vocab, (count, PROMPT)).tolist()  # type: ignore[no-any-return]


def engine_options(flags: list[str]) -> dict[str, Any]:
    """Flags as keywords of ``LLM``."""
    names = dict(EngineArgs.__annotations__)
    options: dict[str, Any] = {}
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        name = flag.removeprefix("--").replace("-", "_")
        if name not in names:
            raise SystemExit(f"{flag} is no engine argument")
        number = "int" in names[name] or "float" in names[name]
        options[name] = json.loads(value) if number else value
    return options


def compare(llm: LLM, port: int, args: argparse.Namespace) -> dict[str, Any]:
    """All numbers of streams, in rounds; the first round warms up."""
    results: dict[str, Any] = {}
    for count in args.streams:
        alone, rounds = [], []
        for turn in range(args.rounds + 1):
            prompts = prompts_of(llm, count, turn)
            alone.append(offline(llm, prompts, args.tokens))
            rounds.append(served(port, prompts, args.tokens))
        del alone[0], rounds[0]
        seconds = dropped(port, prompts, args.tokens)
        ratios = sorted(b.rate / a for a, b in zip(alone, rounds, strict=True))
        middle = {key: statistics.median(asdict(one)[key] for one in rounds) for key in FIGURES}
        print(
            f"{count:4} streams: {statistics.median(alone):9.1f} tokens/s by the engine, "
            f"{middle['rate']:9.1f} served, ratio {statistics.median(ratios):.3f} "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f})\n"
            f"      gaps {middle['gap_median']:.1f} ms, 1% above {middle['gap_p99']:.1f}; client"
            f" {middle['client_us']:.1f} us a token; all dropped: blocks free after "
            f"{seconds * 1e3:.0f} ms",
            flush=True,
        )
        results[str(count)] = {
            "offline": alone,
            "served": [asdict(one) for one in rounds],
            "ratio": statistics.median(ratios),
            "dropped_s": seconds,
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="paceline/demo")
    parser.add_argument("--streams", type=int, nargs="+", default=[64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=OUTPUT)
    args, flags = parser.parse_known_args()
    most = max(args.streams)
    if "--max-num-seqs" not in flags:
        flags += ["--max-num-seqs", str(most)]
    if "--max-model-len" not in flags:
        flags += ["--max-model-len", str(PROMPT + args.tokens + 16)]
    options = engine_options(flags)
    with (
        Server(args.model, flags, most) as server,
        LLM(args.model, enable_prefix_caching=False, disable_log_stats=True, **options) as llm,
    ):
        streams = compare(llm, server.port, args)
        pairs = first_tokens(llm, server.port, prompts_of(llm, 31, 99))[1:]
        extra = [b - a for a, b in pairs]
        alone, over_http = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"first token: {alone:.2f} ms by the engine, {over_http:.2f} served, median "
            f"difference {statistics.median(extra):.2f} ms"
        )
    print(
        json.dumps(
            {
                "benchmark": "serving",
                "model": args.model,
                "flags": flags,
                "tokens": args.tokens,
                "streams": streams,
                "first_token_ms": {
                    "offline": [a for a, _ in pairs],
                    "served": [b for _, b in pairs],
                },
            }
        )
    )


if __name__ == "__main__":
    main()
