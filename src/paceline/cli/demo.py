"""``paceline demo``: the whole story in half a minute, with the tiny trained pair in the package.

Everything shown is measured while it runs: draft length against tokens per second, the same text
with speculation on and off, static against continuous batching, what a draft costs. It computes in
float32, so that equality can be checked token for token.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Sequence

from paceline import LLM, SamplingParams
from paceline.bench.engines import describe_machine
from paceline.bench.measure import ChosenLength, Run, measure
from paceline.bench.spread import Spread, bounds_name, spread
from paceline.cli.parser import Parser
from paceline.log import configure_logging

TARGET, DRAFTER = "paceline/demo", "paceline/demo-draft"
LENGTHS = (0, 1, 3, 5, 8)
SAMPLED_LENGTHS = (0, 3)  # at temperature 1, where fewer drafts are accepted
ROUNDS = 3
BATCHING_ROUNDS = 2
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
    parser = Parser(
        prog="paceline demo",
        description="The whole story in half a minute, with the tiny trained pair in the package.",
    )
    parser.add_argument("--verbose", action="store_true", help="show the engines' log lines too")
    args = parser.parse(argv)
    configure_logging(logging.INFO if args.verbose else logging.WARNING)
    print("Paceline demo: a 6.5M-parameter model of Python code and its 1.1M-parameter drafter,")
    policy = ChosenLength(max(LENGTHS))
    with _open(
        speculative_model=DRAFTER, num_speculative_tokens=max(LENGTHS), policy=policy
    ) as llm:
        machine = describe_machine(llm.engine.config)
        threads = ""
        if machine["device"] == "cpu":
            threads = f", {machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
        print(f"float32{threads}, on {machine['device_name']} ({machine['cores']} CPU cores).")
        _stream(llm, policy)
        greedy = _rounds(llm, policy, LENGTHS, temperature=0)
        sampled = _rounds(llm, policy, SAMPLED_LENGTHS, temperature=1)
        _show_draft_lengths(greedy, sampled)
        same = _same_text(greedy, sampled)
        target_ms = _decode_ms(llm, policy)
    _batching()
    _cost(target_ms, greedy, sampled)
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
    sampling = SamplingParams(temperature=0.7, seed=4, max_tokens=64)
    policy.k = 5
    _heading(f"One completion, streamed: k = 5, temperature {sampling.temperature:g}")
    print(PROMPTS[0], end="")
    shown = 0
    for output in llm.stream(PROMPTS[0], sampling):
        text = output.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print()


# ---- draft lengths -------------------------------------------------------------------------------

# Draft length -> rounds -> a run for each prompt.
Measured = dict[int, list[list[Run]]]


def _rounds(
    llm: LLM, policy: ChosenLength, lengths: Sequence[int], *, temperature: float
) -> Measured:
    """Interleaved, so that a machine that grows slower hits every draft length alike."""
    sampling = SamplingParams(temperature=temperature, seed=7, max_tokens=64, ignore_eos=True)
    measured: Measured = {k: [] for k in lengths}
    for _ in range(ROUNDS):
        for k in lengths:
            policy.k = k
            measured[k].append([measure(llm, [prompt], sampling) for prompt in PROMPTS])
    return measured


def _show_draft_lengths(greedy: Measured, sampled: Measured) -> None:
    _heading(
        f"Draft length vs tokens/s: one stream, median of {ROUNDS} interleaved rounds "
        f"({bounds_name(ROUNDS)})"
    )
    head = (
        f"    k  {'tokens/s':22}  {'vs k = 0':20}  tokens/pass  accepted by position, % of drafts"
    )
    for temperature, measured in (("0 (greedy)", greedy), ("1", sampled)):
        print(f"  temperature {temperature}")
        print(head)
        for k, rounds in measured.items():
            speed = spread(_speeds(rounds))
            gain = _gain(measured, k)
            runs = [run for one in rounds for run in one]
            # The first token of each completion comes from its prefill.
            tokens = sum(run.num_tokens - 1 for run in runs)
            per_pass = tokens / sum(run.num_decode_passes for run in runs)
            speeds = f"{speed.median:.0f} ({speed.low:.0f} to {speed.high:.0f})"
            gains = f"{gain.median:.2f}x ({gain.low:.2f} to {gain.high:.2f})" if k else "1"
            row = f"    {k}  {speeds:22}  {gains:20}  {per_pass:11.2f}  {_positions(runs)}"
            print(row.rstrip())
    print("  Each ratio is taken within a round. Temperature 1 holds where nobody names another.")


def _speeds(rounds: list[list[Run]]) -> list[float]:
    """Tokens per second of each round, over all prompts."""
    return [sum(run.num_tokens for run in one) / sum(run.seconds for run in one) for one in rounds]


def _gain(measured: Measured, k: int) -> Spread:
    """How many times as fast as k = 0, taken within each round."""
    pairs = zip(_speeds(measured[k]), _speeds(measured[0]), strict=True)
    return spread([speed / plain for speed, plain in pairs])


def _positions(runs: Sequence[Run]) -> str:
    """Percent of the rounds that accepted a draft at each position, of those that proposed it."""
    width = max(len(run.proposed_by_position) for run in runs)
    shares = []
    for i in range(width):
        deep = [run for run in runs if len(run.proposed_by_position) > i]
        proposed = sum(int(run.proposed_by_position[i]) for run in deep)
        accepted = sum(int(run.accepted_by_position[i]) for run in deep)
        shares.append(f"{accepted / proposed:.0%}"[:-1])
    return " ".join(shares)


def _same_text(greedy: Measured, sampled: Measured) -> bool:
    """Whether every run above gave the tokens of the first with k = 0."""
    _heading("Same text: speculation on and off, token for token")
    same = True
    for temperature, measured in ((0, greedy), (1, sampled)):
        texts = [[run.token_ids for run in one] for rounds in measured.values() for one in rounds]
        equal = all(text == texts[0] for text in texts)
        same &= equal
        count = sum(len(ids) for run in texts[0] for ids in run)
        lengths = ", ".join(str(k) for k in measured if k)
        verdict = "identical" if equal else "DIFFERENT: please report this"
        print(
            f"  temperature {temperature}: {count} tokens with k = 0 and k = {lengths}: {verdict}"
        )
    return same


# ---- batching and costs --------------------------------------------------------------------------


def _batching() -> None:
    """One in four requests is long: a static batch waits for it, a continuous one does not."""
    rng = random.Random(0)
    lengths = [96 if i % 4 == 0 else rng.randint(8, 16) for i in range(32)]
    _heading(
        "Batching: 32 requests, three in four of 8 to 16 tokens, one in four of 96; 8 at a time"
    )
    sampling = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    prompts = [PROMPTS[i % 2] for i in range(len(lengths))]
    runs: dict[str, list[Run]] = {"static": [], "continuous": []}
    # Both are open at once, so neither may take what memory there is.
    pool_bytes = 128 * 1024**2
    with (
        _open(batching="static", kv_cache_memory_bytes=pool_bytes) as static,
        _open(batching="continuous", kv_cache_memory_bytes=pool_bytes) as continuous,
    ):
        for _ in range(BATCHING_ROUNDS):
            runs["static"].append(measure(static, prompts, sampling))
            runs["continuous"].append(measure(continuous, prompts, sampling))
    for batching, found in runs.items():
        speed = spread([run.tokens_per_second for run in found])
        print(
            f"  {batching:10}  {speed.low:.0f} to {speed.high:.0f} tokens/s in "
            f"{found[0].num_decode_passes} decode passes"
        )
    pairs = zip(runs["continuous"], runs["static"], strict=True)
    gain = spread([one.tokens_per_second / other.tokens_per_second for one, other in pairs])
    print(
        f"  continuous is {gain.median:.2f} times ({gain.low:.2f} to {gain.high:.2f}) as fast as "
        f"static, in {BATCHING_ROUNDS} interleaved rounds"
    )


def _decode_ms(llm: LLM, policy: ChosenLength) -> float:
    """Milliseconds of a plain decode step at one row."""
    policy.k = 0
    sampling = SamplingParams(temperature=0, max_tokens=33, ignore_eos=True)
    best = min(measure(llm, [[5]], sampling).seconds for _ in range(3))
    return best / 33 * 1e3


def _cost(target_ms: float, greedy: Measured, sampled: Measured) -> None:
    _heading("What a draft costs, and whether it paid")
    with _open(DRAFTER) as drafter:
        drafter_ms = _decode_ms(drafter, ChosenLength(0))
    ratio = target_ms / drafter_ms
    print(
        f"  one step at one row, best of 3: target {target_ms:.1f} ms, drafter {drafter_ms:.1f} "
        f"ms, ratio {ratio:.1f}"
    )
    best = max((k for k in greedy if k), key=lambda k: _gain(greedy, k).median)
    gain = _gain(greedy, best)
    print(f"  {verdict('temperature 0', best, gain)}")
    for k in SAMPLED_LENGTHS[1:]:
        print(f"  {verdict('temperature 1', k, _gain(sampled, k))}")
    if gain.median < WORTHWHILE:
        print(
            "  Speculation pays when drafting k tokens costs much less than the passes it saves: "
            "a target\n  step should cost at least 5 drafter steps, here "
            f"{ratio:.1f}; and a busy machine stalls many short\n  steps more than few long ones. "
            "Try again when it is idle."
        )


def verdict(where: str, k: int, gain: Spread) -> str:
    """One line: faster, slower, or that the rounds disagree. gain: over k = 0."""
    bounds = f"{gain.low:.2f} to {gain.high:.2f}"
    found = f"{where}: k = {k} is {gain.median:.2f} times ({bounds}) as fast as k = 0"
    if gain.low <= 1 <= gain.high:
        return f"{found}: the rounds disagree on whether it pays"
    return f"{found}: {'a gain' if gain.low > 1 else 'a loss'} in every round"


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
