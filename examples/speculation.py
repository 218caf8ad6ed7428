#!/usr/bin/env python3
"""Three ways to decode, one text: without drafts, with a drafter model, with prompt lookup.

python examples/speculation.py [MODEL DRAFTER]
"""

from __future__ import annotations

import sys
import time
from typing import Any

from paceline import LLM, SamplingParams

PROMPT = "for number in range(10):\n    print(number)\n\nfor number in range(20):\n"


def main(model: str = "Qwen/Qwen2.5-1.5B", drafter: str = "Qwen/Qwen2.5-0.5B") -> None:
    ways: dict[str, dict[str, Any]] = {
        "no drafts": {},
        "drafter": {"speculative_model": drafter, "num_speculative_tokens": 3},
        "lookup": {"speculative_model": "[ngram]", "num_speculative_tokens": 5},
    }
    seen = set()
    for name, arguments in ways.items():
        with LLM(model=model, dtype="float32", **arguments) as llm:
            start = time.perf_counter()
            output = llm.generate(PROMPT, SamplingParams(seed=1, max_tokens=64))[0]
            seconds = time.perf_counter() - start
        rate = output.metrics.speculative_decoding.acceptance_rate
        print(f"{name:10} {seconds:6.2f} s, acceptance {'-' if rate is None else f'{rate:.0%}'}")
        seen.add(tuple(output.outputs[0].token_ids))
    print("the same tokens" if len(seen) == 1 else f"{len(seen)} different outputs")


if __name__ == "__main__":
    main(*sys.argv[1:])
