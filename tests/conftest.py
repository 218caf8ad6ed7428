"""What holds for all tests: kernels run in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

from paceline.check import gpu

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton


@pytest.fixture(autouse=True)
def no_gpu_by_default(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of tests run on the CPU, also on a machine with a GPU, unless marked ``gpu``."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(gpu, "find_gpu", lambda: None)
