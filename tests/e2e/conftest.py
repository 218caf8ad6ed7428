"""The models of the end-to-end tests, made once, and one thread: they are tiny."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from e2e.engines import Models


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))
