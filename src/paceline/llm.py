"""The offline API: three lines from a model directory to text.

from paceline import LLM, SamplingParams
llm = LLM(model="Qwen/Qwen2.5-1.5B-Instruct", speculative_model="Qwen/Qwen2.5-0.5B-Instruct",
          num_speculative_tokens=5)
outputs = llm.generate(["def quicksort("], SamplingParams(max_tokens=128))
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any

from tqdm import tqdm

from paceline.engine.admission import Prompt
from paceline.engine.llm_engine import LLMEngine
from paceline.engine.tokenizer import Tokenizer
from paceline.engine_args import EngineArgs
from paceline.errors import EngineError, RequestError
from paceline.log import configure_logging
from paceline.outputs import RequestOutput
from paceline.request import Request
from paceline.sampling_params import SamplingParams
from paceline.spec.policy import DraftLengthPolicy


class LLM:
    """A model ready to generate.

    model: local directory or hub id. engine_args: any field of ``EngineArgs``, and vLLM's arguments
    that change nothing here. policy: a ``DraftLengthPolicy`` of your own. Raises ConfigError or
    CapacityError with every fault found before weights load.

    Calls from several threads share one batch. Several LLMs may live in one process.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        policy: DraftLengthPolicy | None = None,
        disable_log_stats: bool = False,
        **engine_args: Any,
    ) -> None:
        configure_logging()
        config = EngineArgs.from_kwargs(model=model, **engine_args).resolve()
        self.engine = LLMEngine(config, policy=policy, log_stats=not disable_log_stats)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._ready: dict[str, list[RequestOutput]] = {}

    # ---- generation ------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; outputs come in the order of the prompts.

        prompts: one or a list of: text, token ids, ``{"prompt": text}``,
        ``{"prompt_token_ids": ids}``. sampling_params: one for all or one each; None takes the
        model's defaults. Raises RequestError before anything runs if any of them is wrong,
        EngineError if the engine is closed or a step fails.
        """
        listed = _as_list(prompts)
        params = self._params_for(len(listed), sampling_params)
        with self._lock:
            requests = [
                self.engine.make_request(str(next(self._numbers)), prompt, sampling)
                for prompt, sampling in zip(listed, params, strict=True)
            ]
        return self._run(requests, use_tqdm)

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
        chat_template_kwargs``. Raises RequestError for what the template refuses; otherwise as
        ``generate``.
        """
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
        with self._lock:
            number = str(next(self._numbers))
            request = self.engine.make_request(number, prompt, sampling, stream=True)
            self._add(request)
        try:
            while True:
                for output in self._next_outputs(request.request_id):
                    yield output
                    if output.finished:
                        return
        finally:
            self._drop([request])

    def _run(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        with self._lock:
            for request in requests:
                self._add(request)
        bar = tqdm(total=len(requests), desc="Generating", disable=not use_tqdm, unit="request")
        try:
            for request in requests:
                final = None
                while final is None:
                    # Every step may finish requests further down the list, so count those too.
                    final = next(
                        (o for o in self._next_outputs(request.request_id) if o.finished), None
                    )
                    self._show(bar, requests)
                outputs.append(final)
        finally:
            bar.close()
            self._drop(requests)
        return outputs

    def _add(self, request: Request) -> None:
        self.engine.add_request(request)
        self._ready[request.request_id] = []

    def _next_outputs(self, request_id: str) -> list[RequestOutput]:
        """Outputs that lie ready for a request, after one more step if there are none."""
        with self._lock:
            if request_id not in self._ready:
                raise EngineError("the request was dropped because the engine failed or was closed")
            if not self._ready[request_id]:
                try:
                    stepped = self.engine.step()
                except BaseException:
                    self._ready.clear()
                    raise
                for output in stepped:
                    if output.request_id in self._ready:
                        self._ready[output.request_id].append(output)
            ready, self._ready[request_id] = self._ready[request_id], []
            return ready

    def _drop(self, requests: list[Request]) -> None:
        """Forget requests, ending those that still run."""
        with self._lock:
            for request in requests:
                self._ready.pop(request.request_id, None)
                if not request.finished:
                    self.engine.abort_request(request.request_id)

    def _show(self, bar: tqdm[Any], requests: list[Request]) -> None:
        """Progress: finished requests, tokens per second, acceptance."""
        if bar.disable:
            return
        done = sum(request.finished for request in requests)
        stats = self.engine.stats
        elapsed = bar.format_dict["elapsed"] or 1e-9
        postfix = {"tokens/s": f"{(stats.num_generation_tokens) / elapsed:.1f}"}
        if stats.acceptance_rate is not None:
            postfix["acceptance"] = f"{stats.acceptance_rate:.1%}"
        bar.n = done
        bar.set_postfix(postfix, refresh=False)
        bar.update(0)

    def _params_for(
        self, count: int, given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * count
        if not isinstance(given, Sequence) or len(given) != count:
            got = len(given) if isinstance(given, Sequence) else type(given).__name__
            raise RequestError(
                f"{count} prompts but {got} sampling parameters. hint: pass one for all or one each"
            )
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

    def close(self) -> None:
        """Free weights and KV pool; later calls raise EngineError. May be called twice."""
        with self._lock:
            self.engine.close()
            self._ready.clear()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        prompts = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)
    if not prompts:
        raise RequestError("no prompts given. hint: pass at least one")
    if isinstance(prompts[0], int):
        return [list(prompts)]
    return list(prompts)
