"""The decode step on a GPU: tokens/s by batch and draft length, idle time, mixed load, start-up.

    python benchmarks/gpu.py [decode mixed idle start] [--target qwen2.5-7b --drafter qwen2.5-0.5b]

Writes synthetic pairs of these shapes (``paceline synth``), whose acceptance is known exactly and
whose greedy output is checked token for token. bfloat16, greedy, prompts of 128, outputs of 256,
prefill included; variants of one engine take turns, and an engine without a drafter runs beside the
one with it.

decode  every batch and k at both acceptances, and k = 0 against an engine without a drafter; what
        graphs took
mixed   256 requests, input and output uniform between 100 and 1024
idle    decode iterations without drafts at every batch: time between them on the device, and how
        near they come to reading weights and cached K and V at the card's copy bandwidth; the first
        of both at batch 1 and 64 with drafts
start   process start to first token, caches of compiled kernels cold and warm

Prints tables for people and a JSON line last.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from latency import copy_bandwidth
from paceline import LLM, SamplingParams
from paceline.bench.measure import ChosenLength, Run, measure
from paceline.synth.shapes import find_shape
from paceline.worker.decode_graphs import DecodeGraphs
from paceline.worker.decode_step import Scores

COMMAND = "import sys; from paceline.cli.main import main; sys.exit(main())"
BATCHES = (1, 4, 16, 64, 256)
PROMPT, OUTPUT = 128, 256
KV_BYTES = 40 * 10**9
_PROMPT_STEPS = 16  # iterations at the beginning, between which prompts are computed


class Pair:
    """A synthetic target and drafter, made on first use."""

    def __init__(self, root: Path, target: str, drafter: str, acceptance: float) -> None:
        self.path = root / f"{acceptance:g}"
        self.acceptance = acceptance
        command = ["synth", "--target", target, "--drafter", drafter, "--out", str(self.path)]
        command += ["--acceptance", str(acceptance)]
        if not (self.path / "drafter" / "config.json").exists():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", COMMAND, *command], check=True)
            print(f"wrote {self.path} in {time.perf_counter() - start:.1f} s", flush=True)
        self.next_ids = np.load(self.path / "target" / "next_ids.npy")
        on_cycle = np.unique(self.next_ids)
        self.words = on_cycle[np.isin(self.next_ids[on_cycle], on_cycle)]

    def open(self, policy: ChosenLength | None, **options: Any) -> LLM:
        """An engine of the pair, or of the target alone without a policy."""
        if policy is not None:
            options |= {
                "speculative_model": str(self.path / "drafter"),
                "num_speculative_tokens": policy.max_k,
                "policy": policy,
            }
        settings = {"max_model_len": 4096, "kv_cache_memory_bytes": KV_BYTES, **options}
        return LLM(
            str(self.path / "target"),
            device="cuda",
            dtype="bfloat16",
            enable_prefix_caching=False,
            disable_log_stats=True,
            **settings,
        )

    def prompts(self, lengths: list[int], seed: int) -> list[list[int]]:
        """Random prompts of the model's words."""
        rng = np.random.default_rng(seed)
        return [rng.choice(self.words, n).tolist() for n in lengths]

    def check(self, prompts: list[list[int]], run: Run) -> float:
        """Share of output tokens that follow the map from the token before."""
        right = total = 0
        for prompt, ids in zip(prompts, run.token_ids, strict=True):
            before = np.array([prompt[-1], *ids[:-1]])
            right += int((self.next_ids[before] == np.array(ids)).sum())
            total += len(ids)
        return right / total


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def one_by_one(llm: LLM, prompts: list[list[int]]) -> tuple[float, float, list[Run]]:
    """Tokens per second and tokens a pass of requests run one after another."""
    runs = [measure(llm, [prompt], greedy(OUTPUT)) for prompt in prompts]
    passes = sum(r.num_decode_passes for r in runs)
    per_pass = sum(r.num_tokens - 1 for r in runs) / passes
    return sum(r.num_tokens for r in runs) / sum(r.seconds for r in runs), per_pass, runs


def at_once(llm: LLM, prompts: list[list[int]]) -> tuple[float, float, list[Run]]:
    """The same for a batch; tokens a pass and row."""
    run = measure(llm, prompts, greedy(OUTPUT))
    per_pass = 1 + run.accepted_by_position.sum() / max(run.proposed_by_position.max(initial=0), 1)
    return run.tokens_per_second, float(per_pass), [run]


def decode(pairs: list[Pair], args: argparse.Namespace) -> dict[str, Any]:
    """Every batch and k; rounds interleaved."""
    results: dict[str, Any] = {}
    with pairs[0].open(None) as plain:
        for pair in pairs:
            policy = ChosenLength(max(args.k))
            with pair.open(policy) as llm:
                for batch in args.batch:
                    rows = _one_batch(pair, batch, plain, llm, policy, args)
                    results[f"acceptance {pair.acceptance:g}, batch {batch}"] = rows
                graphs = llm.engine.core.runner.decode.graphs
                made = {"count": len(graphs), "seconds": graphs.seconds, "bytes": graphs.num_bytes}
                results[f"acceptance {pair.acceptance:g}, graphs"] = made
                print(
                    f"\n{made['count']} graphs, {made['seconds']:.1f} s and "
                    f"{made['bytes'] / 2**30:.2f} GiB to capture",
                    flush=True,
                )
    return results


def _one_batch(
    pair: Pair, batch: int, plain: LLM, llm: LLM, policy: ChosenLength, args: argparse.Namespace
) -> dict[str, Any]:
    run = one_by_one if batch == 1 else at_once
    count = args.pooled if batch == 1 else batch
    variants: dict[str, tuple[LLM, int]] = {"no drafter": (plain, 0)}
    variants |= {f"k = {k}": (llm, k) for k in args.k}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    right = 1.0
    for turn in range(args.rounds + 1):
        prompts = pair.prompts([PROMPT] * (2 if not turn and batch == 1 else count), turn)
        for i in range(len(variants)):
            name = list(variants)[(i + turn) % len(variants)]
            engine, policy.k = variants[name]
            # Luck with drafts needs many prompts; without drafts few are enough.
            used = prompts[:4] if batch == 1 and not policy.k else prompts
            speed, per_pass, runs = run(engine, used)
            if batch > 1:
                right = min(right, pair.check(used, runs[0]))
            else:
                right = min(right, *(pair.check([p], r) for p, r in zip(used, runs, strict=True)))
            if turn:  # the first compiles and captures
                found[name].append((speed, per_pass))
    print(f"\nacceptance {pair.acceptance:g}, batch {batch}: {right:.2%} of tokens as the map says")
    rows = {}
    base = [speed for speed, _ in found["no drafter"]]
    for name, values in found.items():
        speeds = [speed for speed, _ in values]
        ratio = statistics.median(a / b for a, b in zip(speeds, base, strict=True))
        print(
            f"  {name:10} {statistics.median(speeds):9.1f} tokens/s ({min(speeds):.1f} to "
            f"{max(speeds):.1f})  {ratio:5.2f}x  {values[0][1]:.2f} tokens a pass",
            flush=True,
        )
        rows[name] = {"tokens_per_second": speeds, "tokens_per_pass": values[0][1]}
    return {"right": right, "variants": rows}


def mixed(pairs: list[Pair], args: argparse.Namespace) -> dict[str, Any]:
    """Requests of very different lengths."""
    pair = pairs[0]
    rng = np.random.default_rng(0)
    inputs, outputs = (rng.integers(100, 1025, 256).tolist() for _ in range(2))
    sampling = [greedy(n) for n in outputs]
    speeds = []
    with pair.open(None) as llm:
        for turn in range(args.rounds + 1):
            run = measure(llm, pair.prompts(inputs, turn), sampling)
            if turn:
                speeds.append(run.tokens_per_second)
    print(
        f"\nmixed: {sum(inputs)} in, {sum(outputs)} out: {statistics.median(speeds):.0f} tokens/s "
        f"({min(speeds):.0f} to {max(speeds):.0f})",
        flush=True,
    )
    return {"tokens_per_second": speeds}


def idle(pairs: list[Pair], args: argparse.Namespace) -> dict[str, Any]:
    """Share of time in which the device waits between decode iterations, and of the bound."""
    results = {}
    shape, bandwidth = find_shape(args.target), copy_bandwidth()
    policy = ChosenLength(max(args.k))
    cases = [(batch, 0) for batch in args.batch]
    cases += [(batch, policy.max_k) for batch in (1, 64) if policy.max_k]
    with pairs[0].open(policy) as llm:
        for batch, policy.k in cases:
            prompts = pairs[0].prompts([PROMPT] * batch, 1)
            measure(llm, prompts, greedy(64))
            gap, busy = _between(lambda p=prompts: measure(llm, p, greedy(OUTPUT)))
            found = {"idle": gap, "iteration_ms": busy}
            line = (
                f"idle, batch {batch}, k = {policy.k}: {gap:.2%} of an iteration of {busy:.3f} ms"
            )
            if not policy.k:
                read = 2 * shape.num_parameters_read
                read += batch * (PROMPT + OUTPUT // 2) * shape.arch().kv_bytes_per_token(2)
                found["of_bandwidth"] = read / bandwidth / (busy * 1e-3)
                line += f", {found['of_bandwidth']:.0%} of the bandwidth bound"
            results[f"batch {batch}, k = {policy.k}"] = found
            print(line, flush=True)
    return {"copy_bandwidth": bandwidth, **results}


def _between(work: Callable[[], object]) -> tuple[float, float]:
    """Gaps between iterations as a share of the time, and an iteration's median ms."""
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    run = DecodeGraphs.run

    def timed(self: DecodeGraphs, entries: int, k: int) -> Scores:
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        scores = run(self, entries, k)
        pair[1].record()
        marks.append(pair)
        return scores

    DecodeGraphs.run = timed  # type: ignore[method-assign]
    try:
        work()
    finally:
        DecodeGraphs.run = run  # type: ignore[method-assign]
    torch.cuda.synchronize()
    marks = marks[_PROMPT_STEPS:]
    gaps = [a[1].elapsed_time(b[0]) for a, b in itertools.pairwise(marks)]
    busy = statistics.median(a.elapsed_time(b) for a, b in marks)
    total = sum(gaps) + busy * len(gaps)
    return sum(gaps) / total, busy


FIRST_TOKEN = """
import time, sys
from paceline import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cuda", speculative_model=sys.argv[2], num_speculative_tokens=5)
llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1), use_tqdm=False)
"""


def start(pairs: list[Pair], args: argparse.Namespace) -> dict[str, Any]:
    """Seconds from process start to its end after one token; the log lines have the phases.

    Cold: without any compiled kernel, of Triton and of the latency path.
    """
    results = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm", "warm again"):
            begin = time.perf_counter()
            paths = [str(pairs[0].path / role) for role in ("target", "drafter")]
            done = subprocess.run(
                [sys.executable, "-c", FIRST_TOKEN, *paths],
                env={**os.environ, "TRITON_CACHE_DIR": cache, "XDG_CACHE_HOME": cache},
                capture_output=True,
                text=True,
            )
            results[name] = time.perf_counter() - begin
            print(f"start, caches {name}: {results[name]:.1f} s", flush=True)
            for line in done.stderr.splitlines():
                if "start-up" in line or "GPU memory" in line or done.returncode:
                    print("   ", line)
    return results


def main() -> None:
    parts = {f.__name__: f for f in (decode, mixed, idle, start)}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)} (default: all)")
    parser.add_argument("--target", default="qwen2.5-7b")
    parser.add_argument("--drafter", default="qwen2.5-0.5b")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.8, 0.5])
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--k", type=int, nargs="+", default=[0, 1, 2, 3, 5])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pooled", type=int, default=16, help="prompts of a round at batch 1")
    parser.add_argument("--out", type=Path, help="keep the pairs there and use those it has")
    args = parser.parse_args()
    root = args.out or Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").exists() else None))
    logging.getLogger("paceline").setLevel(logging.INFO)
    try:
        pairs = [Pair(root, args.target, args.drafter, a) for a in args.acceptance]
        results = {name: parts[name](pairs, args) for name in args.parts or parts}
    finally:
        if args.out is None:
            shutil.rmtree(root, ignore_errors=True)
    about = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(
        json.dumps({"benchmark": "gpu", **about, "arguments": vars(args), **results}, default=str)
    )


if __name__ == "__main__":
    main()
