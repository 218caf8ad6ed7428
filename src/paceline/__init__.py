"""Paceline: continuous batching, a paged KV cache and exact speculative decoding.

Public names load when first used, so that importing the package's pure parts never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.config import EngineConfig
    from paceline.engine_args import EngineArgs
    from paceline.errors import (
        CapacityError,
        ConfigError,
        EngineError,
        PacelineError,
        RequestError,
    )
    from paceline.llm import LLM
    from paceline.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from paceline.prompts import TextPrompt, TokensPrompt
    from paceline.sampling_params import SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"

_HOMES = {
    "CapacityError": "errors",
    "CompletionOutput": "outputs",
    "ConfigError": "errors",
    "EngineArgs": "engine_args",
    "EngineConfig": "config",
    "EngineError": "errors",
    "LLM": "llm",
    "Logprob": "outputs",
    "PacelineError": "errors",
    "RequestError": "errors",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "StructuredOutputsParams": "sampling_params",
    "TextPrompt": "prompts",
    "TokensPrompt": "prompts",
}

__all__ = [
    "LLM",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "EngineArgs",
    "EngineConfig",
    "EngineError",
    "Logprob",
    "PacelineError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from paceline.vllm_names import CLASSES

        # `from paceline import ...` would hide the message of an AttributeError.
        if name in CLASSES:
            raise ImportError(f"vLLM's `{name}` is not here. hint: {CLASSES[name]}")
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(f"paceline.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
