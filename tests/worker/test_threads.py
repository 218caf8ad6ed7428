"""A tiny model runs on one thread, a larger one on torch's, and OMP_NUM_THREADS is obeyed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.core.step import ModelRunnerOutput, SchedulerOutput
from paceline.worker import build
from paceline.worker.model_runner import ModelRunner


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def threads_of_a_run(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """What torch had while steps of the demo model ran."""
    seen = set()
    run = ModelRunner._run

    def spy(self: ModelRunner, out: SchedulerOutput) -> ModelRunnerOutput:
        seen.add(torch.get_num_threads())
        return run(self, out)

    monkeypatch.setattr(ModelRunner, "_run", spy)
    with LLM("paceline/demo", max_model_len=64, disable_log_stats=True) as llm:
        llm.generate(["import"], SamplingParams(max_tokens=3), use_tqdm=False)
    assert torch.get_num_threads() == 2
    return seen


def test_a_tiny_model_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads_of_a_run(monkeypatch) == {1}


def test_a_larger_one_takes_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_TEAM_PARAMETERS", 1_000_000)
    assert threads_of_a_run(monkeypatch) == {2}


def test_omp_num_threads_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads_of_a_run(monkeypatch) == {2}
