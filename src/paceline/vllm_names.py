"""Public names of vLLM's that are not here, and what stands in their place.

Standard library only. Names of arguments and flags are elsewhere: no_effect.py, cli/vllm_flags.py.
"""

from __future__ import annotations

_OFFLINE = "use `LLM` (its calls from several threads share one batch), or `paceline serve`"
_TEXT_ONLY = "only text generation is supported"
_ONE_PROCESS = "there are no workers: the engine runs in one process"
_LOADED = "weights stay loaded until `close()`"

# Of the package: what to do instead.
CLASSES = {
    "AsyncEngineArgs": _OFFLINE,
    "AsyncLLM": _OFFLINE,
    "AsyncLLMEngine": _OFFLINE,
    "BeamSearchParams": "there is no beam search; use `n` with a `temperature` above 0",
    "ClassificationOutput": _TEXT_ONLY,
    "ClassificationRequestOutput": _TEXT_ONLY,
    "EmbeddingOutput": _TEXT_ONLY,
    "EmbeddingRequestOutput": _TEXT_ONLY,
    "GuidedDecodingParams": "use `StructuredOutputsParams`",
    "LLMEngine": "use `LLM`; its engine is `llm.engine`",
    "PoolingOutput": _TEXT_ONLY,
    "PoolingParams": _TEXT_ONLY,
    "PoolingRequestOutput": _TEXT_ONLY,
    "ScoringOutput": _TEXT_ONLY,
    "ScoringRequestOutput": _TEXT_ONLY,
    "initialize_ray_cluster": _ONE_PROCESS,
}
# Of ``LLM``.
METHODS = {
    "apply_model": _ONE_PROCESS,
    "beam_search": "there is no beam search; use `n` with a `temperature` above 0",
    "classify": _TEXT_ONLY,
    "collective_rpc": _ONE_PROCESS,
    "embed": _TEXT_ONLY,
    "encode": f"{_TEXT_ONLY}; for token ids use `get_tokenizer().encode(text)`",
    "get_metrics": "use `llm.engine.stats`, or `metrics` of each output",
    "llm_engine": "use `llm.engine`",
    "reset_prefix_cache": "blocks are evicted as space is needed; or start with "
    "`enable_prefix_caching=False`",
    "reward": _TEXT_ONLY,
    "score": _TEXT_ONLY,
    "set_tokenizer": "pass `tokenizer` when the `LLM` is made",
    "sleep": _LOADED,
    "start_profile": "use torch.profiler around a call",
    "stop_profile": "use torch.profiler around a call",
    "wake_up": _LOADED,
}
