#!/usr/bin/env python3
"""Complete a few prompts as one batch.

python examples/quickstart.py [MODEL]
"""

from __future__ import annotations

import sys

from paceline import LLM, SamplingParams

PROMPTS = ["The capital of France is", "def fibonacci(n):", "In a paceline the riders"]


def main(model: str = "Qwen/Qwen2.5-0.5B") -> None:
    with LLM(model=model) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.7, seed=0, max_tokens=48))
    for output in outputs:
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
