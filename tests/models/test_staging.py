"""What is copied through the buffers arrives whole, whatever its shape and dtype."""

from __future__ import annotations

import pytest
import torch

from paceline.models import staging
from paceline.models.staging import Staging

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("shape", [(1,), (40,), (3, 8), (17, 5), (9, 4, 6), (2, 100), (0, 4), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_shape_arrives(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(staging, "_BUFFER_BYTES", 128)
    copies = Staging(DEVICE)
    for seed in range(3):
        source = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        destination = torch.full(shape, -9.0, dtype=dtype, device=DEVICE)
        copies.copy(source, destination)
        expected = source.to(dtype, copy=True)
        source.fill_(7)  # it may be gone as soon as the call returns
        assert torch.equal(destination.cpu(), expected)


def test_parts_of_parameters_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tensor parallelism and fused matrices have them: slices of both sides."""
    monkeypatch.setattr(staging, "_BUFFER_BYTES", 64)
    copies = Staging(DEVICE)
    parameter = torch.zeros(20, 6, device=DEVICE)
    source = torch.randn(30, 12)
    copies.copy(source.narrow(0, 10, 8), parameter[4:12, :6].new_empty(8, 12))
    copies.copy(source.narrow(1, 6, 6)[:10], parameter[5:15])
    copies.copy(source[0, :3], parameter[:2, 3:])
    expected = torch.zeros(20, 6)
    expected[5:15] = source[:10, 6:]
    expected[:2, 3:] = source[0, :3]
    assert torch.equal(parameter.cpu(), expected)
