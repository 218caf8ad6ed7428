"""The compiled element-wise kernels against the plain torch ones, and rows against each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from native_kernels import kernels
from paceline import ops
from paceline.ops import reference

DTYPES = [torch.float32, torch.bfloat16]
# One step of the last bit: where torch and the kernels round to different sides.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def _native_on_cpu() -> Iterator[None]:
    ops.use("cpu", kernels())
    yield
    ops.use("cpu", None)


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 16, 33, 576])
@pytest.mark.parametrize("rows", [0, 1, 2, 16, 70])
def test_norms(rows: int, size: int, dtype: torch.dtype) -> None:
    x, residual, weight = (
        noise(rows, size, dtype=dtype),
        noise(rows, size, dtype=dtype, seed=1),
        noise(size, dtype=dtype, seed=2),
    )
    before, stream = x.clone(), residual.clone()
    assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    normed, returned = ops.add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_stream = reference.add_rms_norm(x, stream, weight, 1e-5)
    assert returned is residual
    assert torch.equal(residual, expected_stream)
    assert torch.equal(x, before)
    assert_close(normed, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 16, 33, 1536])
@pytest.mark.parametrize("rows", [0, 1, 2, 16, 70])
def test_silu_mul(rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up = noise(rows, 2 * size, dtype=dtype) * 5
    before = gate_up.clone()
    assert_close(ops.silu_mul(gate_up), reference.silu_mul(gate_up))
    assert torch.equal(gate_up, before)


def test_silu_of_large_numbers() -> None:
    gate = torch.tensor([[-3e38, -1e30, -1e4, -200.0, -88.0, -20.0, 0.0, 20.0, 88.0, 200.0, 1e4]])
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=1)
    torch.testing.assert_close(
        ops.silu_mul(gate_up), reference.silu_mul(gate_up), atol=1e-30, rtol=1e-6
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    x, residual, weight = (
        noise(2000, 70, dtype=dtype),
        noise(2000, 70, dtype=dtype, seed=1),
        noise(70, dtype=dtype, seed=2),
    )
    alone = ops.add_rms_norm(x[7:8], residual[7:8].clone(), weight, 1e-6)
    alone_silu = ops.silu_mul(x[7:8])
    threads = torch.get_num_threads()
    for count in (1, 3):  # many rows go to several threads
        torch.set_num_threads(count)
        try:
            together = ops.add_rms_norm(x, residual.clone(), weight, 1e-6)
            together_silu = ops.silu_mul(x)
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(together[0][7:8], alone[0])
        assert torch.equal(together[1][7:8], alone[1])
        assert torch.equal(together_silu[7:8], alone_silu)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_its_row_only(dtype: torch.dtype, bad: float) -> None:
    x, weight = noise(3, 34, dtype=dtype), noise(34, dtype=dtype, seed=1)
    clean = (ops.rms_norm(x, weight, 1e-6), ops.silu_mul(x))
    x[1, 33] = bad
    spoilt = (ops.rms_norm(x, weight, 1e-6), ops.silu_mul(x))
    for before, after in zip(clean, spoilt, strict=True):
        assert not after[1].isfinite().all()
        assert torch.equal(after[[0, 2]], before[[0, 2]])
    # A NaN whose bits would overflow into another number when rounded carelessly.
    bits = torch.full((1, 32), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    assert ops.silu_mul(bits).isnan().all()
    assert ops.silu_mul(bits.to(torch.bfloat16)).isnan().all()


def test_other_forms_go_to_torch() -> None:
    half = noise(3, 32, dtype=torch.float16)
    weight = noise(32, dtype=torch.float16, seed=1)
    assert torch.equal(ops.rms_norm(half, weight, 1e-6), reference.rms_norm(half, weight, 1e-6))
    assert torch.equal(ops.silu_mul(half), reference.silu_mul(half))
    view, weight = noise(6, 32, dtype=torch.float32)[::2], noise(32, dtype=torch.float32)
    assert torch.equal(ops.rms_norm(view, weight, 1e-6), reference.rms_norm(view, weight, 1e-6))
    assert torch.equal(ops.silu_mul(view), reference.silu_mul(view))
    stream = noise(6, 32, dtype=torch.float32, seed=3)[::2]
    expected = reference.add_rms_norm(view, stream.clone(), weight, 1e-6)
    found = ops.add_rms_norm(view, stream, weight, 1e-6)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(stream, expected[1])


def test_devices_without_a_choice_run_torch() -> None:
    ops.use("cpu", None)
    x, weight = noise(3, 32, dtype=torch.float32), noise(32, dtype=torch.float32, seed=1)
    assert torch.equal(ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
