"""Products of few rows: the fused kernels against the library's sequence of launches.

    python benchmarks/skinny.py
    python benchmarks/skinny.py --shapes 0.5B --rows 1 8 --sweep

Each case runs inside one CUDA graph over the weights of many layers, more than an L2 cache holds.
Times are medians of replays, divided by the layers: microseconds a layer, gaps between launches
included. "layer" is the chain of all four products without rotary and attention. The sum into the
residual stream is part of the library's next norm and of ``linear_add`` here, so only "layer"
compares like with like to the last launch. With --sweep, other tiles than the chosen ones are timed
first. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from kernels import DEVICE, SHAPES, Shape, noise, time_graph

from paceline.ops import triton as ops
from paceline.ops.triton.card import card_of
from paceline.ops.triton.skinny import (
    WHOLE_INPUTS,
    Tile,
    linear_add,
    norm_linear,
    norm_linear_silu_mul,
    skinny_applies,
)

EPS = 1e-6
LAYERS = {"7B": 4, "0.5B": 24}  # 1.9 GB and 0.7 GB of weights


class Model:
    """Weights of some layers, and inputs for up to 32 rows."""

    def __init__(self, shape: Shape, layers: int) -> None:
        width = shape.heads * shape.head_dim
        self.layers = layers
        self.qkv_size = width + 2 * shape.kv_heads * shape.head_dim
        self.norm, self.bias = noise(shape.hidden), noise(self.qkv_size)
        self.hidden, self.residual = noise(32, shape.hidden), noise(32, shape.hidden)
        self.attended, self.inner = noise(32, width), noise(32, shape.inner)

        def weights(outputs: int, inputs: int) -> list[torch.Tensor]:
            return [noise(outputs, inputs) * inputs**-0.5 for _ in range(layers)]

        self.qkv = weights(self.qkv_size, shape.hidden)
        self.output = weights(shape.hidden, width)
        self.gate_up = weights(2 * shape.inner, shape.hidden)
        self.down = weights(shape.hidden, shape.inner)

    def matrix(self, kernel: str) -> torch.Tensor:
        matrices: torch.Tensor = getattr(self, kernel)[0]
        return matrices

    def library(self, kernel: str, rows: int) -> Callable[[int], object]:
        """What ``kernel`` replaces, as a call for one layer."""
        hidden, residual = self.hidden[:rows].clone(), self.residual[:rows].clone()
        attended, inner = self.attended[:rows], self.inner[:rows]

        def normed(x: torch.Tensor) -> torch.Tensor:
            return ops.add_rms_norm(x, residual, self.norm, EPS)[0]

        def qkv(layer: int) -> torch.Tensor:
            return F.linear(normed(hidden), self.qkv[layer], self.bias)

        def output(layer: int) -> torch.Tensor:
            return F.linear(attended, self.output[layer])

        def gate_up(layer: int, x: torch.Tensor = hidden) -> torch.Tensor:
            return ops.silu_mul(F.linear(normed(x), self.gate_up[layer]))

        def down(layer: int, x: torch.Tensor = inner) -> torch.Tensor:
            return F.linear(x, self.down[layer])

        def whole(layer: int) -> None:
            qkv(layer)
            down(layer, gate_up(layer, output(layer)))

        calls: dict[str, Callable[[int], object]] = {
            "qkv": qkv, "output": output, "gate_up": gate_up, "down": down, "layer": whole
        }  # fmt: skip
        return calls[kernel]

    def fused(self, kernel: str, rows: int, tile: Tile | None = None) -> Callable[[int], object]:
        """The same from this project's kernels."""
        residual = self.residual[:rows].clone()
        attended, inner = self.attended[:rows], self.inner[:rows]

        def qkv(layer: int) -> object:
            return norm_linear(residual, self.norm, EPS, self.qkv[layer], self.bias, tile=tile)

        def output(layer: int) -> object:
            return linear_add(attended, self.output[layer], residual, tile=tile)

        def gate_up(layer: int) -> torch.Tensor:
            weight = self.gate_up[layer]
            return norm_linear_silu_mul(residual, self.norm, EPS, weight, tile=tile)[0]

        def down(layer: int, x: torch.Tensor = inner) -> object:
            return linear_add(x, self.down[layer], residual, tile=tile)

        def whole(layer: int) -> None:
            qkv(layer)
            output(layer)
            down(layer, gate_up(layer))

        calls: dict[str, Callable[[int], object]] = {
            "qkv": qkv, "output": output, "gate_up": gate_up, "down": down, "layer": whole
        }  # fmt: skip
        return calls[kernel]

    def time(self, call: Callable[[int], object], kernel: str) -> float:
        """Microseconds a layer; small matrices are walked over until the graph is long enough."""
        repeats = 1 if kernel == "layer" else max(1, 24 // self.layers)
        return time_graph(lambda call_index: call(call_index % self.layers), repeats * self.layers)


def tiles(kernel: str, inputs: int) -> Iterator[Tile]:
    """Tiles worth a try."""
    if kernel == "gate_up" and inputs <= WHOLE_INPUTS:
        whole = max(inputs - 1, 1).bit_length()
        for warps, outputs, stages in itertools.product((2, 4, 8), (16, 32), (2, 3, 4)):
            yield Tile(outputs, warps, 2**whole // warps, stages)
    first = 8 if kernel in ("output", "down") else 16
    for outputs, warps, depth in itertools.product(
        (first, 2 * first), (1, 2, 4, 8), (32, 64, 128, 256)
    ):
        if 128 <= warps * depth <= 512:
            for stages in (3, 4, 6):
                yield Tile(outputs, warps, depth, stages)


def sweep(model: Model, kernel: str, rows: int) -> list[tuple[float, Tile]]:
    """All tiles that fit the card, fastest first."""
    found = []
    for tile in tiles(kernel, model.matrix(kernel).shape[1]):
        try:
            found.append((model.time(model.fused(kernel, rows, tile), kernel), tile))
        except Exception as error:
            if "out of resource" not in str(error):
                raise
    return sorted(found, key=lambda entry: entry[0])


def measure(name: str, model: Model, rows: int) -> Iterator[dict[str, Any]]:
    for kernel in ("qkv", "output", "gate_up", "down", "layer"):
        line: dict[str, Any] = {"shape": name, "rows": rows, "kernel": kernel}
        line["library"] = model.time(model.library(kernel, rows), kernel)
        line["fused"] = model.time(model.fused(kernel, rows), kernel)
        if kernel != "layer":
            outputs, inputs = model.matrix(kernel).shape
            line["chosen"] = skinny_applies(
                rows, inputs, outputs, torch.bfloat16, card_of(torch.device("cuda", 0))
            )
        yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.5B", "7B"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--sweep", action="store_true", help="time other tiles too, at the first M")
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(DEVICE))
    lines: list[dict[str, Any]] = []
    for name in arguments.shapes:
        model = Model(SHAPES[name], LAYERS[name])
        if arguments.sweep:
            for kernel in ("qkv", "output", "gate_up", "down"):
                for elapsed, tile in sweep(model, kernel, arguments.rows[0])[:8]:
                    print(f"{name} {kernel:8} {elapsed:7.2f} us {tile}", flush=True)
        print(f"{'shape':6}{'M':>4} {'kernel':9}{'library us':>11}{'fused us':>10}  chosen")
        for rows in arguments.rows:
            for line in measure(name, model, rows):
                lines.append(line)
                print(
                    f"{name:6}{rows:4} {line['kernel']:9}{line['library']:11.2f}"
                    f"{line['fused']:10.2f}  {line.get('chosen', '')}",
                    flush=True,
                )
    print(json.dumps(lines))


if __name__ == "__main__":
    main()
