"""One thread, and a small pair of every family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_shapes import FAMILIES, plan_of

from paceline.synth.pair import write_pair


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A bfloat16 pair of each family; the drafter has fewer padded rows and layers."""
    found = {}
    for name, shape in FAMILIES.items():
        found[name] = tmp_path_factory.mktemp(name)
        drafter = replace(shape, rows=shape.rows - 64, num_layers=1)
        write_pair(plan_of(shape, drafter, found[name]))
    return found
