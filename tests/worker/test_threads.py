"""A tiny model runs on one thread, a larger one on torch's, and OMP_NUM_THREADS is obeyed."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.core.step import ModelRunnerOutput, SchedulerOutput
from paceline.worker import threads
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
    monkeypatch.setattr(threads, "_TEAM_PARAMETERS", 1_000_000)
    assert threads_of_a_run(monkeypatch) == {2}


def test_omp_num_threads_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads_of_a_run(monkeypatch) == {2}


@pytest.mark.parametrize("value", ["abc", "0", "-1", "1.5", " ", ""])
def test_what_is_no_number_counts_as_unset(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert threads_of_a_run(monkeypatch) == {1}


def test_other_threads_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that first asks torch while a tiny model computes is not given its number."""
    seen = []
    run = ModelRunner._run

    def spy(self: ModelRunner, out: SchedulerOutput) -> ModelRunnerOutput:
        other = Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        return run(self, out)

    monkeypatch.setattr(ModelRunner, "_run", spy)
    with LLM("paceline/demo", max_model_len=64, disable_log_stats=True) as llm:
        llm.generate(["import"], SamplingParams(max_tokens=3), use_tqdm=False)
    assert set(seen) == {2}


def test_an_error_gives_the_number_back() -> None:
    def fail() -> None:
        with threads.limit_threads(1):
            assert torch.get_num_threads() == 1
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert torch.get_num_threads() == 2
