"""Milliseconds of a decode step on a CPU, with the compiled kernels and without them.

    python benchmarks/cpu_step.py MODEL... [--dtype bfloat16] [--batches 1 16] [--rounds 7]

MODEL is a directory or hub id. Each variant (``native``, ``torch``, and with ``--transformers`` its
``generate``) is a process of its own; they take turns, so that a change of the machine's speed
meets all of them. 64 random prompt tokens, greedy, no drafting. A step is the time of 65 output
tokens less that of one, over 64; the prompt is the time of one. Prints medians and the ratios to
``native``, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

PROMPT, STEPS = 64, 64
Generate = Callable[[list[list[int]], int], object]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--transformers", action="store_true", help="measure generate as well")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        serve(args.child, args.models[0], args.dtype)
        return
    variants = ["native", "torch", *(["transformers"] if args.transformers else [])]
    figures = [figure for model in args.models for figure in compare(model, variants, args)]
    print(json.dumps({"threads": torch.get_num_threads(), "figures": figures}))


def compare(model: str, variants: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Medians of every batch size; rounds go through the variants forwards, then backwards."""
    children = {name: start(name, model, args.dtype) for name in variants}
    figures = []
    for batch in args.batches:
        rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
        for turn in range(args.rounds):
            for name in variants if turn % 2 == 0 else variants[::-1]:
                rounds[name].append(ask(children[name], batch))
        for name in variants:
            ratios = [
                theirs[1] / ours[1]
                for theirs, ours in zip(rounds[name], rounds["native"], strict=True)
            ]
            prompt, step = (statistics.median(part) for part in zip(*rounds[name], strict=True))
            figures.append(
                {
                    "model": os.path.basename(model),
                    "batch": batch,
                    "variant": name,
                    "prompt_ms": round(prompt * 1e3, 2),
                    "step_ms": round(step * 1e3, 2),
                    "ratio": round(statistics.median(ratios), 3),
                    "ratios": sorted(round(ratio, 3) for ratio in ratios),
                }
            )
            print(
                f"{os.path.basename(model):30} batch {batch:3} {name:13} step {step * 1e3:7.2f} ms"
                f"  prompt {prompt * 1e3:8.2f} ms  step x {figures[-1]['ratio']:.2f}",
                flush=True,
            )
    for child in children.values():
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
    return figures


def start(variant: str, model: str, dtype: str) -> subprocess.Popen[str]:
    """A process that has loaded the model and answers batch sizes with times."""
    environment = {**os.environ, "PACELINE_NATIVE": "0" if variant == "torch" else "1"}
    command = [sys.executable, __file__, model, "--dtype", dtype, "--child", variant]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert child.stdout is not None
    if child.stdout.readline().strip() != "ready":
        raise SystemExit(f"the {variant} process ended; its message is above")
    return child


def ask(child: subprocess.Popen[str], batch: int) -> tuple[float, float]:
    """Seconds of a prompt pass and of a decode step."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{batch}\n")
    child.stdin.flush()
    prompt, step = map(float, child.stdout.readline().split())
    return prompt, step


def serve(variant: str, model: str, dtype: str) -> None:
    """The child: times what it is asked for until its input ends."""
    logging.disable(logging.CRITICAL)
    make = _transformers if variant == "transformers" else _paceline
    generate = make(model, dtype)
    generator = torch.Generator().manual_seed(0)

    def seconds(batch: int, count: int) -> float:
        ids = torch.randint(10, 500, (batch, PROMPT), generator=generator).tolist()
        begin = time.perf_counter()
        generate(ids, count)
        return time.perf_counter() - begin

    seconds(1, 3)
    print("ready", flush=True)
    for line in sys.stdin:
        batch = int(line)
        prompt = seconds(batch, 1)
        print(prompt, (seconds(batch, 1 + STEPS) - prompt) / STEPS, flush=True)


def _paceline(model: str, dtype: str) -> Generate:
    from paceline import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, max_model_len=256, enable_prefix_caching=False, max_num_seqs=64)

    def generate(ids: list[list[int]], count: int) -> object:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        return llm.generate(ids, params, use_tqdm=False)

    return generate


def _transformers(model: str, dtype: str) -> Generate:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))

    def generate(ids: list[list[int]], count: int) -> object:
        tokens = torch.tensor(ids)
        with torch.inference_mode():
            return loaded.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )

    return generate


if __name__ == "__main__":
    main()
