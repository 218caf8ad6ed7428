"""Matrix products of few tokens by both of NVIDIA's libraries, on a CUDA card.

    python benchmarks/products.py [--shapes qwen2.5-7b llama-3-8b] [--tokens 16 64 128]

The products of a decoder layer, bfloat16, with weights that are not in the cache. torch sends a
product with a bias to cuBLASLt and one without to cuBLAS, which choose different kernels for the
same work: a bias of zeros is a way to choose (``layers/linear.py``). Microseconds a product in a
graph, least of several: without a bias, with zeros, and what reading the weights alone would take.
Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import torch.nn.functional as F

from latency import copy_bandwidth
from paceline.synth.shapes import find_shape

COLD_BYTES = 400e6  # of weights that a graph reads at least, several times an L2 cache
SHAPES = ["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b", "llama-3-8b"]
TOKENS = [1, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 384, 512, 1024, 2048]


def products_of(name: str) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a layer's products."""
    arch = find_shape(name).arch()
    heads = arch.num_attention_heads * arch.head_dim
    kv = arch.num_kv_heads * arch.head_dim
    hidden, inner = arch.hidden_size, arch.intermediate_size
    return {
        "qkv": (heads + 2 * kv, hidden),
        "o": (hidden, heads),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }


def microseconds(x: torch.Tensor, weights: list[torch.Tensor], bias: torch.Tensor | None) -> float:
    """Of one product, all weights in turn in a graph."""

    def run() -> None:
        for weight in weights:
            F.linear(x, weight, bias)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(weights))
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    lines: list[dict[str, Any]] = []
    about: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    for shape in args.shapes:
        for name, (outputs, inputs) in products_of(shape).items():
            size = 2 * outputs * inputs
            count = max(2, int(COLD_BYTES / size) + 1)
            weights = [torch.randn(outputs, inputs, **about) for _ in range(count)]
            zeros = torch.zeros(outputs, **about)
            print(f"{shape} {name} [{outputs}, {inputs}], bound {size / bandwidth * 1e6:.1f} us")
            for tokens in args.tokens:
                x = torch.randn(tokens, inputs, **about)
                found = {
                    "plain": microseconds(x, weights, None),
                    "zeros": microseconds(x, weights, zeros),
                }
                ratio = found["zeros"] / found["plain"]
                print(
                    f"  {tokens:5} {found['plain']:8.1f} {found['zeros']:8.1f} {ratio:6.2f}",
                    flush=True,
                )
                lines.append({"shape": shape, "product": name, "tokens": tokens, **found})
    print(json.dumps({"benchmark": "products", "bandwidth": bandwidth, "lines": lines}))


if __name__ == "__main__":
    main()
