"""What serving costs over the engine alone: tokens per second of concurrent streams, first token.

    python benchmarks/serving.py paceline/demo --streams 64
    python benchmarks/serving.py DIR/target --streams 64 256 --max-model-len 4096 --dtype bfloat16

Every round gives the same prompts and seeds to an ``LLM`` and, as that many streams at once, to
``paceline serve`` with the same engine arguments; the two take turns, and while one works the other
waits. Streams are read by a client of plain sockets in this process, which counts events and
takes the last one's usage. First token: one prompt at a time, from request to first event,
against ``LLM.stream``. Engine flags are those of ``paceline serve`` and go to both. Prints a table,
then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import numpy as np

from paceline import LLM, SamplingParams
from paceline.engine_args import EngineArgs

SERVE = "import sys; from paceline.cli.main import main; sys.exit(main())"
PROMPT, OUTPUT = 128, 128


class Server:
    """``paceline serve`` in a process of its own; a context manager."""

    def __init__(self, model: str, flags: list[str], streams: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-c", SERVE, "serve", model, "--port", str(self.port)]
        command += ["--max-queue", str(streams), *flags]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def __enter__(self) -> Server:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
                return self
            except (urllib.error.URLError, OSError):
                if self._process.poll() is not None:
                    raise SystemExit("the server did not start; run it alone to see why") from None
                time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)


async def read_stream(port: int, body: dict[str, Any]) -> tuple[float, float, int]:
    """Seconds to the first event once connected, the last event's moment, tokens by the usage."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    sent = time.perf_counter()
    writer.write(head.encode() + data)
    first = last = 0.0
    usage = b""
    tail = b""
    while piece := await reader.read(65536):
        last = time.perf_counter()
        if not first and b"data: " in piece:
            first = last
        tail = (tail + piece)[-2048:]
        if b'"usage":{' in tail:
            usage = tail
    writer.close()
    if b"200 OK" not in tail and not usage:
        raise RuntimeError(f"the server answered {tail[:300]!r}")
    found = usage[usage.rindex(b'"completion_tokens":') :].split(b":", 1)[1]
    return first - sent, last, int(found.split(b",")[0].split(b"}")[0])


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


def served(port: int, prompts: list[list[int]], tokens: int) -> float:
    """Tokens per second of all prompts as concurrent streams."""

    async def run() -> float:
        start = time.perf_counter()
        bodies = [body_of(ids, seed, tokens) for seed, ids in enumerate(prompts)]
        ends = await asyncio.gather(*(read_stream(port, body) for body in bodies))
        if any(count != tokens for _, _, count in ends):
            raise RuntimeError("a stream did not make all its tokens")
        return sum(count for _, _, count in ends) / (max(last for _, last, _ in ends) - start)

    return asyncio.run(run())


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
            first, _, _ = runner.run(read_stream(port, body_of(ids, seed, 2)))
            found.append((alone * 1e3, first * 1e3))
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
        rounds = []
        for turn in range(args.rounds + 1):
            prompts = prompts_of(llm, count, turn)
            pair = [offline(llm, prompts, args.tokens), served(port, prompts, args.tokens)]
            if turn:
                rounds.append(pair)
        ratios = sorted(b / a for a, b in rounds)
        alone, over_http = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(
            f"{count:4} streams: {alone:9.1f} tokens/s by the engine, {over_http:9.1f} served, "
            f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
            flush=True,
        )
        results[str(count)] = {"offline": [a for a, _ in rounds], "served": [b for _, b in rounds]}
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
