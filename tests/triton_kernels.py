"""Where kernel tests run: Triton's interpreter on a machine without a CUDA device, else the device.

Triton decides when a kernel is defined, so tests get modules with kernels from ``load`` and do not
import them at their top.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The interpreter multiplies the bit patterns of bfloat16 matrices as if they were integers.
DOT_DTYPES = DTYPES if DEVICE == "cuda" else [torch.float32, torch.float16]
TOLERANCE = {  # relative, of a norm; the interpreter truncates to bfloat16 where a card rounds
    torch.float32: 2e-6,
    torch.bfloat16: 2e-2 if DEVICE == "cpu" else 6e-3,
    torch.float16: 8e-4,
}


def load(name: str) -> Any:
    """A module with kernels; skips the calling test module where Triton is missing."""
    pytest.importorskip("triton")
    return importlib.import_module(name)


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Standard normal values on ``DEVICE``, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Relative distance in the Euclidean norm, by dtype of what was found; NaN never passes."""
    limit = TOLERANCE[found.dtype]
    assert found.shape == expected.shape
    distance = (found.cpu().double() - expected.cpu().double()).norm()
    assert distance <= limit * expected.double().norm().cpu() + 1e-12
