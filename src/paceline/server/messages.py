"""What the API process and the engine process tell each other, as msgpack.

Plain data. Knows no sockets, HTTP or engine; both sides import it, so it must not import torch.

    data = encode(AddRequest("cmpl-1", [1, 2, 3], SamplingParams()))
    message = decode_for_engine(data)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from paceline.config import EngineConfig
from paceline.outputs import SpeculativeMetrics
from paceline.sampling_params import SamplingParams


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Candidates of one position: the chosen id first, then the most probable ones."""

    ids: list[int]
    logprobs: list[float]  # natural log, of the raw model distribution
    ranks: list[int]  # 1 is the most probable token
    texts: list[str]  # each token on its own; "" without a tokenizer


class Times(msgspec.Struct, array_like=True):
    """When the request was first scheduled and had its first token, and when this output ended.

    Moments of ``time.monotonic``, which all processes of a machine share.
    """

    scheduled: float | None
    first_token: float | None
    ended: float


class Delta(msgspec.Struct, array_like=True):
    """What one step, or several, added to one output of a request."""

    request_id: str
    index: int  # which of the request's n outputs
    text: str  # new text, whole characters
    token_ids: list[int]  # new ids
    logprobs: list[TokenLogprobs] | None  # one entry a new id, None if not asked for
    finish_reason: str | None  # "stop", "length", "abort" or "error" with the last delta
    stop_reason: int | str | None
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    prompt_logprobs: list[TokenLogprobs | None] | None  # with output 0's first delta, if asked for
    speculative: SpeculativeMetrics | None  # with the last delta of an output
    times: Times | None  # with the last delta of an output
    error: str | None  # why finish_reason is "error"
    error_status: int = 500  # what the error is in HTTP: 400 where the request is at fault


# ---- to the engine -------------------------------------------------------------------------------


class Start(msgspec.Struct, array_like=True, tag="start"):
    """The first message: load this."""

    config: EngineConfig
    log_stats: bool = True


class AddRequest(msgspec.Struct, array_like=True, tag="add"):
    """Serve a request. The id is the API process's own, never used twice."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    stream: bool = True  # a delta after every step, or one an output when it has ended
    keep_rounds: bool = False  # whether the last delta says what became of each round's drafts


class Abort(msgspec.Struct, array_like=True, tag="abort"):
    """End these requests; nothing more is said of them. Unknown ids are no fault."""

    request_ids: list[str]


class Shutdown(msgspec.Struct, array_like=True, tag="shutdown"):
    """Leave, whatever is unfinished."""


# ---- from the engine -----------------------------------------------------------------------------


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The engine is loaded; these values are final."""

    max_model_len: int
    max_num_seqs: int
    num_blocks: int  # of the KV pool
    block_size: int
    load_seconds: float


class Deltas(msgspec.Struct, array_like=True, tag="deltas"):
    """Everything that one step added."""

    deltas: list[Delta]


class Stats(msgspec.Struct, array_like=True, tag="stats"):
    """The engine as it stands, twice a second while it works and once a second while it does not.

    It is also the sign of life: it is sent between steps, so a step that hangs stops it.
    """

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_steps: int
    num_prompt_tokens: int  # totals since the start from here on, as in ``EngineStats``
    num_request_prompt_tokens: int
    num_generation_tokens: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_preemptions: int
    num_batched_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    proposed_by_position: list[int]
    accepted_by_position: list[int]
    choices: list[tuple[int, str, int]]  # k, why, rounds


class Fatal(msgspec.Struct, array_like=True, tag="fatal"):
    """The last words of an engine that cannot start or go on.

    kind: name of the class in ``paceline.errors`` that says so.
    """

    kind: str
    message: str


ToEngine = Start | AddRequest | Abort | Shutdown
FromEngine = Ready | Deltas | Stats | Fatal

encode: Callable[[ToEngine | FromEngine], bytes] = msgspec.msgpack.Encoder().encode
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def decode_for_engine(data: Any) -> ToEngine:
    """Raises msgspec.DecodeError, msgspec.ValidationError or RequestError (sampling)."""
    return _to_engine.decode(data)


def decode_from_engine(data: Any) -> FromEngine:
    """Raises msgspec.DecodeError or msgspec.ValidationError."""
    return _from_engine.decode(data)
