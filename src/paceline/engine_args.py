"""Engine arguments as a user writes them, and vLLM's that change nothing here.

This file knows names, defaults and spellings; it must not know model files, memory or torch.
Whether the values can work is found out by ``paceline.check``, which ``EngineArgs.resolve`` runs.

    config = EngineArgs.from_kwargs(model="./Qwen2.5-0.5B", max_num_seqs=64).resolve()
"""

from __future__ import annotations

import json
import numbers
import os
from dataclasses import dataclass, field, fields
from typing import Any

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.no_effect import NoEffect, refusal, unknown

NGRAM = "[ngram]"


def _argument(default: Any, help_text: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": help_text, "choices": choices})


@dataclass(slots=True)
class EngineArgs:
    """Every engine argument with its default; names are vLLM's where it has them.

    None means "derived when resolved". The help texts are also the command line's.
    """

    model: str = field(metadata={"help": "local directory or hub id of the model"})
    tokenizer: str | None = _argument(None, "local directory or hub id (default: the model's)")
    skip_tokenizer_init: bool = _argument(False, "token ids in, token ids out; no tokenizer")
    dtype: str = _argument(
        "auto",
        "auto is bfloat16 on a GPU and where the CPU has it natively, else float32",
        ("auto", "float32", "float", "bfloat16", "float16", "half"),
    )
    device: str = _argument(
        "auto", "where the model runs: auto is the GPU if there is one", ("auto", "cpu", "cuda")
    )
    seed: int = _argument(0, "what seeds of requests without one are derived from")
    max_model_len: int | None = _argument(
        None, "prompt + output of one sequence (default: what the model and the KV pool allow)"
    )
    max_num_seqs: int = _argument(256, "sequences running at a time")
    max_num_batched_tokens: int | None = _argument(
        None,
        "token budget of a step (default: 8192 on a GPU, 2048 on a CPU, raised to max_num_seqs * "
        "(k + 1))",
    )
    block_size: int = _argument(16, "tokens a KV block holds")
    gpu_memory_utilization: float = _argument(0.9, "share of GPU memory to use; no effect on a CPU")
    kv_cache_memory_bytes: int | None = _argument(
        None,
        "bytes of the KV pool (default: what gpu_memory_utilization leaves; on a CPU the smallest "
        "of 4 GiB, 40% of free memory, what the weights leave of free memory, and room for "
        "max_num_seqs, at least 64, sequences of max_model_len or the model's maximum)",
    )
    num_gpu_blocks_override: int | None = _argument(None, "blocks of the KV pool; wins over bytes")
    preemption_mode: str = _argument(
        "recompute",
        "what happens to the KV of a sequence put back for lack of blocks: recompute drops it, "
        "swap (on a GPU) copies it to host memory and back",
        ("recompute", "swap"),
    )
    swap_space: float = _argument(4.0, "GiB of host memory for preemption_mode swap")
    enable_prefix_caching: bool = _argument(True, "reuse KV blocks of equal prefixes")
    enable_chunked_prefill: bool = _argument(True, "split long prompts over steps")
    batching: str = _argument(
        "continuous",
        "static admits only when the batch has finished, for comparison",
        ("continuous", "static"),
    )
    enforce_eager: bool = _argument(False, "no captured graphs; no effect on a CPU")
    latency_path: str = _argument(
        "auto",
        "one persistent kernel for passes of few tokens, at the price of a second copy of the "
        "weights (Hopper GPUs and newer, bfloat16): auto takes it where it is faster and leaves "
        "the KV pool most of its room, on wherever it applies",
        ("auto", "on", "off"),
    )
    generation_config: str = _argument(
        "auto", "sampling defaults: auto (the model's file), vllm (ignore it) or a path"
    )
    max_logprobs: int = _argument(20, "largest logprobs a request may ask for")
    speculative_model: str | None = _argument(
        None, "drafter: local directory, hub id or [ngram] (prompt lookup)"
    )
    num_speculative_tokens: int | None = _argument(None, "draft length k; required with a drafter")
    speculative_max_model_len: int | None = _argument(
        None, "context the drafter may use (default: its own maximum)"
    )
    ngram_prompt_lookup_max: int | None = _argument(
        None, "longest n-gram looked up with [ngram] (default: 5)"
    )
    ngram_prompt_lookup_min: int | None = _argument(
        None, "shortest n-gram looked up with [ngram] (default: 2)"
    )
    speculative_disable_by_batch_size: int | None = _argument(
        None, "draft nothing above this many running sequences; 0 means never"
    )
    spec_policy: str = _argument(
        "fixed", "how the draft length is chosen; auto is not available yet", ("fixed", "auto")
    )

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineArgs:
        """Engine arguments from keywords: own ones, vLLM's, and ``speculative_config``.

        Raises:
            ConfigError: every unknown name, every no-effect argument whose value would have an
                effect, and a ``speculative_config`` that is malformed or contradicts.
        """
        args, problems = cls.read(**kwargs)
        if problems:
            raise ConfigError(join_problems(problems))
        return args

    @classmethod
    def read(cls, **kwargs: Any) -> tuple[EngineArgs, list[str]]:
        """As ``from_kwargs``, with the problems beside what the other keywords make."""
        known = {f.name for f in fields(cls)}
        also = (*NO_EFFECT, "speculative_config")
        problems: list[str] = []
        values: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name in known:
                if value is not None:  # vLLM's way to leave an argument at its default
                    values[name] = _plain(value)
            elif name in NO_EFFECT:
                problem = refusal(name, value, NO_EFFECT[name])
                problems += [] if problem is None else [problem]
            elif name != "speculative_config":
                problems.append(unknown("engine argument", name, sorted(known), also))
        if kwargs.get("speculative_config"):
            _merge_speculative_config(kwargs["speculative_config"], values, problems)
        if "model" not in values:
            problems.append("`model` is missing. hint: give a local directory or a hub id")
            values["model"] = ""
        return cls(**values), problems

    def resolve(self) -> EngineConfig:
        """Run every check, download what is missing and fix every value.

        Returns:
            What an engine needs to start. Every resolved setting has been logged.

        Raises:
            ConfigError: all faults found, in one message.
            CapacityError: the same, if all of them are about memory.
        """
        from paceline.check.run import resolve  # the checks know this class

        return resolve(self)


def join_problems(problems: list[str]) -> str:
    """One message of one or several problems."""
    if len(problems) == 1:
        return problems[0]
    lines = [f"{number}. {problem}" for number, problem in enumerate(problems, 1)]
    return f"{len(problems)} problems:\n" + "\n".join(lines)


def _plain(value: Any) -> Any:
    """Paths as str, and numpy's integers as int."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return value


# --- vLLM's arguments that have no effect here ---


_ONE_PROCESS = "this version runs in one process"
_NO_REMOTE_CODE = "code from model repositories is never run"
_MAIN_REVISION = "only the default revision is loaded"
_DOWNLOAD = "download that one (`hf download MODEL --revision R --local-dir DIR`), and name DIR"
_SAFETENSORS = "weights are read from safetensors files only"
_UNQUANTISED = "only unquantised weights are supported"
_PLAIN_WEIGHTS = "name the model without quantisation, such as Qwen2.5-7B-Instruct without -AWQ"
_NO_LORA = "LoRA adapters are not supported"
_TEXT_ONLY = "only text generation is supported"
_FROM_CONFIG = "the model's own configuration is used as it is"
_COPY = "copy the model's directory and change config.json there"
_NO_KV_TRANSFER = "the KV cache stays in this process"
_SCHEDULER = "the scheduler has no such mode"
_ONE_BACKEND = "structured outputs have one backend, xgrammar"
_SPACES = "send `disable_any_whitespace` in `structured_outputs`"

NO_EFFECT: dict[str, NoEffect] = {
    # Parallelism and processes.
    "tensor_parallel_size": NoEffect((1,), _ONE_PROCESS),
    "pipeline_parallel_size": NoEffect((1,), _ONE_PROCESS),
    "data_parallel_size": NoEffect((1,), _ONE_PROCESS),
    "decode_context_parallel_size": NoEffect((1,), _ONE_PROCESS),
    "prefill_context_parallel_size": NoEffect((1,), _ONE_PROCESS),
    "enable_expert_parallel": NoEffect((False,), _ONE_PROCESS),
    "speculative_draft_tensor_parallel_size": NoEffect((None, 1), _ONE_PROCESS),
    "data_parallel_backend": NoEffect(
        (None, "mp"), _ONE_PROCESS, "for several copies run several servers behind a proxy"
    ),
    "distributed_executor_backend": NoEffect((None, "uni", "mp"), _ONE_PROCESS),
    "max_parallel_loading_workers": NoEffect((None,), _ONE_PROCESS),
    "worker_cls": NoEffect(("auto",), _ONE_PROCESS),
    "worker_extension_cls": NoEffect(("",), _ONE_PROCESS),
    "worker_use_ray": NoEffect((False,), _ONE_PROCESS),
    "ray_workers_use_nsight": NoEffect((False,), _ONE_PROCESS),
    "disable_custom_all_reduce": NoEffect(None, _ONE_PROCESS),
    # Where the model comes from.
    "trust_remote_code": NoEffect((False,), _NO_REMOTE_CODE),
    "revision": NoEffect((None, "main"), _MAIN_REVISION, _DOWNLOAD),
    "code_revision": NoEffect((None,), _NO_REMOTE_CODE),
    "tokenizer_revision": NoEffect((None, "main"), _MAIN_REVISION, _DOWNLOAD),
    "tokenizer_mode": NoEffect(("auto", "hf"), "the model's fast tokenizer is always used"),
    "load_format": NoEffect(("auto", "safetensors", "hf"), _SAFETENSORS),
    "model_loader_extra_config": NoEffect((None, {}), _SAFETENSORS),
    "use_tqdm_on_load": NoEffect(None, ""),
    "config_format": NoEffect(("auto", "hf"), "only Hugging Face configurations are read"),
    "hf_config_path": NoEffect((None,), _FROM_CONFIG, _COPY),
    "hf_token": NoEffect(
        (None,), "tokens are no arguments", "set the environment variable HF_TOKEN"
    ),
    "hf_overrides": NoEffect((None, {}), _FROM_CONFIG, _COPY),
    "rope_scaling": NoEffect((None, {}), _FROM_CONFIG, _COPY),
    "rope_theta": NoEffect((None,), _FROM_CONFIG, _COPY),
    "download_dir": NoEffect(
        (None,), "models lie in the hub's own cache", "set the environment variable HF_HOME"
    ),
    "model_impl": NoEffect(("auto",), "there is one implementation of each model"),
    "override_generation_config": NoEffect(
        (None, {}),
        "defaults come from the model's generation_config.json",
        "pass SamplingParams, or the values with each request; `generation_config` may name a "
        "directory with another file",
    ),
    # Precision.
    "quantization": NoEffect((None,), _UNQUANTISED, _PLAIN_WEIGHTS),
    "quantization_param_path": NoEffect((None,), _UNQUANTISED, _PLAIN_WEIGHTS),
    "kv_cache_dtype": NoEffect(("auto",), "the KV cache has the model's dtype"),
    "calculate_kv_scales": NoEffect((False,), "the KV cache has the model's dtype"),
    # What is generated.
    "task": NoEffect((None, "auto", "generate"), _TEXT_ONLY),
    "runner": NoEffect(("auto", "generate"), _TEXT_ONLY),
    "convert": NoEffect(("auto", "none"), _TEXT_ONLY),
    "limit_mm_per_prompt": NoEffect((None, {}), _TEXT_ONLY),
    "mm_processor_kwargs": NoEffect((None, {}), _TEXT_ONLY),
    "allowed_local_media_path": NoEffect((None, ""), _TEXT_ONLY),
    "enable_prompt_embeds": NoEffect((False,), _TEXT_ONLY),
    "logits_processors": NoEffect((None, []), "custom logits processors are not supported"),
    "logits_processor_pattern": NoEffect((None,), "custom logits processors are not supported"),
    "guided_decoding_backend": NoEffect((None, "auto", "xgrammar"), _ONE_BACKEND),
    "guided_decoding_disable_fallback": NoEffect((True, False), _ONE_BACKEND),
    "guided_decoding_disable_any_whitespace": NoEffect(
        (False,), "requests say it themselves", _SPACES
    ),
    "guided_decoding_disable_additional_properties": NoEffect(
        (False,), "schemas are taken as they are", "set `additionalProperties` in the schema"
    ),
    "structured_outputs_config": NoEffect(
        (None, {}, {"backend": "auto"}, {"backend": "xgrammar"}), _ONE_BACKEND
    ),
    "enable_lora": NoEffect((False,), _NO_LORA),
    "qlora_adapter_name_or_path": NoEffect((None,), _NO_LORA),
    # Memory and scheduling.
    "cpu_offload_gb": NoEffect((0,), "weights lie where the model runs"),
    "enable_sleep_mode": NoEffect((False,), "weights stay loaded"),
    "performance_mode": NoEffect(
        (None, "balanced"),
        "there are no modes",
        "`max_num_seqs` and `max_num_batched_tokens` bound a step; `paceline bench` compares",
    ),
    "num_scheduler_steps": NoEffect((1,), _SCHEDULER),
    "num_lookahead_slots": NoEffect((0,), _SCHEDULER),
    "scheduler_delay_factor": NoEffect((0,), _SCHEDULER),
    "scheduling_policy": NoEffect(("fcfs",), "requests are served first come first served"),
    "max_num_partial_prefills": NoEffect((1,), _SCHEDULER),
    "max_long_partial_prefills": NoEffect((1,), _SCHEDULER),
    "long_prefill_token_threshold": NoEffect((0,), _SCHEDULER),
    "async_scheduling": NoEffect((None, False), _SCHEDULER),
    "use_v2_block_manager": NoEffect(None, ""),
    "prefix_caching_hash_algo": NoEffect(None, ""),
    "disable_sliding_window": NoEffect((False,), "sliding windows are always masked"),
    "disable_hybrid_kv_cache_manager": NoEffect(None, ""),
    "disable_cascade_attn": NoEffect(None, ""),
    "disable_async_output_proc": NoEffect(None, ""),
    "kv_transfer_config": NoEffect((None,), _NO_KV_TRANSFER),
    "kv_events_config": NoEffect((None,), _NO_KV_TRANSFER),
    # Graphs, compilation, logs.
    "max_seq_len_to_capture": NoEffect(None, ""),
    "max_context_len_to_capture": NoEffect(None, ""),
    "compilation_config": NoEffect((None, {}, 0), "kernels and graphs have no settings"),
    "additional_config": NoEffect((None, {}), "there are no platform plug-ins"),
    "disable_log_requests": NoEffect(
        (True,), "requests are logged only by `paceline serve --enable-log-requests`"
    ),
    "disable_log_stats": NoEffect(None, ""),
}


# --- vLLM's speculative_config ---

_SPECULATIVE_KEYS = {
    "num_speculative_tokens": "num_speculative_tokens",
    "prompt_lookup_max": "ngram_prompt_lookup_max",
    "prompt_lookup_min": "ngram_prompt_lookup_min",
    "max_model_len": "speculative_max_model_len",
    "disable_by_batch_size": "speculative_disable_by_batch_size",
}


def _merge_speculative_config(given: object, values: dict[str, Any], problems: list[str]) -> None:
    """Translate vLLM's dictionary (or its JSON text) into flat arguments in ``values``."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except json.JSONDecodeError as error:
            problems.append(f"`speculative_config` is not valid JSON: {error}")
            return
    if not isinstance(given, dict):
        problems.append(
            f"`speculative_config` must be a dictionary, got {given!r}. hint: for example "
            '{"method": "ngram", "num_speculative_tokens": 5}'
        )
        return
    known = ["method", "model", "draft_tensor_parallel_size", *_SPECULATIVE_KEYS]
    for key in given:
        if key not in known:
            problems.append(unknown("key of `speculative_config`", str(key), sorted(known)))
    if given.get("draft_tensor_parallel_size") not in (None, 1):
        problems.append(
            f"`draft_tensor_parallel_size={given['draft_tensor_parallel_size']!r}` is not "
            f"supported: {_ONE_PROCESS}. hint: leave it out or set it to 1"
        )
    flat = {_SPECULATIVE_KEYS[k]: v for k, v in given.items() if k in _SPECULATIVE_KEYS}
    flat["speculative_model"] = _speculative_model(
        given.get("method"), given.get("model"), values.get("speculative_model"), problems
    )
    for name, value in flat.items():
        if value is None:
            continue
        if values.get(name) not in (None, value):
            problems.append(
                f"`{name}={values[name]!r}` contradicts `speculative_config`, which says "
                f"{value!r}. hint: give it once"
            )
        values[name] = value


def _speculative_model(
    method: object, model: object, flat_model: object, problems: list[str]
) -> object:
    """What ``speculative_model`` a method and a model stand for."""
    lookup = ("ngram", NGRAM)
    if method in lookup or (method is None and model in lookup):
        if model is not None and model not in lookup:
            problems.append(
                f"`speculative_config` has the method 'ngram', which needs no model, and the model "
                f"{model!r}. hint: drop one of the two"
            )
        return NGRAM
    if method not in (None, "draft_model"):
        problems.append(
            f"`speculative_config` method {method!r} is not supported. hint: 'draft_model' and "
            "'ngram' are"
        )
    elif model in lookup or (
        model is None and (flat_model is None or (method and flat_model == NGRAM))
    ):
        problems.append(
            "`speculative_config` names no drafter. hint: set 'model' to a smaller model of the "
            "same family, or 'method' to 'ngram'"
        )
    return model
