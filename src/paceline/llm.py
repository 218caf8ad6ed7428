"""The offline API: three lines from a model directory to text.

from paceline import LLM, SamplingParams
llm = LLM(model="Qwen/Qwen2.5-1.5B-Instruct", speculative_model="Qwen/Qwen2.5-0.5B-Instruct",
          num_speculative_tokens=5)
outputs = llm.generate(["def quicksort("], SamplingParams(max_tokens=128))
"""

from __future__ import annotations

import contextlib
import itertools
import numbers
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from paceline.core.stats import EngineStats
from paceline.engine.llm_engine import LLMEngine
from paceline.engine.tokenizer import Tokenizer
from paceline.engine_args import EngineArgs
from paceline.errors import EngineError, RequestError
from paceline.log import configure_logging
from paceline.no_effect import NoEffect, known_keywords
from paceline.outputs import RequestOutput
from paceline.prompts import Prompt
from paceline.request import Request
from paceline.sampling_params import SamplingParams
from paceline.spec.policy import DraftLengthPolicy
from paceline.vllm_names import METHODS

# vLLM's keywords of ``generate`` and ``chat`` that change nothing here, at these values.
_NO_LORA = "LoRA adapters are not supported"
_NO_EFFECT: dict[str, NoEffect] = {
    "guided_options_request": NoEffect(
        (None,), "each request says so itself", "use `structured_outputs` of SamplingParams"
    ),
    "lora_request": NoEffect((None,), _NO_LORA),
    "mm_processor_kwargs": NoEffect((None, {}), "only text generation is supported"),
    "priority": NoEffect((None,), "requests are served first come first served"),
    "prompt_adapter_request": NoEffect((None,), "prompt adapters are not supported"),
    "prompt_token_ids": NoEffect(
        (None,), "ids are prompts too", 'pass them as prompts, or as {"prompt_token_ids": [ids]}'
    ),
    "tokenization_kwargs": NoEffect(
        (None, {}), "prompts are tokenised in one way", "pass token ids"
    ),
}
_CHAT_NO_EFFECT = _NO_EFFECT | {
    "chat_template_content_format": NoEffect(("auto",), "the template decides"),
}
_CALL = ("prompts", "sampling_params", "use_tqdm", "on_output")
_TEMPLATE = (
    "chat_template",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
)


class LLM:
    """A model ready to generate.

    model: local directory or hub id. engine_args: any field of ``EngineArgs``, and vLLM's arguments
    that change nothing here. policy: a ``DraftLengthPolicy`` of your own. Raises ConfigError or
    CapacityError before weights load, with all faults of the values and files in one message.

    Calls from several threads share one batch. Several LLMs may live in one process.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        policy: DraftLengthPolicy | None = None,
        disable_log_stats: bool = False,
        **engine_args: Any,
    ) -> None:
        configure_logging()
        config = EngineArgs.from_kwargs(model=model, **engine_args).resolve()
        self.engine = LLMEngine(config, policy=policy, log_stats=not disable_log_stats)
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._numbers = itertools.count()
        # Where outputs of running requests go; one list for all requests of one call.
        self._inboxes: dict[str, list[RequestOutput]] = {}
        self._dropped: deque[Request] = deque()  # left by their callers, not yet ended

    # ---- generation ------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        on_output: Callable[[int, RequestOutput], None] | None = None,
        **vllms: Any,
    ) -> list[RequestOutput]:
        """Complete prompts; outputs come in the order of the prompts.

        prompts: one or a list of: text, token ids, ``{"prompt": text}``,
        ``{"prompt_token_ids": ids}``. sampling_params: one for all or one each; None takes the
        model's defaults. on_output: called with the number of a prompt, from 0, and its output
        when that has finished. vllms: vLLM's keywords that change nothing here. Raises RequestError
        before anything runs if any of them is wrong, EngineError if the engine is closed or a step
        fails.
        """
        known_keywords("keyword of `generate`", vllms, _CALL, _NO_EFFECT)
        listed = _as_list(prompts)
        params = self._params_for(len(listed), sampling_params)
        self._prepare(params)
        with self._locked():
            requests = [
                self.engine.make_request(str(next(self._numbers)), prompt, sampling)
                for prompt, sampling in zip(listed, params, strict=True)
            ]
        if not requests:
            return []
        return self._run(requests, use_tqdm, on_output)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or a list of conversations, through the model's chat template.

        messages: dicts with ``role`` and ``content``, or a list of such lists. template_options:
        ``chat_template, tools, add_generation_prompt, continue_final_message,
        chat_template_kwargs``, and vLLM's keywords that change nothing here. Raises RequestError
        for what the template refuses; otherwise as ``generate``.
        """
        known = ("messages", "sampling_params", "use_tqdm", *_TEMPLATE)
        template_options = known_keywords(
            "keyword of `chat`", template_options, known, _CHAT_NO_EFFECT
        )
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise RequestError(
                'messages is empty or no list. hint: pass [{"role": "user", "content": "..."}]'
            )
        conversations = messages if isinstance(messages[0], list | tuple) else [messages]
        tokenizer = self.get_tokenizer()
        prompts: list[Prompt] = []
        for conversation in conversations:
            text = tokenizer.apply_chat_template(conversation, tokenize=False, **template_options)
            # The template has written the special tokens, BOS included.
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding its growing output after every step that added to it.

        Leaving the loop early aborts the request. Raises as ``generate``.
        """
        sampling = self._params_for(1, sampling_params)[0]
        self._prepare([sampling])
        inbox: list[RequestOutput] = []
        with self._locked():
            number = str(next(self._numbers))
            request = self.engine.make_request(number, prompt, sampling, stream=True)
        try:
            self._add([request], inbox)
            finished = False
            while not finished:
                for output in self._receive(inbox, [request]):
                    finished = output.finished
                    yield output
        finally:
            self._drop([request])

    def _run(
        self,
        requests: list[Request],
        use_tqdm: bool,
        on_output: Callable[[int, RequestOutput], None] | None,
    ) -> list[RequestOutput]:
        places = {request.request_id: place for place, request in enumerate(requests)}
        inbox: list[RequestOutput] = []
        finished: dict[str, RequestOutput] = {}
        try:
            self._add(requests, inbox)
            with _Progress(self.engine.stats, len(requests), use_tqdm) as progress:
                while len(finished) < len(requests):
                    for output in self._receive(inbox, requests):
                        finished[output.request_id] = output
                        if on_output is not None:
                            on_output(places[output.request_id], output)
                    progress.show(len(finished))
        finally:
            self._drop(requests)
        return [finished[request.request_id] for request in requests]

    def _prepare(self, params: list[SamplingParams]) -> None:
        """Wait for grammars to compile, while other threads' requests go on."""
        asked = [p for p in params if isinstance(p, SamplingParams) and p.structured_outputs]
        for future in [self.engine.prepare(p) for p in asked]:
            if future is not None:
                future.result()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The engine, for one thread of the process that made it."""
        if os.getpid() != self._process:
            raise EngineError(
                f"this LLM belongs to process {self._process}, and a forked child cannot use it. "
                "hint: spawn the child, with `multiprocessing.get_context('spawn')`, and make its "
                "LLM there"
            )
        with self._lock:
            self._end_dropped()
            yield

    def _add(self, requests: list[Request], inbox: list[RequestOutput]) -> None:
        with self._locked():
            for request in requests:
                self._inboxes[request.request_id] = inbox
                self.engine.add_request(request)

    def _receive(self, inbox: list[RequestOutput], owners: list[Request]) -> list[RequestOutput]:
        """Empty an inbox, after one more step if nothing lies in it.

        A step serves all callers: whoever runs it leaves the others' outputs in their inboxes.
        """
        with self._locked():
            if not inbox:
                if owners[-1].request_id not in self._inboxes:
                    raise EngineError("requests were dropped: the engine was closed or failed")
                try:
                    stepped = self.engine.step()
                except BaseException:
                    self._inboxes.clear()
                    raise
                for output in stepped:
                    owner = self._inboxes.get(output.request_id)
                    if owner is not None:  # an aborted request has no one waiting
                        owner.append(output)
            received = inbox.copy()
            inbox.clear()
            return received

    def _drop(self, requests: list[Request]) -> None:
        """Forget requests, ending those that still run; at once, or before the next step.

        May be called by the garbage collector, on an abandoned stream, in the middle of a step of
        this very thread. So it waits for nothing.
        """
        self._dropped.extend(requests)
        if self._lock.acquire(blocking=False):
            try:
                self._end_dropped()
            finally:
                self._lock.release()

    def _end_dropped(self) -> None:
        """End what ``_drop`` was given. The caller holds the lock."""
        while self._dropped:
            request = self._dropped.popleft()
            if self._inboxes.pop(request.request_id, None) is not None and not request.finished:
                self.engine.abort_request(request.request_id)

    def _params_for(
        self, count: int, given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * count
        if not isinstance(given, Sequence):
            raise RequestError(
                f"sampling_params must be a SamplingParams, got {type(given).__name__}. hint: pass "
                "one for all, or a list of one each"
            )
        if len(given) != count:
            prompts = "1 prompt" if count == 1 else f"{count} prompts"
            got = "1 SamplingParams" if len(given) == 1 else f"{len(given)} SamplingParams"
            raise RequestError(f"{prompts} but {got}. hint: pass one for all or one each")
        return list(given)

    # ---- the rest --------------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises RequestError with ``skip_tokenizer_init``."""
        if self.engine.tokenizer is None:
            raise RequestError(
                "this needs a tokenizer, but skip_tokenizer_init is set. hint: start without it"
            )
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's ``generation_config.json`` asks for, else the field defaults."""
        return SamplingParams(**self.engine.config.default_sampling)

    if not TYPE_CHECKING:  # or type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            if name in METHODS:
                raise AttributeError(f"vLLM's `LLM.{name}` is not here. hint: {METHODS[name]}")
            raise AttributeError(f"'LLM' object has no attribute {name!r}")

    def close(self) -> None:
        """Free weights and KV pool; later calls raise EngineError. May be called twice."""
        with self._locked():
            self.engine.close()
            self._inboxes.clear()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Progress:
    """The bar of one call: finished requests, tokens per second, acceptance rate."""

    def __init__(self, stats: EngineStats, total: int, enabled: bool) -> None:
        self._bar = tqdm(total=total, desc="Generating", disable=not enabled, unit="request")
        self._stats = stats
        self._tokens = stats.num_generation_tokens
        self._proposed, self._accepted = stats.num_draft_tokens, stats.num_accepted_tokens
        self._start = time.monotonic()

    def show(self, finished: int) -> None:
        """Bring the bar up to date; it redraws at most ten times a second."""
        if self._bar.disable:
            return
        stats, seconds = self._stats, time.monotonic() - self._start
        rate = (stats.num_generation_tokens - self._tokens) / max(seconds, 1e-9)
        text = f"{rate:.1f} tokens/s"
        proposed = stats.num_draft_tokens - self._proposed
        if proposed:
            text += f", acceptance {(stats.num_accepted_tokens - self._accepted) / proposed:.1%}"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(finished - self._bar.n)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes | bytearray | memoryview):
        return [prompts]  # refused at admission, which would take a list of their numbers for ids
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts cannot be of type {type(prompts).__name__}. hint: pass a text, token ids, or "
            "a list of prompts"
        )
    prompts = list(prompts)
    if prompts and isinstance(prompts[0], numbers.Integral):
        return [list(prompts)]
    return list(prompts)
