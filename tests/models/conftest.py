"""One thread, as the models are tiny; and both kinds of CPU kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from native_kernels import kernels
from paceline import ops


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["cpu", "cpu-native"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of an attention backend, the element-wise operations that go with it in use."""
    name: str = request.param
    ops.use("cpu", kernels() if name == "cpu-native" else None)
    yield name
    ops.use("cpu", None)
