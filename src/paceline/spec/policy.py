"""Who decides the draft length: ``DraftLengthPolicy`` sees counts, never tensors.

The scheduler asks once a step and may lower the answer (blocks, token budget, model lengths); the
reason it records is the one that bound. The policy is told what came of every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paceline.config import SpeculativeConfig


@dataclass(frozen=True, slots=True)
class Load:
    """What a choice may rest on."""

    num_running: int  # sequences that hold a row
    num_decoding: int  # of these, the ones this step's decode pass serves
    num_waiting: int
    num_context_tokens: int  # KV tokens the decode pass reads


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """Draft length for one step, and why."""

    k: int
    reason: str


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """What one step's decode pass brought."""

    k: int
    num_rows: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_committed_tokens: int


class DraftLengthPolicy(Protocol):
    """Called by the scheduler only; must be cheap (microseconds) and must not block."""

    @property
    def max_k(self) -> int:
        """The largest k ``choose`` may ever return; buffers are sized by it."""

    def choose(self, load: Load) -> DraftChoice:
        """Draft length for the coming step; 0 is plain decode."""

    def observe(self, outcome: DraftOutcome) -> None:
        """Take note of a finished step."""


class FixedPolicy:
    """The configured k, or 0 above ``disable_by_batch_size`` running sequences (0: never)."""

    def __init__(self, num_speculative_tokens: int, disable_by_batch_size: int = 0) -> None:
        self.max_k = num_speculative_tokens
        self._disable_above = disable_by_batch_size

    def choose(self, load: Load) -> DraftChoice:
        if self._disable_above and load.num_running > self._disable_above:
            reason = f"disabled by batch size: {load.num_running} running > {self._disable_above}"
            return DraftChoice(0, reason)
        return DraftChoice(self.max_k, "fixed" if self.max_k else "no drafter")

    def observe(self, outcome: DraftOutcome) -> None:
        """A fixed length learns nothing."""


def make_policy(config: SpeculativeConfig | None) -> DraftLengthPolicy:
    """The policy a configuration names; without a drafter k is always 0."""
    if config is None:
        return FixedPolicy(0)
    return FixedPolicy(config.num_speculative_tokens, config.disable_by_batch_size)
