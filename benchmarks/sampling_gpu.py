"""What sampling, acceptance and prompt lookup cost on a GPU, inside a CUDA graph.

Logits are synthetic with the shape of a language model's: a normal bulk and a head of forty likely
tokens. Each case is captured several times into one graph, over as many sets of logits, so that no
call finds its own in the cache (a real head has just written them, so small batches do better). The
bound is the bytes of the logits, and of the counts where a case reads them, over the bandwidth of a
large copy on the same card.

    python benchmarks/sampling_gpu.py --tokens 1 6 16 64 256 1536

Prints tables for people, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from paceline.core.step import NewRow
from paceline.sample.triton import DeviceSampler, accept_and_advance
from paceline.sampling_params import SamplingParams
from paceline.worker.device_ngram import lookup_drafts
from paceline.worker.device_rows import DeviceRows

DEVICE = torch.device("cuda")
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
CASES: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "temperature 1": [{}],
    "mixed": [{"temperature": 0.0}, {}, {"temperature": 0.7}, {"logit_bias": {7: 1.0}}],
    "top_p 0.9": [{"top_p": 0.9}],
    "top_k 50": [{"top_k": 50}],
    "top_k 20, top_p 0.8": [{"temperature": 0.7, "top_k": 20, "top_p": 0.8}],
    "min_p 0.05": [{"min_p": 0.05}],
    "one in four top_p": [{"top_p": 0.9}, {}, {}, {}],
    "top_p 0.9, flat": [{"top_p": 0.9}],
    "top_k 20000, flat": [{"top_k": 20000}],
    "penalties": [PENALTIES],
    "drafter": [{"top_p": 0.9}],
}
CACHE_BYTES = 120e6  # twice the largest L2 there is
PROMPT, OUTPUT = 200, 100


def median_us(work: list[Callable[[], None]], repeats: int = 9) -> float:
    """Microseconds of one of the calls: all of them in a graph, several times, replayed."""
    for call in work:  # compiles
        call()
    torch.cuda.synchronize()
    rounds = max(1, 24 // len(work))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in work:
                call()
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (rounds * len(work)))
    return statistics.median(times[2:])


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy of 4 GB."""
    source = torch.randn(2**30, device=DEVICE)
    target = torch.empty_like(source)
    times = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.numel() * 4 / statistics.median(times[2:])


def make_rows(count: int, values: list[dict[str, Any]], vocab: int, length: int) -> DeviceRows:
    rng = np.random.default_rng(0)
    rows = DeviceRows(count, length + 64, block_size=16, max_k=8, device=DEVICE)
    if any("repetition_penalty" in x for x in values):
        rows.allocate_counts(vocab)
    rows.enter(
        [
            NewRow(
                row,
                1,
                rng.integers(0, vocab, length).astype(np.int32),
                min(PROMPT, length),
                length + 64,
                SamplingParams(**values[row % len(values)]),
                (vocab - 1,),
                row,
                0,
                [1],
            )
            for row in range(count)
        ]
    )
    return rows


def make_logits(sets: int, tokens: int, vocab: int, flat: bool) -> torch.Tensor:
    """[sets, tokens, vocab] float32."""
    logits = torch.randn(sets * tokens, vocab, device=DEVICE) * 2.5
    if not flat:
        head = torch.randint(vocab, (sets * tokens, 40), device=DEVICE)
        logits.scatter_(1, head, 15 + 7 * torch.rand(sets * tokens, 40, device=DEVICE))
    return logits.view(sets, tokens, vocab)


def time_sampling(case: str, tokens: int, vocab: int) -> float:
    rows = make_rows(tokens, CASES[case], vocab, PROMPT + OUTPUT)
    sets = max(1, min(24, int(CACHE_BYTES / (tokens * vocab * 4)) + 1))
    logits = make_logits(sets, tokens, vocab, "flat" in case)
    sampler = DeviceSampler(
        tokens, vocab, DEVICE, vocab_limit=vocab - 271, truncation=case != "drafter"
    )
    order = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
    out, status = (torch.empty(tokens, dtype=torch.int32, device=DEVICE) for _ in range(2))
    return median_us(
        [
            lambda x=x: sampler.sample(x, order, rows, out=out, status=status)
            for x in logits.unbind(0)
        ]
    )


def time_accept(batch: int, k: int) -> float:
    rows = make_rows(batch, [{}], 1000, 300)
    before = rows.columns.clone()
    order, num_drafts = (
        torch.arange(batch, dtype=torch.int32, device=DEVICE),
        torch.full((batch,), k, dtype=torch.int32, device=DEVICE),
    )
    sampled = torch.randint(0, 999, (batch * (k + 1),), dtype=torch.int32, device=DEVICE)
    bad, out_tokens = torch.zeros_like(sampled), sampled.clone().view(batch, k + 1)
    out_counts, out_status = torch.zeros_like(order), torch.zeros_like(order)

    def reset() -> None:
        rows.columns.copy_(before)

    def reset_and_accept() -> None:
        reset()
        accept_and_advance(
            sampled,
            bad,
            order,
            num_drafts,
            rows,
            k=k,
            out_tokens=out_tokens,
            out_counts=out_counts,
            out_status=out_status,
        )

    return median_us([reset_and_accept]) - median_us([reset])


def time_lookup(batch: int, length: int) -> float:
    rows = make_rows(batch, [{}], 151936, length)
    order = torch.arange(batch, dtype=torch.int32, device=DEVICE)
    wanted = torch.full_like(order, 5)
    num_drafts = torch.zeros_like(order)
    return median_us(
        [
            lambda: lookup_drafts(
                order, wanted, num_drafts, rows, max_k=8, lookup_max=4, lookup_min=2
            )
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 6, 16, 64, 256, 1536])
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e9:.0f} GB/s")
    print("microseconds a call, and share of the bytes bound, by tokens sampled")
    print(f"{'':22s}" + "".join(f"{n:>16d}" for n in args.tokens))
    sampling: dict[str, dict[int, float]] = {}
    for case in args.cases:
        sampling[case] = {}
        line = f"{case:22s}"
        for tokens in args.tokens:
            time = sampling[case][tokens] = round(time_sampling(case, tokens, args.vocab), 2)
            reads = 2 if case == "penalties" else 1
            bound = reads * tokens * args.vocab * 4 / bandwidth * 1e6
            line += f"{time:10.1f} ({bound / time:3.0%})"
        print(line, flush=True)
    accept = {f"B={b}, k={k}": round(time_accept(b, k), 2) for b, k in ((1, 5), (64, 5), (256, 5))}
    print("accept:", accept)
    lookup = {
        f"B={b}, {n} tokens": round(time_lookup(b, n), 2)
        for b, n in ((1, 300), (1, 4096), (1, 32768), (64, 4096), (256, 4096))
    }
    print("lookup:", lookup)
    figures = {"sampling": sampling, "accept": accept, "lookup": lookup}
    print(json.dumps({"vocab": args.vocab, "bandwidth": round(bandwidth), "us": figures}))


if __name__ == "__main__":
    main()
