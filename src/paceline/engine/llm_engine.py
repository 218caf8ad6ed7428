"""One engine: requests in, outputs out, a step at a time. Used by ``LLM`` and the server.

Joins admission (text to ids), the core (scheduler and runner) and the output side (ids to text).
Knows no progress bars, HTTP or threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from paceline.config import EngineConfig
from paceline.core.runner import Runner
from paceline.core.scheduler import Scheduler, StepEvents
from paceline.core.stats import EngineStats
from paceline.engine.admission import Admission
from paceline.engine.core import EngineCore
from paceline.engine.log_stats import StatsLogger
from paceline.engine.output_processor import OutputProcessor
from paceline.engine.tokenizer import Tokenizer
from paceline.errors import EngineError, RequestError
from paceline.outputs import CompletionOutput, Logprob, RequestOutput
from paceline.prompts import Prompt
from paceline.request import Request, Sequence
from paceline.sampling_params import SamplingParams
from paceline.spec.policy import DraftLengthPolicy, make_policy

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LLMEngine:
    """Loads what ``config`` names and serves requests until closed.

    policy: another ``DraftLengthPolicy`` than the configured one. delay: launched steps that may be
    uncollected (see ``EngineCore``); None leaves that to the runner. Raises ConfigError or
    CapacityError when something cannot load.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        policy: DraftLengthPolicy | None = None,
        delay: int | None = None,
        log_stats: bool = True,
    ) -> None:
        from paceline.worker.start import start_runner  # torch loads only where a model does

        path = config.tokenizer.path
        self.tokenizer = None if path is None else Tokenizer.load(path)
        self._policy = policy or make_policy(config.speculative)
        self._log_stats = log_stats
        started = start_runner(config, self._policy.max_k)
        self.config = started.config
        self._delay = started.delay if delay is None else delay
        self._runner: Runner | None = started.runner
        self._admission = Admission(self.config, self.tokenizer)
        self._stats = EngineStats()
        self._start()

    def _start(self) -> None:
        """Begin with no requests; what the runner keeps of earlier ones gets overwritten."""
        if self._runner is None:
            raise EngineError("the engine is closed")
        config, speculative = self.config, self.config.speculative
        scheduler = Scheduler(
            config.scheduler,
            config.cache,
            self._policy,
            seed=config.seed,
            drafter_has_kv=speculative is not None and speculative.method == "draft_model",
            drafter_context=speculative.draft_max_model_len if speculative is not None else None,
            stats=self._stats,
        )
        self.core = EngineCore(scheduler, self._runner, delay=self._delay)
        self._stats_logger = StatsLogger(scheduler)
        self._outputs = OutputProcessor(self.tokenizer)
        self._requests: dict[str, Request] = {}

    @property
    def stats(self) -> EngineStats:
        """Totals since the start."""
        self._check_open()
        return self.core.scheduler.stats

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def prepare(self, sampling: SamplingParams) -> Future[Any] | None:
        """Start what a request needs before it can be made, in a thread: compile its grammar.

        ``make_request`` waits for it too, but then nothing else runs. None where there is nothing
        to wait for. May be called from any thread; the future raises RequestError where
        ``make_request`` would.
        """
        structured = self._admission.structured
        return None if structured is None else structured.prepare(sampling)

    def make_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        stream: bool = False,
        prepared: Future[Any] | None = None,
    ) -> Request:
        """Tokenise and check a request without queueing it. Raises RequestError.

        prepared: what ``prepare`` returned for it, so that nothing is compiled again.
        """
        self._check_open()
        request = self._admission.make_request(
            request_id, prompt, sampling, stream=stream, prepared=prepared
        )
        self.core.scheduler.check_request(request)
        return request

    def add_request(self, request: Request) -> None:
        """Queue a checked request. Raises RequestError if its id is in use."""
        self._check_open()
        if request.request_id in self._requests:
            raise RequestError(
                f"request id {request.request_id!r} is in use. hint: give every request its own id"
            )
        if not self._requests:
            self._stats_logger.begin()
        self._outputs.add(request)
        self.core.scheduler.add_request(request)
        self._requests[request.request_id] = request

    def abort_request(self, request_id: str) -> list[RequestOutput]:
        """End a request and free its blocks; its output so far, nothing if the id is unknown.

        Unknown is no error: the request may just have ended.
        """
        request = self._requests.get(request_id)
        if request is None:
            return []
        self.core.scheduler.abort(request)
        return self._collect(self.core.scheduler.take_events())

    def drop_request(self, request_id: str) -> None:
        """As ``abort_request``, for a caller who wants none of its output."""
        request = self._requests.get(request_id)
        if request is not None:
            self.core.scheduler.abort(request)
            self._take(self.core.scheduler.take_events())
            self._outputs.forget(request)

    def step(self) -> list[RequestOutput]:
        """Run one step; outputs of requests that finished, and of streaming ones that grew.

        Raises EngineError if the step failed: every unfinished request is then lost, and the engine
        is empty and usable again.
        """
        return self._step(self._collect)

    def step_gained(self) -> list[tuple[Sequence, CompletionOutput]]:
        """As ``step``, but what each streaming or ended sequence has gained in this step.

        A request is followed either by this or by ``step``.
        """
        return self._step(self._collect_gained)

    def prompt_logprobs(self, request: Request) -> list[dict[int, Logprob] | None] | None:
        """One entry a prompt token, once the first output token is there; None if not asked for."""
        return self._outputs.prompt_logprobs(request)

    def _step(self, collect: Callable[[StepEvents], T]) -> T:
        self._check_open()
        try:
            collected = collect(self.core.step())
        except BaseException as error:
            dropped = len(self._requests)
            self._start()
            if not isinstance(error, Exception):
                raise
            raise EngineError(
                f"a step failed ({type(error).__name__}: {error}); {dropped} unfinished requests "
                "were dropped. The engine is empty and can be used again"
            ) from error
        if self._log_stats:
            self._stats_logger.tick()
        return collected

    def log_leftovers(self) -> None:
        """Log the work since the last line if it is time; for callers who wait for work."""
        if self._log_stats:
            self._stats_logger.tick()

    def _collect(self, events: StepEvents) -> list[RequestOutput]:
        touched = {
            sequence.request.request_id: sequence.request
            for sequence in self._take(events)
            if sequence.request.finished or sequence.request.stream
        }
        return [self._outputs.output(request) for request in touched.values()]

    def _collect_gained(self, events: StepEvents) -> list[tuple[Sequence, CompletionOutput]]:
        return [(sequence, self._outputs.gained(sequence)) for sequence in self._take(events)]

    def _take(self, events: StepEvents) -> list[Sequence]:
        """Take note of events; the sequences that grew (streaming ones) or ended."""
        now = time.monotonic()
        touched: dict[Sequence, None] = {}
        for request in events.first_tokens:
            request.first_token_time = request.first_token_time or now
        for sequence, token_ids in events.streamed:
            self._outputs.extend(sequence, token_ids)
            touched[sequence] = None
        for sequence in events.finished:
            request = sequence.request
            self._outputs.finish(sequence)
            if sequence.error is not None:
                logger.error("request %s failed: %s", request.request_id, sequence.error)
            if request.finished:
                request.finished_time = now
                self._requests.pop(request.request_id, None)
            touched[sequence] = None
        return list(touched)

    def close(self) -> None:
        """Free the model and the KV pool; unfinished requests are dropped."""
        if self._runner is not None:
            self._start()
            self._runner.close()
            self._runner = None
            del self.core

    def _check_open(self) -> None:
        if self._runner is None:
            raise EngineError("the engine is closed. hint: make a new LLM")
