"""What sampling one decode step costs on the CPU, by kind of row.

Logits are synthetic with the shape of a language model's: a normal bulk and a head of a few dozen
likely tokens; "flat" is the bulk alone, the worst case of pruning and truncation.

    python benchmarks/sampling.py --vocab 151936 --rows 1 16

Prints a table for people, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import torch

from paceline.sample.rows import SamplingRows
from paceline.sample.sampler import Sampler, nonfinite_rows
from paceline.sampling_params import SamplingParams

PROMPT, OUTPUT = 512, 512
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, penalties": {"temperature": 0.0, **PENALTIES},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1.0": {"temperature": 1.0},
    "temperature 1.0, penalties": {"temperature": 1.0, **PENALTIES},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50": {"top_k": 50},
    "top_k 20000": {"top_k": 20000},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50, top_p 0.9, min_p 0.05": {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
}


def make_logits(rows: int, vocab: int, flat: bool) -> torch.Tensor:
    """[rows, vocab] float32: bulk of standard deviation 2.5; head of 40 tokens, 15 to 22 above."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator) * 2.5
    if not flat:
        head = torch.randint(vocab, (rows, 40), generator=generator)
        logits.scatter_(1, head, 15 + 7 * torch.rand(rows, 40, generator=generator))
    return logits


def make_state(rows: int, vocab: int, values: dict[str, Any]) -> SamplingRows:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab, (rows, PROMPT + OUTPUT + 32), dtype=np.int32)
    state = SamplingRows(rows, torch.from_numpy(tokens), torch.device("cpu"))
    for row in range(rows):
        state.set_row(
            row, SamplingParams(**values), PROMPT, seed=row, sample_index=0, stop_token_ids=()
        )
    return state


def time_case(
    logits: torch.Tensor, values: dict[str, Any], k: int, repeats: int
) -> tuple[float, float]:
    """Median and 90th percentile of milliseconds a sampled position, over positions."""
    positions_total, vocab = logits.shape
    rows = np.repeat(np.arange(positions_total // (k + 1)), k + 1)
    state = make_state(len(rows) // (k + 1), vocab, values)
    sampler = Sampler(vocab_limit=vocab - 271)
    times = []
    for step in range(repeats + 3):
        scratch = logits.clone()
        positions = (
            PROMPT + OUTPUT // 2 + step % 16 + np.tile(np.arange(k + 1), len(rows) // (k + 1))
        )
        start = time.perf_counter()
        sampler.sample(scratch, rows, positions, state)
        times.append((time.perf_counter() - start) * 1e3 / positions_total)
    times = sorted(times[3:])
    return statistics.median(times), times[int(0.9 * len(times))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--k", type=int, default=5, help="drafts a row in the verify columns")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results: dict[str, dict[str, float]] = {}
    columns = [(f"{n} rows", n, 0) for n in args.rows] + [
        (f"1 row, k={args.k}", args.k + 1, args.k)
    ]
    print(f"milliseconds a position, median (p90); vocabulary {args.vocab}, {args.threads} threads")
    print(f"{'':40s}" + "".join(f"{name:>18s}" for name, _, _ in columns))
    with torch.inference_mode():
        for flat in (False, True):
            for case, values in CASES.items():
                label = f"{case}{' (flat)' if flat else ''}"
                line = f"{label:40s}"
                results[label] = {}
                for name, count, k in columns:
                    logits = make_logits(count, args.vocab, flat)
                    median, p90 = time_case(logits, values, k, args.repeats)
                    results[label][name] = round(median, 4)
                    line += f"{median:10.3f} ({p90:5.2f})"
                print(line)
        logits = make_logits(args.rows[-1], args.vocab, False)
        start = time.perf_counter()
        for _ in range(args.repeats):
            nonfinite_rows(logits)
        check = (time.perf_counter() - start) * 1e3 / args.repeats / args.rows[-1]
    print(f"nonfinite_rows: {check:.4f} ms a row")
    print(json.dumps({"vocab": args.vocab, "ms_per_position": results, "nonfinite_rows_ms": check}))


if __name__ == "__main__":
    main()
