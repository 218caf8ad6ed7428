"""From what a user passes to a checked ``Request``: prompts, ids, limits set by the model."""

from __future__ import annotations

import dataclasses
import numbers
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from paceline.arrays import Int32Array
from paceline.config import GPU_MAX_LOGIT_BIAS, GPU_MAX_STOP_IDS, EngineConfig
from paceline.engine.structured import StructuredOutputs
from paceline.engine.tokenizer import Tokenizer
from paceline.errors import RequestError
from paceline.prompts import Prompt
from paceline.request import Request
from paceline.sampling_params import SamplingParams

_FORMS = 'a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": [ids]}'


class Admission:
    """Makes requests for one engine; raises RequestError before anything is queued."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self._config = config
        self._tokenizer = tokenizer
        vocab_size = config.model.arch.vocab_size
        ids = set(config.stop_token_ids)
        if tokenizer is not None:
            ids.update(tokenizer.stop_token_ids)
        self.eos_token_ids = frozenset(i for i in ids if 0 <= i < vocab_size)
        self.structured: StructuredOutputs | None = None
        if tokenizer is not None:
            self.structured = StructuredOutputs(tokenizer, vocab_size, self.eos_token_ids)

    def make_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        stream: bool = False,
        prepared: Future[Any] | None = None,
    ) -> Request:
        """Tokenise and check one request. prepared: of ``StructuredOutputs.prepare``, if called."""
        if not isinstance(sampling, SamplingParams):
            raise RequestError(
                f"sampling_params must be a SamplingParams, got {type(sampling).__name__}"
            )
        # A checked copy: what the caller does to its own later concerns no running request.
        sampling = dataclasses.replace(sampling)
        text, ids = self._tokenise(prompt)
        self._check_sampling(sampling)
        request = Request(
            request_id=request_id,
            prompt_token_ids=ids,
            sampling=sampling,
            arrival_time=time.monotonic(),
            prompt=text,
            eos_token_ids=self.eos_token_ids,
            stream=stream,
        )
        if sampling.structured_outputs is not None:
            self._set_grammars(request, prepared)
        return request

    def _set_grammars(self, request: Request, prepared: Future[Any] | None) -> None:
        """Give every sequence its grammar; waits for the compiler if nobody did before."""
        if self.structured is None:
            raise RequestError(
                "structured outputs need a tokenizer, but skip_tokenizer_init is set. hint: start "
                "without it"
            )
        grammars = self.structured.sequence_grammars(request.sampling, prepared)
        for sequence, grammar in zip(request.sequences, grammars, strict=True):
            sequence.grammar = grammar

    def _tokenise(self, prompt: Prompt) -> tuple[str | None, Int32Array]:
        text: str | None = None
        ids: Any = prompt
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown:
                raise RequestError(
                    f"a prompt dictionary has no key {sorted(map(str, unknown))[0]!r}. "
                    f"hint: a prompt is {_FORMS}"
                )
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if ids is None:
                ids = text
        if isinstance(ids, str):
            if self._tokenizer is None:
                raise RequestError(
                    "a text prompt needs a tokenizer, but skip_tokenizer_init is set. "
                    'hint: pass {"prompt_token_ids": [...]}'
                )
            text, ids = ids, self._tokenizer.encode(ids)
            if not ids:
                raise RequestError("the prompt is empty. hint: give at least one token")
        return text, self._check_ids(ids)

    def _check_ids(self, ids: Any) -> Int32Array:
        if isinstance(ids, np.ndarray):
            ids = ids.tolist()
        if isinstance(ids, bytes | bytearray | memoryview):
            raise RequestError(
                f"a prompt cannot be of type {type(ids).__name__}. hint: decode it to a text first"
            )
        if not isinstance(ids, Sequence):
            raise RequestError(
                f"a prompt cannot be of type {type(ids).__name__}. hint: a prompt is {_FORMS}"
            )
        if not ids:
            raise RequestError("the prompt has no tokens. hint: give at least one token")
        vocab_size = self._config.model.arch.vocab_size
        for place, token in enumerate(ids):
            if not isinstance(token, numbers.Integral) or isinstance(token, bool):
                raise RequestError(
                    f"prompt token {place} is {token!r}, not an integer. hint: a prompt is {_FORMS}"
                )
            if not 0 <= int(token) < vocab_size:
                raise RequestError(
                    f"prompt token {place} is {token}, but ids of this model run from 0 to "
                    f"{vocab_size - 1}"
                )
        return np.array(ids, np.int32)

    def _check_sampling(self, sampling: SamplingParams) -> None:
        vocab_size = self._config.model.arch.vocab_size
        for name, ids in (
            ("logit_bias", list(sampling.logit_bias or ())),
            ("stop_token_ids", list(sampling.stop_token_ids or ())),
        ):
            outside = [i for i in ids if not 0 <= i < vocab_size]
            if outside:
                raise RequestError(
                    f"{name} has the id {outside[0]}, but ids of this model run from 0 to "
                    f"{vocab_size - 1}"
                )
        if self._config.device == "cuda":
            self._check_room(sampling)
        limit = self._config.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(sampling, name)
            if asked is not None and asked > limit:
                raise RequestError(
                    f"{name}={asked} is above max_logprobs {limit}. hint: start the engine with "
                    f"max_logprobs={asked}"
                )
        if sampling.stop and self._tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, but skip_tokenizer_init is set. "
                "hint: use stop_token_ids"
            )

    def _check_room(self, sampling: SamplingParams) -> None:
        """What a row on a GPU has room for."""
        stops = set(sampling.stop_token_ids or ())
        if not sampling.ignore_eos:
            stops |= self.eos_token_ids
        for what, count, most in (
            ("stop token ids", len(stops), GPU_MAX_STOP_IDS),
            ("logit_bias entries", len(sampling.logit_bias or ()), GPU_MAX_LOGIT_BIAS),
        ):
            if count > most:
                raise RequestError(
                    f"the request has {count} {what}, more than the {most} that fit on a GPU. "
                    "hint: give fewer"
                )
