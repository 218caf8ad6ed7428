"""What the forward kernels cost on a CUDA card, and how near they come to its bandwidth.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --shapes 7B --batches 1 64 --query-lens 1 --contexts 300

Each kernel runs inside a CUDA graph as in a decode step: once for each of many layers, every layer
with tensors of its own, so that nothing is in the L2 cache because the call before left it there.
Times are medians of replays, divided by the layers. "share" is the least time that the bytes need
at the measured device copy bandwidth, over the time taken. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from latency import copy_bandwidth
from paceline.attention.triton_decode import (
    num_splits_for,
    paged_decode_attention,
    workspace_size,
)
from paceline.attention.triton_prefill import paged_prefill_attention
from paceline.ops import triton as ops
from paceline.ops.triton.card import card_of

DEVICE = torch.device("cuda")
BLOCK_SIZE = 16
MAX_MODEL_LEN = 32_768
COLD_BYTES = 400e6  # what all layers of a graph touch at least, several times an L2 cache


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that its kernels see."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int


SHAPES = {"7B": Shape(28, 4, 128, 3584, 18944), "0.5B": Shape(14, 2, 64, 896, 4864)}


@dataclass
class Line:
    """One measured case."""

    kernel: str
    shape: str
    case: str
    microseconds: float
    bytes: float
    flops: float = 0.0


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def integers(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def layers_for(layer_bytes: float) -> int:
    """How many layers a graph has, for calls that each touch ``layer_bytes``."""
    return max(4, min(400, math.ceil(COLD_BYTES / layer_bytes)))


def time_graph(call: Callable[[int], object], layers: int, replays: int = 15) -> float:
    """Median microseconds of one call, from replays of a graph that makes one a layer."""
    for layer in range(min(layers, 2)):  # compiles
        call(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            call(layer)
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times) * 1e3 / layers


def elementwise(name: str, shape: Shape, tokens: int) -> Iterator[Line]:
    """Norm and gate at some number of tokens."""
    layers = layers_for(tokens * shape.hidden * 8)
    x, residual = noise(layers, tokens, shape.hidden), noise(layers, tokens, shape.hidden)
    weight = noise(shape.hidden)
    elapsed = time_graph(
        lambda layer: ops.add_rms_norm(x[layer], residual[layer], weight, 1e-6), layers
    )
    yield Line("add_rms_norm", name, f"N={tokens}", elapsed, tokens * shape.hidden * 8)
    moved = tokens * shape.inner * 6
    layers = layers_for(moved)
    gate_up = noise(layers, tokens, 2 * shape.inner)
    elapsed = time_graph(lambda layer: ops.silu_mul(gate_up[layer]), layers)
    yield Line("silu_mul", name, f"N={tokens}", elapsed, moved)


@dataclass
class Decode:
    """Rows of equal length on caches of their own in every layer."""

    shape: Shape
    batch: int
    query_len: int
    context: int

    def __post_init__(self) -> None:
        shape = self.shape
        self.tokens = self.batch * self.query_len
        self.kv_bytes = self.batch * self.context * shape.kv_heads * shape.head_dim * 4
        self.layers = layers_for(self.kv_bytes)
        blocks = -(-(self.context + self.query_len) // BLOCK_SIZE)
        self.caches = noise(
            self.layers, 2, self.batch * blocks + 1, BLOCK_SIZE, shape.kv_heads, shape.head_dim
        )
        self.rows = integers(list(range(self.batch)))
        self.num_tokens = integers([self.context] * self.batch)
        self.active = torch.ones_like(self.num_tokens)
        order = torch.randperm(self.batch * blocks) + 1
        self.table = torch.zeros(
            self.batch, MAX_MODEL_LEN // BLOCK_SIZE, dtype=torch.int32, device=DEVICE
        )
        self.table[:, :blocks] = order.view(self.batch, blocks)
        heads = shape.heads + 2 * shape.kv_heads
        self.qkv = noise(self.tokens, heads * shape.head_dim)
        self.query = noise(self.tokens, shape.heads, shape.head_dim)
        self.frequencies = torch.rand(shape.head_dim // 2, device=DEVICE)

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return self.rows, self.num_tokens, self.active, self.table

    def attend(self) -> float:
        """Microseconds of split and combine together."""
        shape = self.shape
        num_sms = card_of(DEVICE).num_sms
        splits = num_splits_for(self.batch, shape.kv_heads, num_sms, MAX_MODEL_LEN)
        size = workspace_size(self.tokens, shape.heads, shape.head_dim, splits)
        workspace = torch.empty(size, device=DEVICE)
        return time_graph(
            lambda layer: paged_decode_attention(
                self.query,
                *self.caches[layer],
                *self.state,
                query_len=self.query_len,
                offset=-1,
                scale=shape.head_dim**-0.5,
                sliding_window=None,
                num_splits=splits,
                workspace=workspace,
            ),
            self.layers,
        )

    def rotate(self) -> float:
        """Microseconds of rotary and KV write."""
        return time_graph(
            lambda layer: ops.rotary_kv_decode(
                self.qkv,
                *self.caches[layer],
                self.frequencies,
                None,
                1e-6,
                *self.state,
                query_len=self.query_len,
                offset=-1,
            ),
            self.layers,
        )


def decode(name: str, shape: Shape, arguments: argparse.Namespace) -> Iterator[Line]:
    """Rotary and attention of decode passes."""
    for batch in arguments.batches:
        for query_len in arguments.query_lens:
            for context in arguments.contexts:
                if batch * context > arguments.max_tokens:
                    continue
                case = Decode(shape, batch, query_len, context)
                if context == arguments.contexts[0]:
                    moved = 2 * case.qkv.nbytes
                    label = f"B={batch} Q={query_len}"
                    yield Line("rotary_kv", name, label, case.rotate(), moved)
                label = f"B={batch} Q={query_len} context={context}"
                moved = case.kv_bytes + 2 * case.query.nbytes
                yield Line("decode attention", name, label, case.attend(), moved)


def prefill_flops(shape: Shape, lengths: list[int]) -> float:
    """Of both products, counting what the causal mask leaves."""
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    return 4 * shape.heads * shape.head_dim * pairs


def prefill(name: str, shape: Shape, lengths: list[int]) -> Iterator[Line]:
    """Rotary and attention of whole prompts."""
    tokens = sum(lengths)
    blocks = -(-max(lengths) // BLOCK_SIZE)
    count = len(lengths)
    table = (torch.randperm(count * blocks) + 1).view(count, blocks).int().to(DEVICE)
    caches = noise(2, count * blocks + 1, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
    query = noise(tokens, shape.heads, shape.head_dim)
    starts = integers([0, *lengths]).cumsum(0).int()
    seq_lens = integers(lengths)
    elapsed = time_graph(
        lambda layer: paged_prefill_attention(
            query,
            *caches,
            starts,
            seq_lens,
            table,
            max_query_len=max(lengths),
            scale=shape.head_dim**-0.5,
            sliding_window=None,
        ),
        layers=4,
        replays=7,
    )
    case = f"{count} x {lengths[0]}"
    moved = 2 * query.nbytes + tokens * shape.kv_heads * shape.head_dim * 4
    yield Line("prefill attention", name, case, elapsed, moved, prefill_flops(shape, lengths))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 64, 256])
    parser.add_argument("--query-lens", nargs="+", type=int, default=[1, 2, 6])
    parser.add_argument("--contexts", nargs="+", type=int, default=[300, 2048, 8192])
    parser.add_argument("--max-tokens", type=int, default=2**20, help="largest batch x context")
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: device copy {bandwidth / 1e9:.0f} GB/s")
    print(f"{'kernel':18} {'shape':5} {'case':26} {'us':>9} {'share':>6} {'TFLOP/s':>8}")
    lines: list[dict[str, Any]] = []

    def report(found: Iterator[Line]) -> None:
        for line in found:
            share = line.bytes / bandwidth / (line.microseconds * 1e-6)
            rate = f"{line.flops / line.microseconds * 1e-6:.0f}" if line.flops else ""
            print(
                f"{line.kernel:18} {line.shape:5} {line.case:26} {line.microseconds:9.2f} "
                f"{share:6.2f} {rate:>8}",
                flush=True,
            )
            lines.append({**vars(line), "share": share})

    for name in arguments.shapes:
        shape = SHAPES[name]
        for tokens in (1, 6, 64, 256, 1536, 8192):
            report(elementwise(name, shape, tokens))
        report(decode(name, shape, arguments))
        for lengths in ([128] * 64, [8192]):
            report(prefill(name, shape, lengths))
    print(json.dumps({"bandwidth": bandwidth, "lines": lines}))


if __name__ == "__main__":
    main()
