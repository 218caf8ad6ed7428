"""What holds for all tests: which device they use.

Kernels run in Triton's interpreter where there is no GPU. Engines run on the CPU, also on a machine
with a GPU, unless a test is marked ``gpu``; ``pytest tests/e2e --device cuda`` runs them all on the
card.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from paceline.check import gpu
from paceline.engine_args import EngineArgs

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

# The first text that Hypothesis draws makes its Unicode tables, a second of work in a fresh clone.
settings.register_profile("paceline", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("paceline")

_find_gpu = gpu.find_gpu
_POOL_BYTES = 1 << 28  # of an engine on the card: tests hold several at once


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="of engines in tests")


def pytest_configure(config: pytest.Config) -> None:
    """Before any fixture, whatever its scope, makes an engine."""
    if config.getoption("--device") == "cpu":
        gpu.find_gpu = lambda: None
        return
    from_kwargs = EngineArgs.from_kwargs

    def with_small_pool(**args: Any) -> EngineArgs:
        if "num_gpu_blocks_override" not in args:
            args.setdefault("kv_cache_memory_bytes", _POOL_BYTES)
        return from_kwargs(**args)

    EngineArgs.from_kwargs = with_small_pool  # type: ignore[method-assign, assignment]


@pytest.fixture
def find_gpu() -> Callable[[], gpu.Gpu | None]:
    """The function itself, not what stands in its place."""
    return _find_gpu


@pytest.fixture(autouse=True)
def gpu_where_marked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu") is not None:
        monkeypatch.setattr(gpu, "find_gpu", _find_gpu)
