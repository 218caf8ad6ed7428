"""What a request returns; field names and meanings are vLLM's where it has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Logprob(NamedTuple):
    """Natural log of a token's probability under the raw model distribution."""

    logprob: float
    rank: int | None = None  # 1 is the most probable token
    decoded_token: str | None = None


@dataclass(slots=True)
class SpeculativeMetrics:
    """Drafts of one request, after the cut at its end."""

    num_drafts: int = 0  # rounds that proposed at least one token
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    # Drafts proposed and accepted in each of these rounds, where the server was asked for it.
    rounds: list[tuple[int, int]] = field(default_factory=list)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted ÷ proposed, None before anything was proposed."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None


@dataclass(slots=True)
class RequestMetrics:
    """Times are seconds of ``time.monotonic``."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    num_preemptions: int = 0
    speculative_decoding: SpeculativeMetrics = field(default_factory=SpeculativeMetrics)


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's ``n`` outputs.

    finish_reason: None while running, else "stop", "length", "abort" or "error".
    stop_reason: the stop string or stop token id that ended it; None at an EOS token or length.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """State of a request: cumulative texts and ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None  # why finish_reason is "error"
