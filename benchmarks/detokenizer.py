#!/usr/bin/env python3
"""Cost of turning new ids into text: 256 sequences that each get 4 ids a step.

The ids are an encoded text for every sequence, cut into runs of 4. Measured: the ``feed`` of all
sequences in one step, without stop strings, with two of them, and with a delta for a stream too.
The goal is 2 ms a step for byte-level tokenizers (Qwen, Llama 3). The last line is JSON.

    python benchmarks/detokenizer.py [MODEL_DIR]     (default: the tokenizer of the tiny model)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from paceline.engine.stop_checker import SequenceText
from paceline.engine.tokenizer import Tokenizer

TEXT = (
    "def quicksort(items):\n    if len(items) < 2:\n        return items\n"
    "快速排序选择一个基准，把数组分成两部分。🙂 The pivot splits the list into two parts, "
    "and each of them is sorted in the same way. "
)


def load(path: str | None) -> Tokenizer:
    if path is not None:
        return Tokenizer.load(path)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    from tiny_model import write_tiny_model

    with tempfile.TemporaryDirectory() as directory:
        return Tokenizer.load(write_tiny_model(directory))


def measure(
    tokenizer: Tokenizer, stop: list[str], stream: bool, num_seqs: int, run: int, steps: int
) -> float:
    """Median milliseconds of a step."""
    ids = tokenizer.encode(TEXT * (steps * run // 40 + 2))
    texts = [SequenceText(tokenizer, stop=stop) for _ in range(num_seqs)]
    times = []
    for step in range(steps):
        # Every sequence is at another place of the text.
        runs = [
            ids[(offset := step * run + index % 16) : offset + run] for index in range(num_seqs)
        ]
        begin = time.perf_counter()
        for text, new_ids in zip(texts, runs, strict=True):
            text.feed(new_ids)
            if stream:
                text.next_delta()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", metavar="MODEL_DIR")
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--run", type=int, default=4, help="new ids a sequence and step")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    tokenizer = load(arguments.model)
    stops = ["\n\nUser:", "</answer>"]
    cases = {"plain": ([], False), "stop": (stops, False), "stop+stream": (stops, True)}
    result: dict[str, float] = {}
    print(f"{arguments.num_seqs} sequences, {arguments.run} new ids each, ms a step (median)")
    for name, (stop, stream) in cases.items():
        milliseconds = measure(
            tokenizer, stop, stream, arguments.num_seqs, arguments.run, arguments.steps
        )
        result[name] = round(milliseconds, 3)
        print(f"  {name:12} {milliseconds:7.3f}")
    print(json.dumps({"benchmark": "detokenizer", "ms": result, **vars(arguments)}))


if __name__ == "__main__":
    main()
