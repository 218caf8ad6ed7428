"""LLM's own bookkeeping: abandoned streams, forks, interrupts, parameters changed too late."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from paceline import LLM, SamplingParams
from paceline.errors import EngineError
from paceline.outputs import RequestOutput
from paceline.spec.policy import DraftChoice, DraftOutcome, Load

LONG = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


class CollectingPolicy:
    """Collects garbage in the middle of scheduling, as the interpreter may at any moment."""

    max_k = 0

    def choose(self, load: Load) -> DraftChoice:
        gc.collect()
        return DraftChoice(0, "collecting")

    def observe(self, outcome: DraftOutcome) -> None:
        """Nothing to learn."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, dtype="float32", kv_cache_memory_bytes=1 << 22, max_num_seqs=4) as made:
        yield made


def assert_idle(llm: LLM) -> None:
    scheduler = llm.engine.core.scheduler
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
    assert not scheduler.table.occupied.any()
    assert not llm.engine.has_unfinished_requests
    assert not llm._inboxes


def test_stream_collected_as_garbage_within_a_step_blocks_nothing(model: Path) -> None:
    def give_up(*_: object) -> None:
        raise TimeoutError("the engine waits for itself")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    try:
        with LLM(
            model, dtype="float32", kv_cache_memory_bytes=1 << 22, policy=CollectingPolicy()
        ) as llm:
            stream = llm.stream([1, 2, 3], LONG)
            next(stream)
            cycle: list[object] = [stream]
            cycle.append(cycle)
            del stream, cycle
            outputs = llm.generate([[4, 5]], SHORT, use_tqdm=False)
            assert len(outputs[0].outputs[0].token_ids) == 4
            llm.generate([[4, 5]], SHORT, use_tqdm=False)
            assert_idle(llm)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_closed_stream_leaves_an_idle_engine_at_once(llm: LLM) -> None:
    stream = llm.stream([1, 2, 3], LONG)
    next(stream)
    stream.close()
    assert_idle(llm)


def test_parameters_changed_after_submission_concern_no_running_request(llm: LLM) -> None:
    expected = llm.generate([[7, 8]], LONG, use_tqdm=False)[0].outputs[0].token_ids
    params = LONG.clone()
    # Four streams hold all rows, so that the fifth still waits when its parameters change.
    streams = [llm.stream([i, 9], LONG) for i in range(4)]
    for stream in streams:
        next(stream)
    waiting = llm.stream([7, 8], params)
    engine_request = llm.engine.make_request("late", [7, 8], params)
    params.temperature = None  # type: ignore[assignment]
    params.stop_token_ids = [10**12]
    params.min_tokens = None  # type: ignore[assignment]
    assert engine_request.sampling.temperature == 0
    with pytest.raises(ValueError, match="temperature"):
        next(waiting)  # submitted only now, with what became of its parameters
    inbox: list[RequestOutput] = []
    llm._add([engine_request], inbox)
    finished: list[RequestOutput] = []
    while not finished:
        finished = [o for o in llm._receive(inbox, [engine_request]) if o.finished]
    assert finished[0].outputs[0].token_ids == expected


# An interrupt that comes while an object is destroyed is reported there and goes no further.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupt_at_any_moment_leaves_an_idle_engine(llm: LLM) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    expected = llm.generate([[1, 2]], SHORT, use_tqdm=False)[0].outputs[0].token_ids
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for i in range(60):
            signal.setitimer(signal.ITIMER_REAL, 0.0003 + i * 0.0004)
            try:
                llm.generate([[1, 2], [3], [4, 5, 6]], SHORT, use_tqdm=False)
            except KeyboardInterrupt:
                pass
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:  # the timer fired between the two lines above
        pass
    finally:
        signal.signal(signal.SIGALRM, before)
    assert llm.generate([[1, 2]], SHORT, use_tqdm=False)[0].outputs[0].token_ids == expected
    assert_idle(llm)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_is_told_that_the_engine_is_not_its_own(llm: LLM) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            llm.generate([[1]], SHORT, use_tqdm=False)
            os.write(write, b"ran")
        except EngineError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    deadline = time.monotonic() + 30
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        assert time.monotonic() < deadline, "the child hangs"
        time.sleep(0.01)
    assert b"belongs to process" in os.read(read, 1000)
    os.close(read)
