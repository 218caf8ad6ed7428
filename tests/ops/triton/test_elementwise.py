"""Norms, gate and embedding kernels against formulas in float64."""

from __future__ import annotations

import pytest
import torch

from paceline.ops import reference
from triton_kernels import DEVICE, DTYPES, assert_close, load, noise

ops = load("paceline.ops.triton")

SIZES = [(1, 64), (3, 896), (2, 1000), (5, 48)]
LARGE = [(1, 8192), (4097, 3584), (300, 64)]


def norm_formula(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def check_norms(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = noise(*shape, dtype=dtype), noise(shape[1], dtype=dtype, seed=1)
    residual = noise(*shape, dtype=dtype, seed=2)
    assert_close(ops.rms_norm(x, weight, 1e-3), norm_formula(x, weight, 1e-3))
    expected = residual + x
    normed, stream = ops.add_rms_norm(x, residual, weight, 1e-3)
    assert stream is residual
    assert_close(residual, expected)
    assert torch.equal(normed, ops.rms_norm(residual, weight, 1e-3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SIZES)
def test_norms(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_norms(shape, dtype)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("shape", LARGE)
def test_norms_at_real_sizes(shape: tuple[int, int]) -> None:
    check_norms(shape, torch.bfloat16)


def test_norm_of_a_view_and_of_zeros() -> None:
    fused, weight = noise(5, 96), noise(32, seed=1)
    part = fused[:, 32:64]  # rows that are not contiguous
    assert_close(ops.rms_norm(part, weight, 1e-6), norm_formula(part, weight, 1e-6))
    assert torch.equal(ops.rms_norm(torch.zeros_like(part), weight, 1e-6), torch.zeros_like(part))
    assert ops.rms_norm(fused.view(5, 3, 32), weight, 1e-6).shape == (5, 3, 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2432), (4, 96), (3, 77)])
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = noise(shape[0], 2 * shape[1], dtype=dtype)
    gate_up[0, 0] = -30.0  # where the exponential is large
    gate, up = gate_up.double().chunk(2, dim=-1)
    found = ops.silu_mul(gate_up)
    assert_close(found, torch.nn.functional.silu(gate) * up)
    assert_close(found, reference.silu_mul(gate_up))


def test_embeddings_of_the_rows_last_tokens() -> None:
    weight = noise(50, 72)
    history = torch.randint(0, 50, (4, 20), generator=torch.Generator().manual_seed(0))
    num_tokens = torch.tensor([7, 1, 20, 0], dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([2, 0, 1], dtype=torch.int32, device=DEVICE)
    ids = history.int().to(DEVICE)
    found = ops.embed_rows(ids, rows, num_tokens, weight, query_len=2, offset=-2)
    last_two = [history[2, 18], history[2, 19], history[0, 5], history[0, 6]]
    expected = weight[torch.stack([*last_two, history[1, 0], history[1, 0]]).to(DEVICE)]
    assert torch.equal(found, expected)  # the row of one token has its first token twice
    beyond = ops.embed_rows(ids, rows[:1], num_tokens, weight, query_len=1, offset=3)
    assert torch.equal(beyond, weight[history[2, 19]][None])  # clamped into the history


def test_embeddings_of_a_vocabulary_in_two_shares() -> None:
    weight = noise(50, 72)
    ids = torch.arange(10, 40, dtype=torch.int32, device=DEVICE)[None]
    rows = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    num_tokens = torch.tensor([30], dtype=torch.int32, device=DEVICE)
    shares = [
        ops.embed_rows(ids, rows, num_tokens, part, query_len=30, offset=-30, vocab_start=start)
        for part, start in ((weight[:25], 0), (weight[25:], 25))
    ]
    assert torch.equal(shares[0] + shares[1], weight[10:40])
    assert not shares[0][15:].any()
