"""The engine's heart: schedule, launch, update. No text, no tensors, no clock.

``delay`` is how many launched steps may be uncollected while the next is planned: 0 collects at
once (the CPU), 1 keeps the host one step behind (a GPU). Both are the same code.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from paceline.core.runner import Runner
from paceline.core.scheduler import Scheduler, StepEvents


class EngineCore:
    """Drives a scheduler and a runner, a step at a time."""

    def __init__(self, scheduler: Scheduler, runner: Runner, *, delay: int = 0) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.delay = delay
        self._in_flight: deque[Any] = deque()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_unfinished or bool(self._in_flight)

    def step(self) -> StepEvents:
        """Schedule and launch one step, collect the oldest due, and say what came of it."""
        planned = self.scheduler.schedule()
        if not planned.is_empty:
            self._in_flight.append(self.runner.launch(planned))
        if self._in_flight and (planned.is_empty or len(self._in_flight) > self.delay):
            result = self.runner.collect(self._in_flight.popleft())
            self.scheduler.update_from_output(result)
        return self.scheduler.take_events()
