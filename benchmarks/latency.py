"""What one forward of few rows costs as one kernel, and how near it comes to the bandwidth.

    python benchmarks/latency.py
    python benchmarks/latency.py --shapes qwen2.5-7b --tokens 1 8 --contexts 300 4096
    python benchmarks/latency.py --shapes qwen2.5-0.5b --tokens 1 --set PACE=0 --trace

Random weights of published shapes; every token is a sequence of its own, or with ``--verify`` all
are consecutive tokens of one. Times are medians of graph replays, embedding to logits. "floor" is
the time that the weights and the cached K and V need at the measured device copy bandwidth. With
``--trace`` the clocks of each phase of a layer follow, means over layers and thread blocks. Prints
a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from paceline.attention.reference import ReferenceAttention
from paceline.config import ModelArch
from paceline.distributed.tp_group import SingleProcessGroup
from paceline.latency.build import build
from paceline.latency.forward import LatencyForward
from paceline.latency.pack import PackedWeights
from paceline.latency.plan import CardLimits, LatencyPlan, plan
from paceline.models.decoder import DecoderModel
from paceline.ops.triton.card import card_of
from paceline.synth.shapes import find_shape
from paceline.worker.kv_cache import allocate_kv_caches

DEVICE = torch.device("cuda")
BLOCK_SIZE = 16
SHAPES = ["qwen2.5-0.5b", "qwen2.5-7b"]
# From a mark of the kernel to the next.
PHASES = [
    *("wait for the layer before", "qkv", "attention", "wait for attention", "output"),
    *("residual", "wait for the sums", "gate and up", "publish", "down", "residual"),
]


def random_model(arch: ModelArch) -> DecoderModel:
    """Activations near 1, flat logits."""
    with torch.inference_mode():
        model = DecoderModel(
            arch, ReferenceAttention(), SingleProcessGroup(), torch.bfloat16, DEVICE
        )
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.1)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model.eval()


def copy_bandwidth() -> float:
    """Bytes per second of a large device-to-device copy, read and written."""
    source = torch.empty(2**29, dtype=torch.float32, device=DEVICE).normal_()
    target = torch.empty_like(source)
    milliseconds = median_time(lambda: target.copy_(source), 10)
    return 2 * source.nbytes / (milliseconds * 1e-3)


def median_time(call: Callable[[], object], repeats: int = 40) -> float:
    """Milliseconds by events, after a warm-up."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in times)


def ints(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.int32).to(DEVICE).contiguous()


class Case:
    """One forward's rows, over random K and V."""

    def __init__(self, arch: ModelArch, tokens: int, context: int, verify: bool) -> None:
        rows, width = 1 if verify else tokens, context + tokens + 1
        blocks = -(-width // BLOCK_SIZE)
        self.kv_caches = allocate_kv_caches(arch, rows * blocks, BLOCK_SIZE, torch.bfloat16, DEVICE)
        for pair in self.kv_caches:
            for cache in pair:
                cache.normal_()
        self.query_len = tokens if verify else 1
        self.history = ints(torch.randint(0, arch.vocab_size, (rows, width)))
        self.block_table = ints(torch.randperm(rows * blocks).view(rows, blocks) + 1)
        self.rows = ints(torch.arange(rows))
        self.num_tokens = ints(torch.full((rows,), context + 1))
        self.active = ints(torch.ones(rows))
        self.logits = torch.empty(tokens, arch.vocab_size, device=DEVICE)
        self.kv_bytes = rows * context * arch.kv_bytes_per_token(2)

    def run(self, forward: LatencyForward) -> None:
        arguments = (self.history, self.rows, self.num_tokens, self.active, self.block_table)
        forward.run(*arguments, self.query_len, -1, self.logits)


def measure(case: Case, forward: LatencyForward) -> float:
    """Milliseconds of a replay."""
    case.run(forward)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run(forward)
    milliseconds = median_time(graph.replay)
    forward.check()
    return milliseconds


def phases(case: Case, forward: LatencyForward, layout: LatencyPlan) -> dict[str, float]:
    """Mean clocks from mark to mark, of a kernel built with TRACE."""
    size = (layout.blocks, layout.arch.num_layers, 16)
    forward.trace = torch.zeros(size, dtype=torch.int64, device=DEVICE)
    for _ in range(3):
        case.run(forward)
    torch.cuda.synchronize()
    marks = forward.trace[:, 1:, : len(PHASES)].double()
    steps = (marks[..., 1:] - marks[..., :-1]).mean((0, 1)).tolist()
    return dict(zip(PHASES, steps, strict=False))


def run_shape(name: str, args: argparse.Namespace, bandwidth: float) -> list[dict[str, Any]]:
    """All cases of one shape, printed as they come."""
    arch = find_shape(name).arch()
    card = card_of(DEVICE)
    limits = CardLimits(card.capability, card.num_sms, card.shared_memory)
    layout = plan(
        arch, limits, dtype="bfloat16", block_size=BLOCK_SIZE,
        max_positions=max(args.contexts) + 32,
    )  # fmt: skip
    if not isinstance(layout, LatencyPlan):
        print(f"{name}: {layout.reason}")
        return []
    changes = dict(pair.split("=") for pair in args.set) | ({"TRACE": 1} if args.trace else {})
    with ThreadPoolExecutor(len(args.tokens)) as pool:
        options = [layout.options(tokens) | changes for tokens in args.tokens]
        cubins = list(pool.map(lambda o: build(o, limits.capability), options))
    model = random_model(arch)
    packed = PackedWeights(model, layout)
    found = []
    for context in args.contexts:
        for tokens, cubin in zip(args.tokens, cubins, strict=True):
            case = Case(arch, tokens, context, args.verify)
            forward = LatencyForward(model, case.kv_caches, layout, tokens, packed)
            forward.load(tokens, cubin)
            if args.trace:
                clocks = phases(case, forward, layout)
                print("   ", ", ".join(f"{phase} {count:.0f}" for phase, count in clocks.items()))
            milliseconds = measure(case, forward)
            floor = (layout.packed_bytes + case.kv_bytes) / bandwidth * 1e3
            print(
                f"{name:14} {tokens:6} {context:8} {milliseconds:8.3f} {floor:8.3f} "
                f"{floor / milliseconds:6.0%}",
                flush=True,
            )
            found.append(
                {"shape": name, "tokens": tokens, "context": context, "ms": milliseconds,
                 "floor_ms": floor}
            )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--contexts", nargs="+", type=int, default=[300])
    parser.add_argument("--verify", action="store_true", help="all tokens of one sequence")
    parser.add_argument("--trace", action="store_true", help="clocks of each phase")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="build options")
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    name = torch.cuda.get_device_name()
    print(f"{name}, device copy {bandwidth / 1e9:.0f} GB/s")
    print(f"{'shape':14} {'tokens':>6} {'context':>8} {'ms':>8} {'floor':>8} {'share':>6}")
    lines = [line for shape in args.shapes for line in run_shape(shape, args, bandwidth)]
    print(json.dumps({"device": name, "copy_bytes_per_s": bandwidth, "cases": lines}))


if __name__ == "__main__":
    main()
