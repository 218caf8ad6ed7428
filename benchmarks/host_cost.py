"""What scheduling costs the host: schedule + update at 256 running sequences.

The runner is replaced by one that answers at once, so that only the core's own time is measured:
``schedule()`` and ``update_from_output()``, k = 0 and 5, without and with detokenisation (every
sequence has a stop string, so every new id is decoded inside commit), and with 100,000 waiting
requests behind them.

    python benchmarks/host_cost.py [--tokenizer DIR]

Prints a table for people and a JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from paceline.config import CacheConfig, SchedulerConfig
from paceline.core.scheduler import Scheduler
from paceline.core.step import ModelRunnerOutput, SchedulerOutput
from paceline.engine.stop_checker import SequenceText
from paceline.engine.tokenizer import Tokenizer
from paceline.request import Request
from paceline.sampling_params import SamplingParams
from paceline.spec.policy import FixedPolicy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from tiny_model import write_tiny_model

ROWS, PROMPT, STEPS = 256, 64, 300
ACCEPTED = (0, 3, 5, 5, 2, 5, 4, 1)  # drafts accepted, row after row: 3.1 of 5 on average


def answer(scheduler: Scheduler, out: SchedulerOutput, vocab_size: int) -> ModelRunnerOutput:
    """Results as a runner would give them, made without any work that grows with the model."""
    rows = np.concatenate([out.decode_rows, out.prefill_rows[out.prefill_samples]])
    drafts = np.concatenate([out.num_draft_tokens, np.zeros(len(rows), np.int32)])[: len(rows)]
    accepted = np.minimum(np.resize(ACCEPTED, len(rows)), drafts)
    rng = np.random.default_rng(out.step)
    return ModelRunnerOutput(
        out.step,
        rows.astype(np.int32),
        scheduler.table.generation[rows],
        rng.integers(3, vocab_size, (len(rows), int(drafts.max(initial=0)) + 1)).astype(np.int32),
        (accepted + 1).astype(np.int32),
        drafts.astype(np.int32),
    )


def measure(k: int, tokenizer: Tokenizer | None, waiting: int, vocab_size: int) -> dict[str, float]:
    """Milliseconds of schedule and update a step: median, and 95th percentile."""
    scheduler = Scheduler(
        SchedulerConfig(ROWS, 16384, 4096),
        CacheConfig(16, ROWS * 256),
        FixedPolicy(k),
        drafter_has_kv=k > 0,
    )
    sampling = SamplingParams(max_tokens=None, ignore_eos=True)
    rng = np.random.default_rng(0)
    for number in range(ROWS + waiting):
        ids = rng.integers(3, vocab_size, PROMPT if number < ROWS else 8).astype(np.int32)
        request = Request(str(number), ids, sampling, 0.0)
        if tokenizer is not None and number < ROWS:
            for sequence in request.sequences:
                sequence.stop_checker = SequenceText(tokenizer, stop=["\x00never\x00"])
        scheduler.add_request(request)
    times = []
    for step in range(STEPS):
        start = time.perf_counter()
        out = scheduler.schedule()
        middle = time.perf_counter()
        result = answer(scheduler, out, vocab_size)
        resumed = time.perf_counter()
        scheduler.update_from_output(result)
        scheduler.take_events()
        if step >= 20:  # past prefill
            times.append((middle - start + time.perf_counter() - resumed) * 1e3)
    if scheduler.num_running != ROWS:
        raise AssertionError(f"{scheduler.num_running} sequences ran instead of {ROWS}")
    return {"median": statistics.median(times), "p95": sorted(times)[int(len(times) * 0.95)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", help="model directory (default: the tiny example model)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer.load(args.tokenizer or write_tiny_model(Path(folder) / "tiny"))
    cases = [
        ("k=0", 0, None, 0),
        ("k=5", 5, None, 0),
        ("k=0, 100,000 waiting", 0, None, 100_000),
        ("k=5, 100,000 waiting", 5, None, 100_000),
        ("k=0, with text", 0, tokenizer, 0),
        ("k=5, with text", 5, tokenizer, 0),
    ]
    results = {}
    print(f"{ROWS} running sequences, ms a step{'':12} median     p95")
    for name, k, with_text, waiting in cases:
        results[name] = measure(k, with_text, waiting, tokenizer.vocab_size)
        print(f"  {name:38} {results[name]['median']:8.3f} {results[name]['p95']:8.3f}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
