"""Does it pay to truncate in the drafter? Acceptance and time with and without, interleaved.

The target applies top_p, top_k and min_p; the drafter may leave them out, since a draft only has to
hit what the target samples. This script runs the same seeded requests both ways.

    python benchmarks/drafter_truncation.py [TARGET DRAFTER] [--rounds 3] [--tokens 128]

Prints a table for people and a JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any
from unittest.mock import patch

from paceline import LLM, SamplingParams
from paceline.sample.sampler import Sampler

PROMPTS = [
    "def quicksort(arr):\n",
    "import json\n\ndef load_config(path):\n",
    "class LinkedList:\n    def __init__(self):\n",
    "# Parse a CSV file and sum a column\n",
]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    {"temperature": 1.0, "top_k": 40},
]


def run(llm: LLM, setting: dict[str, Any], tokens: int, truncate: bool) -> tuple[float, float]:
    """Acceptance and seconds of one pass over the prompts, two seeds each."""
    sample = Sampler.sample

    def drafter_truncates(self: Sampler, *args: Any, **options: Any) -> Any:
        if "truncate" in options:  # only the drafter passes it
            options["truncate"] = truncate
        return sample(self, *args, **options)

    stats = llm.engine.stats
    proposed, accepted = stats.num_draft_tokens, stats.num_accepted_tokens
    params = [
        SamplingParams(seed=seed, max_tokens=tokens, ignore_eos=True, **setting)
        for seed in range(2 * len(PROMPTS))
    ]
    start = time.perf_counter()
    with patch.object(Sampler, "sample", drafter_truncates):
        llm.generate(PROMPTS * 2, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    share = (stats.num_accepted_tokens - accepted) / (stats.num_draft_tokens - proposed)
    return share, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", nargs="?", default="paceline/demo")
    parser.add_argument("drafter", nargs="?", default="paceline/demo-draft")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    rows = []
    with LLM(
        args.target,
        speculative_model=args.drafter,
        num_speculative_tokens=4,
        max_num_seqs=8,
        max_model_len=1024,
        disable_log_stats=True,
    ) as llm:
        for setting in SETTINGS:
            runs: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
            for _ in range(args.rounds):
                for truncate in (False, True):
                    runs[truncate].append(run(llm, setting, args.tokens, truncate))
            ratios = [a[1] / b[1] for a, b in zip(runs[False], runs[True], strict=True)]
            rows.append(
                {
                    **setting,
                    "acceptance": runs[False][0][0],
                    "acceptance_truncated": runs[True][0][0],
                    "speed_ratio": statistics.median(ratios),
                    "speed_ratio_range": [min(ratios), max(ratios)],
                }
            )
    print("setting, acceptance without and with drafter truncation, speed with / without (range)")
    for row, setting in zip(rows, SETTINGS, strict=True):
        low, high = row["speed_ratio_range"]
        print(
            f"  {setting!s:56} {row['acceptance']:.3f} {row['acceptance_truncated']:.3f}"
            f"  {row['speed_ratio']:.2f} ({low:.2f} to {high:.2f})"
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
