"""One engine: requests in, outputs out, a step at a time. Used by ``LLM`` and the server.

Joins admission (text to ids), the core (scheduler and runner) and the output side (ids to text).
Knows no progress bars, HTTP or threads.
"""

from __future__ import annotations

import logging
import time

from paceline.config import EngineConfig
from paceline.core.runner import Runner
from paceline.core.scheduler import Scheduler, StepEvents
from paceline.core.stats import EngineStats
from paceline.engine.admission import Admission, Prompt
from paceline.engine.core import EngineCore
from paceline.engine.log_stats import StatsLogger
from paceline.engine.output_processor import OutputProcessor
from paceline.engine.tokenizer import Tokenizer
from paceline.errors import EngineError, RequestError
from paceline.outputs import RequestOutput
from paceline.request import Request
from paceline.sampling_params import SamplingParams
from paceline.spec.policy import DraftLengthPolicy, make_policy

logger = logging.getLogger(__name__)


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

    def make_request(
        self, request_id: str, prompt: Prompt, sampling: SamplingParams, *, stream: bool = False
    ) -> Request:
        """Tokenise and check a request without queueing it. Raises RequestError."""
        self._check_open()
        request = self._admission.make_request(request_id, prompt, sampling, stream=stream)
        self.core.scheduler.check_request(request)
        return request

    def add_request(self, request: Request) -> None:
        """Queue a checked request. Raises RequestError if its id is in use."""
        self._check_open()
        if request.request_id in self._requests:
            raise RequestError(
                f"request id {request.request_id!r} is in use. hint: give every request its own id"
            )
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

    def step(self) -> list[RequestOutput]:
        """Run one step; outputs of requests that finished, and of streaming ones that grew.

        Raises EngineError if the step failed: every unfinished request is then lost, and the engine
        is empty and usable again.
        """
        self._check_open()
        try:
            events = self.core.step()
            outputs = self._collect(events)
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
        return outputs

    def _collect(self, events: StepEvents) -> list[RequestOutput]:
        now = time.monotonic()
        touched: dict[str, Request] = {}
        for request in events.first_tokens:
            request.first_token_time = request.first_token_time or now
        for sequence, token_ids in events.streamed:
            self._outputs.extend(sequence, token_ids)
            touched[sequence.request.request_id] = sequence.request
        for sequence in events.finished:
            request = sequence.request
            self._outputs.finish(sequence)
            if sequence.error is not None:
                logger.error("request %s failed: %s", request.request_id, sequence.error)
            if request.finished:
                request.finished_time = now
                self._requests.pop(request.request_id, None)
            if request.finished or request.stream:
                touched[request.request_id] = request
        return [self._outputs.output(request) for request in touched.values()]

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
