"""Packed products equal plain ones, for every number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paceline.ops.cpu_linear import can_pack, pack_weight, packed_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_linear(dtype: torch.dtype, rows: int, bias: bool) -> None:
    if not can_pack(dtype, torch.device("cpu")):
        pytest.skip("this CPU has no packed layout")
    generator = torch.Generator().manual_seed(rows)
    x, weight, b = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((rows, 37), (50, 37), (50,))
    )
    found = packed_linear(x, pack_weight(weight), b if bias else None)
    expected = F.linear(x.double(), weight.double(), b.double() if bias else None)
    assert found.shape == (rows, 50)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype is torch.float32 else 6e-2
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=1e-2)


def test_views_are_read_right() -> None:
    if not can_pack(torch.float32, torch.device("cpu")):
        pytest.skip("this CPU has no packed layout")
    wide, weight = torch.randn(5, 40), torch.randn(6, 20)
    packed = pack_weight(weight)
    for rows in (1, 5):
        x = wide[:rows, ::2]
        torch.testing.assert_close(packed_linear(x, packed, None), x @ weight.T)


def test_what_cannot_be_packed() -> None:
    assert not can_pack(torch.float16, torch.device("cpu"))
    assert not can_pack(torch.float32, torch.device("meta"))
