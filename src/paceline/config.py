"""Resolved configuration: frozen dataclasses, all values final.

``engine_args.EngineArgs.resolve`` makes an ``EngineConfig`` from what a user wrote; everything
below the entrypoints reads only these. Standard library only: no torch, no files, no environment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

# What a row on a GPU has room for; requests with more are refused there.
GPU_MAX_STOP_IDS = 64  # the model's own end-of-text ids among them
GPU_MAX_LOGIT_BIAS = 1024


@dataclass(frozen=True)
class ModelArch:
    """Shape of a dense decoder, as read from a Hugging Face ``config.json``."""

    family: str  # registry key: "llama", "mistral", "qwen2", "qwen3"
    vocab_size: int  # rows of the embedding, padding included
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None  # None, or the rope parameters with "rope_type"
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: tuple[int | None, ...]  # one entry a layer; None attends to everything
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str | None  # of the checkpoint: "bfloat16", "float16", "float32", None if unsaid

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of K and V of all layers for one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


@dataclass(frozen=True)
class ModelConfig:
    """One model: where it lies and how it is run."""

    name: str  # what the user wrote
    path: str  # local directory with config.json and safetensors
    arch: ModelArch
    dtype: Literal["float32", "bfloat16", "float16"]
    max_model_len: int

    @property
    def dtype_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2


@dataclass(frozen=True)
class TokenizerConfig:
    """Which tokenizer; ``path`` None means token ids in, token ids out."""

    path: str | None
    # Highest known id + 1; ids at or above it are never sampled. None: no mask.
    vocab_size: int | None


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV pool, shared by target and drafter."""

    block_size: int
    num_blocks: int  # usable blocks; the null block comes on top
    enable_prefix_caching: bool = True
    # Above 0: num_blocks is an estimate; the pool takes what start-up leaves of this share of
    # the GPU's memory.
    gpu_memory_utilization: float = 0.0
    # Whether a pool that turns out smaller than estimated may lower max_model_len, as nobody asked
    # for that length.
    lowers_model_len: bool = False
    # Blocks of preempted sequences that host memory holds (the target's KV alone); with 0 such
    # sequences are recomputed.
    num_host_blocks: int = 0


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step and of the batch."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    batching: Literal["continuous", "static"] = "continuous"


@dataclass(frozen=True)
class SpeculativeConfig:
    """Who drafts, and how many tokens."""

    method: Literal["draft_model", "ngram"]
    num_speculative_tokens: int
    model: ModelConfig | None = None  # the drafter, for method "draft_model"
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 2
    disable_by_batch_size: int = 0  # k = 0 above this many running sequences; 0 means never
    policy: Literal["fixed"] = "fixed"

    @property
    def draft_max_model_len(self) -> int | None:
        """Context the drafter can reach, None where it has no limit of its own."""
        return None if self.model is None else self.model.max_model_len


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine needs to start."""

    model: ModelConfig
    tokenizer: TokenizerConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    speculative: SpeculativeConfig | None
    device: Literal["cpu", "cuda"] = "cpu"
    enforce_eager: bool = False  # no captured graphs on a GPU
    latency_path: str = "off"  # "auto", "on" or "off"
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()  # union of config, generation config and tokenizer
    default_sampling: dict[str, Any] = field(default_factory=dict)  # from generation_config.json
    max_logprobs: int = 20
