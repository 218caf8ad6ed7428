"""CPU speed beside transformers' ``generate``, as ratios of interleaved rounds in one process.

    LLM_TEST_MODELS=DIR python benchmarks/cpu.py [PART ...] [--rounds 5]

DIR holds smollm2-135m-instruct, qwen2.5-coder-0.5b-instruct and qwen2.5-coder-1.5b-instruct. All in
bfloat16, torch's own number of threads for both.

plain        64 random prompt tokens, 128 output tokens, greedy, no end of text, batch 1 and 16
drafter      1.5B with the 0.5B drafter, six coding prompts: draft lengths beside transformers
ngram        1.5B with n-gram lookup, three code edits: the same
batching     static against continuous: 256 requests on 16 rows, 3/4 of 32 to 64 and 1/4 of 512
start        process start to the first token of the 0.5B, imports included

Prints a table for people and a JSON line last. Needs transformers, which the package does too.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers

from paceline import LLM, SamplingParams
from paceline.bench.measure import ChosenLength, measure
from paceline.bench.spread import bounds_name, spread

SMOL, SMALL, LARGE = (
    "smollm2-135m-instruct",
    "qwen2.5-coder-0.5b-instruct",
    "qwen2.5-coder-1.5b-instruct",
)
LENGTHS = (0, 1, 3, 4, 5, 8)
NGRAM_LENGTHS = (0, 5, 10, 16)
EDIT_TOKENS = 144  # the edited code ends soon after
CODING = [
    "Write a Python function that merges two sorted lists.",
    "Write a Python class for a bank account with deposit and withdraw.",
    "Write a Python function that reads a CSV file and returns a list of dicts.",
    "Write a Python function that checks whether a string is a valid IPv4 address.",
    "Write a Python decorator that retries a function three times.",
    "Write a Python generator that yields prime numbers.",
]
CODE = '''import math


class Shape:
    """Something flat with an area and a perimeter."""

    def area(self):
        raise NotImplementedError

    def perimeter(self):
        raise NotImplementedError


class Circle(Shape):
    def __init__(self, radius):
        self.radius = radius

    def area(self):
        return math.pi * self.radius ** 2

    def perimeter(self):
        return 2 * math.pi * self.radius


class Rectangle(Shape):
    def __init__(self, width, height):
        self.width = width
        self.height = height

    def area(self):
        return self.width * self.height

    def perimeter(self):
        return 2 * (self.width + self.height)
'''
EDITS = [
    "Rename the method `area` to `surface` in this code",
    "Add a return annotation (float) to `perimeter` of `Circle` and `Rectangle` in this code",
    "Rename the class `Shape` to `Figure` in this code",
]


def model_path(name: str) -> str:
    """Where a model lies; exits with a message when it does not."""
    path = os.path.join(os.environ.get("LLM_TEST_MODELS", ""), name)
    if not os.path.isdir(path):
        sys.exit(
            f"no model at {path!r}. hint: set LLM_TEST_MODELS to a directory that holds {name}"
        )
    return path


def open_engine(name: str, **options: Any) -> LLM:
    """An engine for one benchmark: no prefix cache, so that each round computes its prompts."""
    settings = {"max_model_len": 1024, "max_num_seqs": 16, **options}
    return LLM(
        model_path(name),
        dtype="bfloat16",
        enable_prefix_caching=False,
        disable_log_stats=True,
        **settings,
    )


class Reference:
    """transformers' greedy ``generate`` of the same model."""

    def __init__(self, name: str) -> None:
        path = model_path(name)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)

    def __call__(self, prompts: list[list[int]], tokens: int) -> float:
        """Output tokens per second for prompts of one length."""
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - start
        assert out.shape[1] == ids.shape[1] + tokens
        return len(prompts) * tokens / seconds


def speed(
    llm: LLM, prompts: list[list[int]], sampling: SamplingParams | list[SamplingParams]
) -> float:
    """Our output tokens per second."""
    return measure(llm, prompts, sampling).tokens_per_second


def interleave(variants: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """One value of every variant a round, the order turned from round to round."""
    names = list(variants)
    found: dict[str, list[float]] = {name: [] for name in names}
    for variant in variants.values():  # not counted
        variant()
    for turn in range(rounds):
        for i in range(len(names)):
            name = names[(i + turn) % len(names)]
            found[name].append(variants[name]())
    return found


def compare(title: str, found: dict[str, list[float]]) -> dict[str, Any]:
    """Print tokens/s and each variant's ratio to the first, taken round by round."""
    base, *_ = found
    rounds = len(found[base])
    print(f"\n{title}; median of {rounds} rounds ({bounds_name(rounds)})")
    rows = {}
    for name, values in found.items():
        rate = spread(values)
        ratio = spread([value / other for value, other in zip(values, found[base], strict=True)])
        rows[name] = {
            "tokens_per_second": values,
            "ratio": [ratio.median, ratio.low, ratio.high],
        }
        print(
            f"  {name:24} {rate.median:8.1f} tokens/s ({rate.low:.1f} to {rate.high:.1f})"
            f"  {ratio.median:6.2f}x ({ratio.low:.2f} to {ratio.high:.2f})",
            flush=True,
        )
    return rows


def plain(rounds: int) -> dict[str, Any]:
    """Plain decoding, batch 1 and 16."""
    results = {}
    greedy = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    for name in (SMOL, SMALL):
        reference = Reference(name)
        with open_engine(name) as llm:
            for batch in (1, 16):
                rng = random.Random(batch)
                prompts = [[rng.randrange(100, 40000) for _ in range(64)] for _ in range(batch)]
                found = interleave(
                    {
                        "transformers": partial(reference, prompts, 128),
                        "paceline": partial(speed, llm, prompts, greedy),
                    },
                    rounds,
                )
                results[f"{name} b{batch}"] = compare(f"{name}, batch {batch}", found)
    return results


def drafter(rounds: int) -> dict[str, Any]:
    """A small model drafts, one stream. Every prompt is a round."""
    return _speculation("0.5B drafter, coding prompts", model_path(SMALL), LENGTHS, CODING, 96)


def ngram(rounds: int) -> dict[str, Any]:
    """Prompt lookup on code edits, one stream. Every edit is a round."""
    edits = [
        f"{text} and reply with the whole code only.\n\n```python\n{CODE}```" for text in EDITS
    ]
    return _speculation("n-gram lookup, code edits", "[ngram]", NGRAM_LENGTHS, edits, EDIT_TOKENS)


def _speculation(
    title: str, drafter: str, lengths: tuple[int, ...], texts: list[str], tokens: int
) -> dict[str, Any]:
    """Draft length against tokens/s beside transformers' and our own plain decoding."""
    reference = Reference(LARGE)
    policy = ChosenLength(max(lengths))
    with open_engine(
        LARGE,
        max_num_seqs=1,
        speculative_model=drafter,
        num_speculative_tokens=max(lengths),
        policy=policy,
    ) as llm:
        found, decode, passes = _draft_lengths(llm, policy, reference, (texts, tokens), lengths)
    rows = compare(f"1.5B, {title}, against transformers", found)
    del found["transformers"]
    own = compare(f"1.5B, {title}, against own plain decoding", found)
    without = compare(f"1.5B, {title}, the same without prefill", decode)
    print(f"  tokens a pass: {passes}")
    return {
        "transformers": rows,
        "own": own,
        "own_without_prefill": without,
        "tokens_per_pass": passes,
    }


def _draft_lengths(
    llm: LLM,
    policy: ChosenLength,
    reference: Reference,
    work: tuple[list[str], int],
    lengths: tuple[int, ...],
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[int, float]]:
    """Tokens per second of each variant for each text, ours without prefill, tokens a pass by k."""
    texts, tokens = work
    tokenizer = llm.get_tokenizer()
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    passes = dict.fromkeys(lengths, 0)
    decode: dict[str, list[float]] = {f"k = {k}": [] for k in lengths}

    def ours(k: int, prompt: list[int]) -> float:
        policy.k = k
        run = measure(llm, [prompt], greedy)
        passes[k] += run.num_decode_passes
        seconds = run.seconds - float(run.first_token_seconds[0])
        decode[f"k = {k}"].append((run.num_tokens - 1) / seconds)
        return run.tokens_per_second

    found: dict[str, list[float]] = {"transformers": [], **{f"k = {k}": [] for k in lengths}}
    for turn, text in enumerate(texts):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True
        )
        variants: dict[str, Callable[[], float]] = {
            "transformers": partial(reference, [prompt], tokens),
            **{f"k = {k}": partial(ours, k, prompt) for k in lengths},
        }
        names = list(variants)
        for i in range(len(names)):
            name = names[(i + turn) % len(names)]
            found[name].append(variants[name]())
    per_pass = {k: round(len(texts) * (tokens - 1) / n, 2) for k, n in passes.items()}
    return found, decode, per_pass


def batching(rounds: int) -> dict[str, Any]:
    """256 requests of very different lengths on 16 rows; minutes a round, so few of them."""
    rng = random.Random(0)
    lengths = [512 if i % 4 == 0 else rng.randint(32, 64) for i in range(256)]
    rng.shuffle(lengths)
    sampling = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    prompts = [[rng.randrange(100, 40000) for _ in range(32)] for _ in lengths]
    engines = {mode: open_engine(SMOL, batching=mode) for mode in ("static", "continuous")}
    found: dict[str, list[float]] = {mode: [] for mode in engines}
    for turn in range(rounds):
        for mode in sorted(engines, reverse=turn % 2 == 0):
            found[mode].append(speed(engines[mode], prompts, sampling))
    for llm in engines.values():
        llm.close()
    return compare(f"Batching, {SMOL}, 256 requests on 16 rows", found)


FIRST_TOKEN = """
import sys
from paceline import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="bfloat16", max_model_len=1024, disable_log_stats=True)
output = llm.generate(["def main():"], SamplingParams(max_tokens=1), use_tqdm=False)[0]
print(output.outputs[0].text)
"""


def start(rounds: int) -> dict[str, Any]:
    """Seconds from process start to the end of a process that prints one token."""
    seconds = []
    for turn in range(rounds + 1):
        begin = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", FIRST_TOKEN, model_path(SMALL)], check=True, capture_output=True
        )
        if turn:  # the first fills the page cache
            seconds.append(time.perf_counter() - begin)
    print(
        f"\nStart to first token and exit, {SMALL}: median {statistics.median(seconds):.2f} s "
        f"({min(seconds):.2f} to {max(seconds):.2f}) of {rounds}"
    )
    return {"seconds": seconds}


def main() -> None:
    parts = {f.__name__: f for f in (plain, drafter, ngram, batching, start)}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    results = {name: parts[name](args.rounds) for name in args.parts or parts}
    about = {
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps({"benchmark": "cpu", "rounds": args.rounds, **about, **results}))


if __name__ == "__main__":
    main()
