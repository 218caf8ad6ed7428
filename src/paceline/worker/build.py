"""From a resolved configuration to a runner: models, KV tensors, row state, sampler, drafter."""

from __future__ import annotations

import logging
import os

import torch

from paceline import ops
from paceline.attention.selector import select_backend
from paceline.config import EngineConfig, ModelConfig, SpeculativeConfig
from paceline.distributed.tp_group import SingleProcessGroup
from paceline.models.decoder import DecoderModel
from paceline.models.loader import TORCH_DTYPES, load_model
from paceline.models.weights import count_parameters
from paceline.ops import native
from paceline.sample.sampler import Sampler
from paceline.spec.drafter import Drafter
from paceline.worker.decode_state import DecodeState
from paceline.worker.draft_model import DraftModelDrafter
from paceline.worker.kv_cache import KVCache, allocate_kv_caches
from paceline.worker.model_runner import ModelRunner
from paceline.worker.ngram_drafter import NgramDrafter

logger = logging.getLogger(__name__)

# Measured on two cores: a 7M-parameter model gains at most a fifth from the second thread, one of
# 135M a third and more.
_TEAM_PARAMETERS = 30_000_000


def build_runner(config: EngineConfig, max_k: int) -> ModelRunner:
    """Load weights and allocate what a runner needs.

    max_k: the largest draft length a policy may choose. Raises ConfigError (files that do not fit
    their configuration) or CapacityError (no memory for the KV pool).
    """
    threads = choose_threads(config)
    logger.info(
        "CPU threads: %d. OMP_NUM_THREADS sets them; where other work keeps the cores busy, fewer "
        "are faster",
        threads,
    )
    ops.use("cpu", native.load())
    model, kv_caches = _load(config, config.model)
    scheduler = config.scheduler
    state = DecodeState(
        scheduler.max_num_seqs, scheduler.max_model_len, config.cache.block_size, max_k
    )
    drafter = None
    if config.speculative is not None:
        drafter = _build_drafter(config, config.speculative, state)
    sampler = Sampler(config.tokenizer.vocab_size)
    return ModelRunner(model, kv_caches, state, sampler, drafter, num_threads=threads)


def choose_threads(config: EngineConfig) -> int:
    """Threads of a pass: torch's own number, or one where the target is tiny.

    A team of threads meets hundreds of times in a pass; the passes of a tiny model are so short
    that this gains little at best, and on busy cores, where a meeting waits for whoever is not
    running, a step takes up to 100 times as long. OMP_NUM_THREADS is obeyed.
    """
    if os.environ.get("OMP_NUM_THREADS") or count_parameters(config.model.arch) >= _TEAM_PARAMETERS:
        return torch.get_num_threads()
    return 1


def _load(config: EngineConfig, model: ModelConfig) -> tuple[DecoderModel, list[KVCache]]:
    dtype = TORCH_DTYPES[model.dtype]
    backend = select_backend(config.device, model.arch, dtype)
    loaded = load_model(model, config.device, backend, SingleProcessGroup())
    caches = allocate_kv_caches(
        model.arch,
        config.cache.num_blocks,
        config.cache.block_size,
        dtype,
        config.device,
    )
    return loaded, caches


def _build_drafter(
    config: EngineConfig, speculative: SpeculativeConfig, state: DecodeState
) -> Drafter:
    if speculative.model is None:
        return NgramDrafter(state, speculative.prompt_lookup_max, speculative.prompt_lookup_min)
    model, kv_caches = _load(config, speculative.model)
    # A draft must be an id that the target may sample.
    limits = [config.model.arch.vocab_size, config.tokenizer.vocab_size]
    limit = min(limit for limit in limits if limit is not None)
    return DraftModelDrafter(model, kv_caches, state, Sampler(limit))
