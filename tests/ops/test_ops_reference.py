"""The element-wise operations against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from paceline import ops

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def norm_formula(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(1, 7), (5, 64), (3, 4, 16)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = noise(*shape, dtype=dtype), noise(shape[-1], dtype=dtype)
    before = x.clone()
    found = ops.rms_norm(x, weight, 1e-3)
    assert found.dtype == dtype
    assert torch.equal(x, before)
    expected = norm_formula(x, weight, 1e-3)
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=1e-2)


def test_rms_norm_one_weight_a_head() -> None:
    fused, weight = noise(5, 6, 8), noise(4, 8)
    heads = fused[:, :4]  # a view, as in the attention layer
    torch.testing.assert_close(
        ops.rms_norm(heads, weight, 1e-6).double(),
        norm_formula(heads, weight, 1e-6),
        atol=1e-6,
        rtol=1e-5,
    )


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(ops.rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-6), torch.zeros(2, 4))


def test_add_rms_norm_updates_the_residual() -> None:
    x, residual, weight = noise(3, 8), noise(3, 8).flip(0), noise(8)
    expected = residual + x
    normed, stream = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert stream is residual
    assert torch.equal(residual, expected)
    assert torch.equal(normed, ops.rms_norm(expected, weight, 1e-6))


def test_rotary_turns_pairs() -> None:
    """Each (i, i + D/2) pair is a complex number multiplied by exp(i * angle)."""
    x, angles = noise(5, 3, 8), noise(5, 4)
    both = torch.cat((angles, angles), dim=-1)[:, None]
    sign = torch.tensor([-1.0] * 4 + [1.0] * 4)
    found = ops.rotary(x, both.cos(), both.sin() * sign)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(5, 4), angles)[:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = noise(5, 12, dtype=dtype)
    before = gate_up.clone()
    found = ops.silu_mul(gate_up)
    assert torch.equal(gate_up, before)
    gate, up = gate_up.double().chunk(2, -1)
    expected = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=2e-2)
