"""The models of the end-to-end tests, made once, and one thread: they are tiny."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from e2e.callers import GREEDY, PROMPT, open_llm
from e2e.engines import Models, engine_with, make_engine, run, token_ids
from paceline import LLM
from paceline.engine.llm_engine import LLMEngine


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def target(models: Models) -> Path:
    """The example model."""
    return models.tiny()


@pytest.fixture(scope="module", params=[0, 1], ids=["delay0", "delay1"])
def engines(request: pytest.FixtureRequest, models: Models) -> dict[str, LLMEngine]:
    """One engine a drafter; a test that looks at counters must make its own."""
    names = ("none", "self", "lookup")
    return {name: engine_with(models, name, delay=request.param) for name in names}


@pytest.fixture(scope="session")
def expected(target: Path) -> list[int]:
    """What ``callers.PROMPT`` gives when nothing goes wrong."""
    return token_ids(run(make_engine(target), [PROMPT], GREEDY))[0]


@pytest.fixture
def llm(target: Path) -> Iterator[LLM]:
    """A speculating engine of one test's own."""
    with open_llm(target, speculative_model=str(target), num_speculative_tokens=3) as llm:
        yield llm
