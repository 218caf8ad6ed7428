"""``paceline demo``: the whole story in a minute, with the tiny trained pair in the package.

Everything shown is measured while it runs: draft length against tokens per second, the same text
with speculation on and off, static against continuous batching, what a draft costs. It computes in
float32, so that equality can be checked token for token.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import sys
from collections.abc import Sequence

import torch

from paceline import LLM, SamplingParams
from paceline.bench.measure import ChosenLength, Run, measure
from paceline.log import configure_logging

TARGET, DRAFTER = "paceline/demo", "paceline/demo-draft"
LENGTHS = (0, 1, 3, 5, 8)
ROUNDS = 3
PROMPTS = [
    'import os\n\n\ndef read_file(path):\n    """Return the content of a file."""\n',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
]
WORTHWHILE = 1.3

NEXT = """\
Next, with your own model:
  paceline check MODEL --speculative-model DRAFTER --num-speculative-tokens 5
  paceline generate MODEL --speculative-model DRAFTER --num-speculative-tokens 5 --prompt "..."
MODEL and DRAFTER are local directories or hub ids, such as Qwen/Qwen2.5-1.5B-Instruct and
Qwen/Qwen2.5-0.5B-Instruct; without a drafter of the same family, --speculative-model "[ngram]"."""


def run(argv: Sequence[str]) -> int:
    """Run the demo; exit status 0, or 1 if speculation changed a text."""
    parser = argparse.ArgumentParser(prog="paceline demo", description=__doc__.split("\n")[0])
    parser.add_argument("--verbose", action="store_true", help="show the engines' log lines too")
    args = parser.parse_args(argv)
    configure_logging(logging.INFO if args.verbose else logging.WARNING)
    # Models this small lose more by waking a second thread than it computes.
    torch.set_num_threads(1)
    print("Paceline demo: a 6.5M-parameter model of Python code and its 1.1M-parameter drafter.")
    policy = ChosenLength(max(LENGTHS))
    with _open(
        speculative_model=DRAFTER, num_speculative_tokens=max(LENGTHS), policy=policy
    ) as llm:
        _stream(llm, policy)
        gain = _draft_lengths(llm, policy)
        same = _same_text(llm, policy)
        target_ms = _decode_ms(llm, policy)
    _batching()
    _cost(target_ms, gain)
    print(f"\n{NEXT}")
    return 0 if same else 1


def _open(model: str = TARGET, **options: object) -> LLM:
    return LLM(
        model,
        dtype="float32",
        max_model_len=512,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **{"max_num_seqs": 8, **options},  # type: ignore[arg-type]
    )


def _heading(text: str) -> None:
    print(f"\n== {text}")


def _stream(llm: LLM, policy: ChosenLength) -> None:
    _heading("One completion, streamed, k = 5")
    policy.k = 5
    print(PROMPTS[0], end="")
    shown = 0
    for output in llm.stream(PROMPTS[0], SamplingParams(temperature=0.7, seed=4, max_tokens=64)):
        text = output.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print()


def _draft_lengths(llm: LLM, policy: ChosenLength) -> float:
    """The draft length table; returns the best gain over k = 0."""
    _heading(f"Draft length vs tokens/s: one stream, greedy, median of {ROUNDS} interleaved rounds")
    greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    runs: dict[int, list[Run]] = {k: [] for k in LENGTHS}
    for _ in range(ROUNDS):
        for k in LENGTHS:
            policy.k = k
            runs[k] += [measure(llm, [prompt], greedy) for prompt in PROMPTS]
    print("  k  tokens/s  vs k = 0  tokens/pass  accepted by position")
    gains = {}
    plain = _speed(runs[0])
    for k in LENGTHS:
        gains[k] = _speed(runs[k]) / plain
        passes = sum(r.num_decode_passes for r in runs[k])
        # The first token of each completion comes from its prefill.
        per_pass = sum(r.num_tokens - 1 for r in runs[k]) / passes
        print(
            f"  {k}  {_speed(runs[k]):8.0f}  {gains[k]:7.2f}x  {per_pass:11.2f}  "
            f"{_positions(runs[k])}"
        )
    return max(gains.values())


def _speed(runs: list[Run]) -> float:
    """Median tokens per second of the rounds, each over all prompts."""
    size = len(PROMPTS)
    rounds = [runs[i : i + size] for i in range(0, len(runs), size)]
    return statistics.median(
        sum(r.num_tokens for r in one) / sum(r.seconds for r in one) for one in rounds
    )


def _positions(runs: list[Run]) -> str:
    """Accepted share by position over runs."""
    width = max(len(r.proposed_by_position) for r in runs)
    shares = []
    for i in range(width):
        proposed = sum(r.proposed_by_position[i] for r in runs if len(r.proposed_by_position) > i)
        accepted = sum(r.accepted_by_position[i] for r in runs if len(r.accepted_by_position) > i)
        shares.append(f"{accepted / proposed:.2f}")
    return " ".join(shares)


def _same_text(llm: LLM, policy: ChosenLength) -> bool:
    _heading("Same text: speculation on and off, token for token")
    same = True
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, seed=7, max_tokens=64, ignore_eos=True)
        texts = []
        for k in (0, 5):
            policy.k = k
            texts.append(measure(llm, PROMPTS, sampling).token_ids)
        equal = texts[0] == texts[1]
        same &= equal
        count = sum(len(ids) for ids in texts[0])
        verdict = "identical" if equal else "DIFFERENT: please report this"
        print(f"  temperature {temperature:g}: {count} tokens with k = 0 and k = 5 are {verdict}")
    return same


def _batching() -> None:
    """One in four requests is long: a static batch waits for it, a continuous one does not."""
    rng = random.Random(0)
    lengths = [96 if i % 4 == 0 else rng.randint(8, 16) for i in range(32)]
    _heading(
        "Batching: 32 requests, three in four of 8 to 16 tokens, one in four of 96; 8 at a time"
    )
    sampling = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    prompts = [PROMPTS[i % 2] for i in range(len(lengths))]
    speeds = {}
    for batching in ("static", "continuous"):
        with _open(batching=batching) as llm:
            result = measure(llm, prompts, sampling)
        speeds[batching] = result.tokens_per_second
        print(
            f"  {batching:10}  {result.tokens_per_second:6.0f} tokens/s in "
            f"{result.num_decode_passes} decode passes"
        )
    print(f"  continuous is {speeds['continuous'] / speeds['static']:.2f}x static")


def _decode_ms(llm: LLM, policy: ChosenLength) -> float:
    """Milliseconds of a plain decode step at one row."""
    policy.k = 0
    sampling = SamplingParams(temperature=0, max_tokens=33, ignore_eos=True)
    best = min(measure(llm, [[5]], sampling).seconds for _ in range(3))
    return best / 33 * 1e3


def _cost(target_ms: float, gain: float) -> None:
    _heading("What a draft costs")
    with _open(DRAFTER) as drafter:
        drafter_ms = _decode_ms(drafter, ChosenLength(0))
    ratio = target_ms / drafter_ms
    print(
        f"  one step at one row: target {target_ms:.1f} ms, drafter {drafter_ms:.1f} ms, "
        f"ratio {ratio:.1f}"
    )
    if gain < WORTHWHILE:
        print(
            f"  Speculation gained only {gain:.2f}x here. It pays when drafting k tokens costs "
            "much less than\n  the passes it saves: a target step should cost at least 5 drafter "
            f"steps, here {ratio:.1f};\n  and a busy machine stalls many short steps more than few "
            "long ones. Try again when it is idle."
        )
    else:
        print(f"  speculation gained {gain:.2f}x at its best draft length")


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
