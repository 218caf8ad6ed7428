"""Products of few rows with norm, gate or sum, against the formulas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.ops import reference
from triton_kernels import DEVICE, DOT_DTYPES, assert_close, load, noise

skinny = load("paceline.ops.triton.skinny")
cards = load("paceline.ops.triton.card")

needs_card = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
SCRIPT = Path(__file__).with_name("cross_compile_skinny.py")
EPS = 1e-5
SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448}  # bytes a program may use
# Rows, inputs, outputs: nothing divides; one tile of rows and two; more inputs than are kept whole.
SHAPES = [(1, 72, 20), (5, 896, 48), (19, 104, 64), (3, 1160, 36)]
REAL = [(896, 1152, 4864), (3584, 4608, 18944)]  # inputs, q k v, inner


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In float64 but for rounding where the library's operands are rounded."""
    wide = x.double()
    wide = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()
    return (wide.to(x.dtype) * weight).double()


def gated(product: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """SiLU of the first half times the second half, of a product that is rounded first."""
    return reference.silu_mul(product.to(dtype))


def matrix(outputs: int, inputs: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """Weights whose products are of order one."""
    return (noise(outputs, inputs, seed=seed) * inputs**-0.5).to(dtype)


def check_norm_linear(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, inputs, outputs = shape
    x, scale = noise(rows, inputs, dtype=dtype), noise(inputs, dtype=dtype, seed=2)
    weight, bias = matrix(outputs, inputs, dtype), noise(outputs, dtype=dtype, seed=3)
    found, stream = skinny.norm_linear(x, scale, EPS, weight, bias)
    assert stream is x
    assert_close(found, normed(x, scale) @ weight.double().T + bias.double())
    residual = noise(rows, inputs, dtype=dtype, seed=4)
    before = residual.clone()
    found, stream = skinny.norm_linear(x, scale, EPS, weight, None, residual)
    assert torch.equal(residual, before)
    assert_close(stream, x.double() + residual.double())
    assert_close(found, normed(stream, scale) @ weight.double().T)
    assert torch.equal(found, skinny.norm_linear(stream, scale, EPS, weight)[0])


def check_gated(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, inputs, inner = shape
    x, scale = noise(rows, inputs, dtype=dtype), noise(inputs, dtype=dtype, seed=2)
    weight, bias = matrix(2 * inner, inputs, dtype), noise(2 * inner, dtype=dtype, seed=3)
    residual = noise(rows, inputs, dtype=dtype, seed=4)
    found, stream = skinny.norm_linear_silu_mul(x, scale, EPS, weight, bias, residual)
    assert_close(stream, x.double() + residual.double())
    product = normed(stream, scale) @ weight.double().T + bias.double()
    assert_close(found, gated(product, dtype))
    found, stream = skinny.norm_linear_silu_mul(x, scale, EPS, weight)
    assert stream is x
    assert_close(found, gated(normed(x, scale) @ weight.double().T, dtype))


def check_linear_add(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, inputs, outputs = shape
    x, weight = noise(rows, inputs, dtype=dtype), matrix(outputs, inputs, dtype)
    residual = noise(rows, outputs, dtype=dtype, seed=4)
    expected = residual.double() + x.double() @ weight.double().T
    assert skinny.linear_add(x, weight, residual) is residual
    assert_close(residual, expected)
    bias = noise(outputs, dtype=dtype, seed=3)
    expected = residual.double() + x.double() @ weight.double().T + bias.double()
    assert_close(skinny.linear_add(x, weight, residual, bias), expected)


class Layer:
    """All products of a layer, from any of 20 rows."""

    def __init__(self, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
        inputs, outputs, inner = sizes
        self.x, self.residual = noise(20, inputs, dtype=dtype), noise(20, inputs, dtype=dtype)
        self.wide, self.scale = noise(20, inner, dtype=dtype, seed=6), noise(inputs, dtype=dtype)
        self.qkv, self.gate_up = matrix(outputs, inputs, dtype), matrix(2 * inner, inputs, dtype)
        self.down = matrix(inputs, inner, dtype)

    def run(self, part: slice) -> list[torch.Tensor]:
        x, residual, scale = self.x[part], self.residual[part], self.scale
        return [
            skinny.norm_linear(x, scale, EPS, self.qkv)[0],
            *skinny.norm_linear(x, scale, EPS, self.qkv, None, residual),
            *skinny.norm_linear_silu_mul(x, scale, EPS, self.gate_up, None, residual),
            skinny.linear_add(self.wide[part], self.down, residual.clone()),
        ]


def is_expected_to_win(rows: int, inputs: int, outputs: int) -> bool:
    hopper = cards.Card((9, 0), 132, 232_448)
    found = skinny.skinny_applies(rows, inputs, outputs, torch.bfloat16, hopper)
    assert isinstance(found, bool)
    for capability in ((8, 0), (8, 9)):  # not measured
        card = cards.Card(capability, 108, 101_376)
        assert not skinny.skinny_applies(rows, inputs, outputs, torch.bfloat16, card)
    assert not skinny.skinny_applies(rows, inputs, outputs, torch.float32, hopper)
    return found


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_linear(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_norm_linear(shape, dtype)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_linear_silu_mul(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_gated(shape, dtype)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_add(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_linear_add(shape, dtype)


@pytest.mark.parametrize("sizes", [(104, 40, 72), (1160, 24, 40)])
def test_rows_do_not_see_each_other(sizes: tuple[int, int, int]) -> None:
    layer = Layer(sizes, torch.float16)
    before = [found[7:9].clone() for found in layer.run(slice(0, 20))]
    for rows in (layer.x, layer.residual, layer.wide):
        rows[:7] *= -3
        rows[9:] += 2
    for found, expected in zip(layer.run(slice(0, 20)), before, strict=True):
        assert torch.equal(found[7:9], expected)


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("sizes", REAL)
@pytest.mark.parametrize("rows", [1, 8, 16, 32])
def test_real_sizes(rows: int, sizes: tuple[int, int, int]) -> None:
    inputs, outputs, inner = sizes
    check_norm_linear((rows, inputs, outputs), torch.bfloat16)
    check_gated((rows, inputs, inner), torch.bfloat16)
    check_linear_add((rows, inner, inputs), torch.bfloat16)


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("sizes", REAL)
def test_a_row_has_the_same_bits_among_any_others(sizes: tuple[int, int, int]) -> None:
    layer = Layer(sizes, torch.bfloat16)
    whole = layer.run(slice(0, 20))
    for start, stop in [(0, 20), (0, 20), (0, 1), (7, 8), (5, 13), (2, 18), (3, 12)]:
        for found, among in zip(layer.run(slice(start, stop)), whole, strict=True):
            assert torch.equal(found, among[start:stop])


def test_rows_that_are_not_contiguous() -> None:
    fused, weight = noise(3, 96), matrix(24, 32, torch.float32)
    part, scale = fused[:, 32:64], noise(32, seed=2)
    found, _ = skinny.norm_linear(part, scale, EPS, weight)
    assert_close(found, normed(part, scale) @ weight.double().T)
    stream = noise(3, 60, seed=3)
    expected = stream.double()
    expected[:, 6:30] += part.double() @ weight.double().T
    skinny.linear_add(part, weight, stream[:, 6:30])
    assert_close(stream, expected)


def test_a_row_of_zeros_gives_the_bias() -> None:
    weight, bias = matrix(24, 32, torch.float32), noise(24, seed=3)
    found, _ = skinny.norm_linear(noise(2, 32) * 0, noise(32), EPS, weight, bias)
    assert torch.equal(found, bias.expand(2, 24))


def test_where_the_kernels_are_expected_to_win() -> None:
    assert is_expected_to_win(16, 896, 1152)
    assert is_expected_to_win(16, 4864, 896)
    assert not is_expected_to_win(17, 4864, 896)
    assert is_expected_to_win(8, 896, 2 * 4864)
    assert not is_expected_to_win(9, 896, 2 * 4864)
    assert not is_expected_to_win(1, 3584, 4608)


def compile_for(sm: int, cases: list[str], cache: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(SCRIPT), str(sm), str(SHARED_MEMORY[sm]), *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = {"_norm_linear_kernel", "_norm_gate_up_kernel", "_linear_add_kernel"}
    assert {entry["kernel"] for entry in compiled} == kernels
    for entry in compiled:
        assert entry["shared"] <= SHARED_MEMORY[sm], entry


@pytest.mark.parametrize("sm", list(SHARED_MEMORY))
def test_compiles_for_every_card(sm: int, tmp_path: Path) -> None:
    compile_for(sm, ["0.5B", "0.5B 16 rows"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("sm", list(SHARED_MEMORY))
def test_all_configurations_compile_for_every_card(sm: int, tmp_path: Path) -> None:
    compile_for(sm, [], tmp_path)
