"""A request and its sequences, as the core keeps them. No torch, no tokenizer.

``Request`` is what a user sent; it has ``sampling.n`` sequences, each one stream of token ids.
While a sequence holds a row its ids live in the row table; otherwise they lie in
``Sequence.token_ids``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from paceline.arrays import Int32Array, TokenLogprobs
from paceline.outputs import SpeculativeMetrics
from paceline.sampling_params import SamplingParams

_MASK64 = (1 << 64) - 1


class StopChecker(Protocol):
    """Finds stop strings in the text of one sequence; lives outside the core."""

    def feed(self, token_ids: list[int]) -> int | None:
        """Take the next ids; how many of them stay when a stop string completed, else None."""

    @property
    def stop_reason(self) -> str | None:
        """The stop string found."""


class TokenGrammar(Protocol):
    """Says which ids may come next in one sequence; lives outside the core.

    It is told the sequence's output, in order and once. The runner asks it between drafting and
    verification, in the engine's thread.
    """

    @property
    def num_tokens(self) -> int:
        """Output tokens it was told so far."""

    @property
    def fault(self) -> str | None:
        """Why it cannot go on, once ``fill`` gave -1; None where nothing fits the text so far."""

    def accept(self, token_ids: Int32Array) -> None:
        """Take the next output ids."""

    def fill(self, drafts: Int32Array, words: Int32Array) -> int:
        """Say what may stand behind the output, and behind each of the drafts that follow it.

        drafts: [D]. words: [D + 1, ceil(vocab / 32)], gets the masks: bit i % 32 of word i // 32
        says whether id i may be sampled. Returns how many of the drafts may be verified: D, or
        fewer if one leaves the grammar; masks behind these are of no use. -1 if nothing at all may
        come next.
        """


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def derive_seed(engine_seed: int, number: int) -> int:
    """64-bit seed of the ``number``-th admitted request without one of its own.

    One splitmix64 output (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
    2014) at a state that both arguments determine.
    """
    state = (engine_seed * 0xD1342543DE82EF95 + (number + 1) * 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's outputs."""

    request: Request
    index: int
    token_ids: Int32Array  # [num_tokens] prompt + output; stale while the sequence holds a row
    status: SequenceStatus = SequenceStatus.WAITING
    row: int = -1
    stop_checker: StopChecker | None = None
    grammar: TokenGrammar | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # at its first admission
    block_hashes: list[bytes] = field(default_factory=list)  # of its leading full blocks
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one entry a committed run
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # one entry a prefill chunk
    num_prompt_logprobs: int = 0
    speculative: SpeculativeMetrics = field(default_factory=SpeculativeMetrics)

    @property
    def leader(self) -> Sequence:
        """The request's first sequence, whose prompt KV the others share."""
        return self.request.sequences[0]

    @property
    def finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def output_token_ids(self) -> list[int]:
        """Generated ids; valid when the sequence holds no row."""
        ids: list[int] = self.token_ids[self.request.prompt_len :].tolist()
        return ids


@dataclass(slots=True, eq=False)
class Request:
    """What a user sent, tokenised and checked."""

    request_id: str
    prompt_token_ids: Int32Array  # [prompt_len]
    sampling: SamplingParams
    arrival_time: float
    number: int = -1  # order of admission to the engine, set by the scheduler
    seed: int = 0  # 64-bit; derived at admission when the user gave none
    prompt: str | None = None
    eos_token_ids: frozenset[int] = frozenset()  # the model's own stop ids
    stream: bool = False  # whether new tokens are reported at every step
    keep_rounds: bool = False  # whether each round's drafts are kept, see ``SpeculativeMetrics``
    max_total_tokens: int = 0  # prompt + output, set at admission
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    sequences: list[Sequence] = field(init=False)
    num_unfinished: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_token_ids = np.ascontiguousarray(self.prompt_token_ids, np.int32)
        self.sequences = [
            Sequence(self, index, self.prompt_token_ids) for index in range(self.sampling.n)
        ]
        self.num_unfinished = len(self.sequences)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def finished(self) -> bool:
        return self.num_unfinished == 0

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence: the model's, unless ignored, and the user's."""
        own = frozenset() if self.sampling.ignore_eos else self.eos_token_ids
        return tuple(sorted(own.union(self.sampling.stop_token_ids or ())))
