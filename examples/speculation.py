#!/usr/bin/env python3
"""Three ways to decode, one text: without drafts, with a drafter model, with prompt lookup.

python examples/speculation.py [MODEL DRAFTER]
"""

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
    greedy, seen, plain = SamplingParams(temperature=0, max_tokens=64), set(), None
    for name, arguments in ways.items():
        with LLM(model=model, dtype="float32", **arguments) as llm:
            llm.generate(PROMPT, greedy, use_tqdm=False)  # the first run of an engine is slower
            start = time.perf_counter()
            output = llm.generate(PROMPT, greedy, use_tqdm=False)[0]
            seconds = time.perf_counter() - start
        plain = plain or seconds
        rate = output.metrics.speculative_decoding.acceptance_rate
        print(f"{name:10} {seconds:.3f} s, {plain / seconds:.2f} times as fast", end="")
        print("" if rate is None else f", acceptance {rate:.0%}")
        seen.add(tuple(output.outputs[0].token_ids))
    print("the same tokens" if len(seen) == 1 else f"{len(seen)} different outputs")


if __name__ == "__main__":
    main(*sys.argv[1:])
