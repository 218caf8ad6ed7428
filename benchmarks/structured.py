"""What structured outputs cost: tokens per second with 0, 1 and all of 32 rows restricted.

Every request makes the same number of tokens: the restricted ones follow an expression, or a JSON
schema, that has no end before. Variants take turns in every round, so that a busy machine slows all
of them; a ratio is to the free batch of the same round.

    python benchmarks/structured.py [--model DIR] [--speculative-model DIR --k 3]

Prints a table for people and a JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from paceline import LLM, SamplingParams, StructuredOutputsParams

STRUCTURES: dict[str, dict[str, Any]] = {
    "regex": {"regex": "[ -~]{2000}"},
    "json": {
        "json": {"type": "array", "items": {"type": "string", "minLength": 20}, "minItems": 500},
        "disable_any_whitespace": True,
    },
}


def params_of(structure: str, restricted: int, rows: int, tokens: int) -> list[SamplingParams]:
    """One a row; the first ones are restricted."""
    form = StructuredOutputsParams(**STRUCTURES[structure])
    free: dict[str, Any] = {"temperature": 1.0, "max_tokens": tokens}
    return [
        SamplingParams(seed=row, structured_outputs=form, **free)
        if row < restricted
        else SamplingParams(seed=row, ignore_eos=True, **free)
        for row in range(rows)
    ]


def measure(llm: LLM, params: list[SamplingParams]) -> float:
    """Tokens per second of one batch."""
    prompts = ["def read(path):\n    "] * len(params)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    lengths = {len(output.outputs[0].token_ids) for output in outputs}
    if len(lengths) != 1:
        raise AssertionError(f"the rows made {sorted(lengths)} tokens instead of equally many")
    return lengths.pop() * len(outputs) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="paceline/demo")
    parser.add_argument("--speculative-model")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    drafter: dict[str, Any] = {}
    if args.speculative_model:
        drafter = {
            "speculative_model": args.speculative_model,
            "num_speculative_tokens": args.k,
        }
    variants = [("regex", 0), ("regex", 0), ("regex", 1), ("regex", args.rows)]
    variants += [("json", 1), ("json", args.rows)]
    names = ["free", "free again", "1 regex", f"{args.rows} regex", "1 json", f"{args.rows} json"]
    rates: dict[str, list[float]] = {name: [] for name in names}
    with LLM(args.model, max_num_seqs=args.rows, disable_log_stats=True, **drafter) as llm:
        asked = [params_of(kind, count, args.rows, args.tokens) for kind, count in variants]
        for params in asked:  # compiles, and warms up
            measure(llm, params)
        for _ in range(args.rounds):
            for name, params in zip(names, asked, strict=True):
                rates[name].append(measure(llm, params))
    print(f"{args.rows} rows of {args.tokens} tokens, {args.rounds} rounds")
    print(f"{'restricted rows':18s}{'tokens/s':>10s}   ratio to free: median (least, most)")
    ratios: dict[str, float] = {}
    for name in names:
        each = [mine / free for mine, free in zip(rates[name], rates["free"], strict=True)]
        ratios[name] = round(statistics.median(each), 3)
        rate = statistics.median(rates[name])
        print(f"{name:18s}{rate:10.0f}   {ratios[name]:.3f} ({min(each):.3f}, {max(each):.3f})")
    print(json.dumps({"tokens_per_second": rates, "ratios": ratios}))


if __name__ == "__main__":
    main()
