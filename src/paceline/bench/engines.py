"""Engines that measure: one in this process, or one in a process of its own.

A process of its own is told through a pipe when to run its workload; one runs at a time.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import platform
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from paceline.bench.prepare import EnginePlan, Placement
from paceline.config import EngineConfig
from paceline.errors import EngineError, PacelineError
from paceline.log import configure_logging

if TYPE_CHECKING:
    from paceline.bench.measure import Run

_PATIENCE_S = 10  # for a process that was told to end


class Engine(Protocol):
    """Opened and loaded."""

    machine: dict[str, Any]  # what it runs on, as JSON

    def run(self, k: int | None) -> Run:
        """One pass over the workload with draft length k, None for the engine's own.

        Raises:
            PacelineError: it failed.
        """

    def close(self) -> None:
        """Free its memory."""


class LocalEngine:
    """In this process."""

    def __init__(self, plan: EnginePlan) -> None:
        from paceline.bench.measure import ChosenLength
        from paceline.llm import LLM

        max_k = plan.spec.max_k
        self._policy = None if max_k is None else ChosenLength(max_k)
        self._workload = plan.workload
        self._llm = LLM(policy=self._policy, disable_log_stats=True, **plan.arguments)
        self.machine = describe_machine(plan.config)

    def run(self, k: int | None) -> Run:
        from paceline.bench.measure import measure

        if self._policy is not None and k is not None:
            self._policy.k = k
        return measure(self._llm, self._workload.prompts, self._workload.sampling)

    def close(self) -> None:
        self._llm.close()


class ChildEngine:
    """In a process of its own. Raises as ``LocalEngine``, and EngineError if the process ends."""

    def __init__(self, plan: EnginePlan) -> None:
        self._name = plan.spec.name
        context = multiprocessing.get_context("spawn")  # a fork would share torch's threads
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, plan), daemon=True)
        # The child inherits this: Ctrl-C reaches the whole process group, but is ours to handle.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._process.start()
        finally:
            signal.signal(signal.SIGINT, handler)
        theirs.close()  # so that the pipe ends when the child does
        try:
            self.machine: dict[str, Any] = self._receive()
        except BaseException:
            self.close()
            raise

    def run(self, k: int | None) -> Run:
        try:
            self._pipe.send(k)
        except OSError:
            raise self._ended() from None
        run: Run = self._receive()
        return run

    def close(self) -> None:
        self._pipe.close()
        self._process.terminate()  # it may be in the middle of a run
        self._process.join(_PATIENCE_S)
        self._process.kill()

    def _receive(self) -> Any:
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        if isinstance(answer, PacelineError):
            raise answer
        return answer

    def _ended(self) -> EngineError:
        self._process.join(_PATIENCE_S)
        status = self._process.exitcode
        how = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
        return EngineError(
            f"the process of variant {self._name or 'engine'} ended unexpectedly ({how}). hint: "
            "signal 9 usually means that the system ran out of memory; lower "
            "`kv_cache_memory_bytes` or `max_num_seqs`"
        )


def _serve(pipe: Connection, plan: EnginePlan) -> None:
    """What a process of its own does: load, then a run for each k it is told, until told no more.

    Answers with the machine first, then with runs. A PacelineError instead is the last answer.
    """
    # Told to end, it leaves in order, or Python warns of what it left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    configure_logging(logging.ERROR)  # the warnings have been shown
    try:
        engine = LocalEngine(plan)
        pipe.send(engine.machine)
        while True:
            pipe.send(engine.run(pipe.recv()))
    except (EOFError, BrokenPipeError):
        return
    except PacelineError as error:
        pipe.send(error)
    except Exception as error:
        pipe.send(EngineError(f"{type(error).__name__}: {error}"))


class EngineSet:
    """Opens the engines of a benchmark, all at once unless they take turns; a context manager.

    An engine is warm when ``get`` returns it: it has made one uncounted pass with each draft
    length, as first passes allocate and compile.
    """

    def __init__(
        self, plans: list[EnginePlan], lengths: list[list[int | None]], placement: Placement
    ) -> None:
        """lengths: the draft lengths that will be asked of each engine."""
        self._plans = plans
        self._lengths = lengths
        self._placement = placement
        self._open: dict[int, Engine] = {}
        # By engine, of those opened so far: one machine, but each has threads of its own.
        self.machines: dict[int, dict[str, Any]] = {}

    def get(self, index: int) -> Engine:
        """Engine ``index``, opened if it is not."""
        if index not in self._open:
            if self._placement == "alternating":
                self.close()
            kind = LocalEngine if self._placement == "shared" else ChildEngine
            engine: Engine = kind(self._plans[index])
            self._open[index] = engine
            self.machines[index] = engine.machine
            for k in self._lengths[index]:
                engine.run(k)
        return self._open[index]

    def close(self) -> None:
        """Close what is open."""
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> EngineSet:
        try:
            for index in range(len(self._plans) if self._placement != "alternating" else 0):
                self.get(index)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def describe_machine(config: EngineConfig) -> dict[str, Any]:
    """What an engine in this process runs on, as JSON: system, processor, threads, versions."""
    import torch

    from paceline.worker.threads import choose_threads

    device = config.device
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else _cpu_name()
    return {
        "system": platform.platform(),
        "device": device,
        "device_name": name,
        "cpu": _cpu_name(),
        "cores": cores,
        # Of the engine's passes: fewer than torch's for a tiny model.
        "threads": choose_threads(config.model.arch)
        if device == "cpu"
        else torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
