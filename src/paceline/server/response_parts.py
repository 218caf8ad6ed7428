"""What all responses share: heads, ids, the account of tokens, server-sent events."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec

from paceline import __version__
from paceline.outputs import SpeculativeMetrics
from paceline.server.convert import ServingContext
from paceline.server.messages import Delta

DONE = b"data: [DONE]\n\n"
SYSTEM_FINGERPRINT = f"paceline-{__version__}"

_encode = msgspec.json.Encoder().encode


def new_id(prefix: str, separator: str = "-") -> str:
    """An id such as ``chatcmpl-...``, never given twice."""
    return f"{prefix}{separator}{uuid.uuid4().hex}"


def event(value: dict[str, Any]) -> bytes:
    """A JSON value as a server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"


class ResponseHead:
    """The fields with which every chunk, or the body, of one response begins."""

    def __init__(self, response_id: str, kind: str, model: str) -> None:
        self.fields: dict[str, Any] = {
            "id": response_id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }

    @property
    def opening(self) -> bytes:
        """The fields as JSON, up to the value of ``choices``."""
        return _encode(self.fields)[:-1] + b',"choices":'


class TextChunks:
    """Chunks that say nothing but a piece of text, put together from bytes.

    A stream mostly consists of them. before, after: JSON of a choice around its text.
    """

    def __init__(self, head: ResponseHead, before: bytes, after: bytes, usage: bool) -> None:
        self._before_index = b"data: " + head.opening + b'[{"index":'
        self._before_text = before
        end = b',"logprobs":null,"finish_reason":null}]'
        self._after_text = after + end + (b',"usage":null' if usage else b"") + b"}\n\n"

    def chunk(self, index: int, text: str) -> bytes:
        """The next piece of choice ``index``; nothing when it is empty."""
        if not text:
            return b""
        parts = (self._before_index, b"%d" % index, self._before_text, _encode(text))
        return b"".join((*parts, self._after_text))


class Account:
    """Tokens of one response, and the drafts of its one output.

    num_outputs: of all its prompts together.
    """

    def __init__(self, context: ServingContext, num_outputs: int) -> None:
        self._level = context.spec_decode_metrics
        self._max_k = context.num_speculative_tokens or 0
        self._num_outputs = num_outputs
        self._drafts: SpeculativeMetrics | None = None
        self._prompts: dict[str, tuple[int, int]] = {}  # tokens, those of them found in the cache
        self._num_generated = 0

    def add(self, delta: Delta) -> None:
        """Count a delta's tokens."""
        self._num_generated += len(delta.token_ids)
        if delta.request_id not in self._prompts:
            counts = (delta.num_prompt_tokens, delta.num_cached_tokens)
            self._prompts[delta.request_id] = counts
        if delta.speculative is not None:
            self._drafts = delta.speculative

    def usage(self) -> dict[str, Any]:
        """OpenAI's ``usage`` so far."""
        prompt = sum(count for count, _ in self._prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._num_generated,
            "total_tokens": prompt + self._num_generated,
            "prompt_tokens_details": {
                "cached_tokens": sum(cached for _, cached in self._prompts.values())
            },
        }

    def usage_event(self, head: ResponseHead, asked: bool) -> bytes:
        """The last chunk of a stream: no choices, but usage; empty unless asked for."""
        if not asked:
            return b""
        chunk: dict[str, Any] = {**head.fields, "choices": [], "usage": self.usage()}
        self.add_metrics(chunk)
        return event(chunk)

    def add_metrics(self, result: dict[str, Any]) -> None:
        """vLLM's ``metrics``, if the server reports them; null for several outputs, as there."""
        if self._level != "none":
            one = self._drafts is not None and self._num_outputs == 1
            report = self._draft_report(self._drafts) if one and self._drafts else None
            result["metrics"] = {"speculative_decoding": report}

    def _draft_report(self, drafts: SpeculativeMetrics) -> dict[str, Any]:
        """Names are vLLM's; means of nothing are null."""
        rounds = drafts.num_drafts
        accepted = [0] * (self._max_k + 1)
        by_length: dict[str, list[int]] = {}
        for length, count in sorted(drafts.rounds):
            accepted[count] += 1
            by_length.setdefault(str(length), [0] * (length + 1))[count] += 1
        report = {
            "mean_acceptance_length": 1 + drafts.num_accepted_tokens / rounds if rounds else None,
            "draft_acceptance_rate": drafts.acceptance_rate,
            "acceptance_histogram": accepted,
            "acceptance_histogram_by_draft_length": by_length,
            "num_spec_steps": rounds,
            "num_accepted_draft_tokens": drafts.num_accepted_tokens,
            "num_draft_tokens": drafts.num_draft_tokens,
            "num_spec_tokens": self._max_k,
        }
        if self._level == "detailed":
            report["per_step_accepted"] = [count for _, count in drafts.rounds]
            report["per_step_drafted"] = [length for length, _ in drafts.rounds]
        return report
