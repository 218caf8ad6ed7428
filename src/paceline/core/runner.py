"""The runner seam: who executes steps."""

from __future__ import annotations

from typing import Any, Protocol

from paceline.core.step import ModelRunnerOutput, SchedulerOutput


class Runner(Protocol):
    """What executes steps; calls come in order, one thread."""

    def launch(self, output: SchedulerOutput) -> Any:
        """Start a step; returns a handle for ``collect``."""

    def collect(self, handle: Any) -> ModelRunnerOutput:
        """Wait for a launched step's result."""

    def close(self) -> None:
        """Give memory back; no call follows."""
