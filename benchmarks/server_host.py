"""What a server costs beside a fast card, without one: the model is a clock.

    python benchmarks/server_host.py --streams 256 --step-ms 11.3

The runner is replaced by one that answers with random ids after ``--step-ms``, while the host goes
on, as a card would; scheduler, detokenizer, messages, API process, HTTP and client are the real
ones. 256 streams at 11.3 ms a step are 22,600 tokens and events a second, what one H200 makes of a
7B model. Measured as in ``serving.py``: the same requests by an ``LLM`` and as concurrent streams,
in turns; also the processor time that each process takes for a token (Linux). Prints a table, then
one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import serving

import paceline.worker.start
from paceline import LLM
from paceline.config import EngineConfig
from paceline.core.step import ModelRunnerOutput, SchedulerOutput
from paceline.worker.start import Started

STEP_VARIABLE = "SERVER_HOST_STEP_MS"
SERVE = "import sys, server_host; sys.exit(server_host.serve())"


class ClockRunner:
    """A device that works beside the host: a step ends so many seconds after the one before it."""

    def __init__(self, seconds: float, vocab_size: int) -> None:
        self._seconds = seconds
        self._vocab_size = vocab_size
        self._free_at = 0.0
        self._generations: dict[int, int] = {}
        self._left: dict[int, int] = {}  # tokens that a row may still make

    def launch(self, out: SchedulerOutput) -> tuple[float, ModelRunnerOutput]:
        """Answer with one random id a row; the handle says from when on."""
        for row in out.freed_rows:
            self._left.pop(row, None)
        for new in out.new_rows:
            self._generations[new.row] = new.generation
            self._left[new.row] = new.max_total_tokens - new.prompt_len
        asked = [*out.decode_rows.tolist(), *out.prefill_rows[out.prefill_samples].tolist()]
        rows = [row for row in asked if self._left.get(row)]
        for row in rows:
            self._left[row] -= 1
        count = len(rows)
        self._free_at = max(self._free_at, time.perf_counter()) + self._seconds
        ids = np.random.default_rng(out.step).integers(3, self._vocab_size, (count, 1))
        return self._free_at, ModelRunnerOutput(
            out.step,
            np.array(rows, np.int32),
            np.array([self._generations[row] for row in rows], np.int64),
            ids.astype(np.int32),
            np.ones(count, np.int32),
            np.zeros(count, np.int32),
        )

    def collect(self, handle: tuple[float, ModelRunnerOutput]) -> ModelRunnerOutput:
        """Wait until the step's time is over."""
        moment, result = handle
        time.sleep(max(0.0, moment - time.perf_counter()))
        return result

    def close(self) -> None:
        """Nothing is held."""


def start_clock(config: EngineConfig, max_k: int) -> Started:
    """In place of ``start_runner``."""
    runner = ClockRunner(float(os.environ[STEP_VARIABLE]) / 1e3, config.model.arch.vocab_size)
    return Started(runner, config, delay=1)


paceline.worker.start.start_runner = start_clock


def serve() -> int:
    """``paceline serve`` whose engine process is this file."""
    from paceline.cli.main import main
    from paceline.server.engine_handle import EngineHandle

    EngineHandle.module = "server_host"
    return main()


def processor_seconds(pid: int) -> float:
    """What a process has used so far; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def child_of(pid: int) -> int:
    """The engine's process; 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    except (OSError, IndexError):
        return 0


def compare(llm: LLM, server: serving.Server, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rounds after one that warms up: tokens per second, and microseconds a token by process."""
    processes = {"api_us": server.pid, "engine_us": child_of(server.pid)}
    total = args.streams * args.tokens
    rounds = []
    for turn in range(args.rounds + 1):
        prompts = serving.prompts_of(llm, args.streams, turn)
        alone = serving.offline(llm, prompts, args.tokens)
        before = {name: processor_seconds(pid) for name, pid in processes.items()}
        found = serving.served(server.port, prompts, args.tokens)
        used = {
            name: (processor_seconds(pid) - before[name]) / total * 1e6
            for name, pid in processes.items()
        }
        rounds.append(
            {"offline": alone, "served": found.rate, "ratio": found.rate / alone}
            | {"gap_median": found.gap_median, "gap_p99": found.gap_p99}
            | {**used, "client_us": found.client_us}
        )
    return rounds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=11.3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    os.environ[STEP_VARIABLE] = str(args.step_ms)
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    length = serving.PROMPT + args.tokens + 16
    options = {"device": "cpu", "max_num_seqs": args.streams, "max_model_len": length}
    flags = [word for name, value in options.items() for word in (flag(name), str(value))]
    with (
        serving.Server("paceline/demo", flags, args.streams, code=SERVE) as server,
        LLM("paceline/demo", enable_prefix_caching=False, disable_log_stats=True, **options) as llm,
    ):
        rounds = compare(llm, server, args)
        pairs = serving.first_tokens(llm, server.port, serving.prompts_of(llm, 31, 99))[1:]
    middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    ratios = sorted(one["ratio"] for one in rounds)
    print(
        f"{args.streams} streams, a step every {args.step_ms} ms: {middle['offline']:.0f} tokens/s "
        f"by the engine, {middle['served']:.0f} served, ratio {middle['ratio']:.3f} "
        f"({ratios[0]:.3f} to {ratios[-1]:.3f})\n"
        f"us of processor a token: API process {middle['api_us']:.1f}, engine process "
        f"{middle['engine_us']:.1f}, client {middle['client_us']:.1f}\n"
        f"gaps {middle['gap_median']:.1f} ms, 1% above {middle['gap_p99']:.1f}; first token of one "
        f"request {statistics.median(b - a for a, b in pairs):.2f} ms later than by the engine"
    )
    print(json.dumps({"benchmark": "server_host", **vars(args), "rounds": rounds, "first": pairs}))


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("ipc://"):
        from paceline.server import engine_process

        sys.exit(engine_process.main(sys.argv[1:]))
    main()
