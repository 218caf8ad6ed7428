"""From a resolved configuration to a runner: models, KV tensors, row state, sampler, drafter."""

from __future__ import annotations

import logging

from paceline import ops
from paceline.attention.selector import select_backend
from paceline.config import EngineConfig, ModelConfig, SpeculativeConfig
from paceline.distributed.tp_group import SingleProcessGroup
from paceline.errors import CapacityError
from paceline.models.decoder import DecoderModel
from paceline.models.loader import TORCH_DTYPES, load_model
from paceline.ops import native
from paceline.sample.sampler import Sampler
from paceline.spec.drafter import Drafter
from paceline.worker.decode_state import DecodeState
from paceline.worker.draft_model import DraftModelDrafter
from paceline.worker.kv_cache import KVCache, allocate_kv_caches
from paceline.worker.model_runner import ModelRunner
from paceline.worker.ngram_drafter import NgramDrafter
from paceline.worker.threads import choose_threads

logger = logging.getLogger(__name__)


def build_runner(config: EngineConfig, max_k: int) -> ModelRunner:
    """Load weights and allocate what a runner needs.

    max_k: the largest draft length a policy may choose. Raises ConfigError (files that do not fit
    their configuration) or CapacityError (no memory for the KV pool).
    """
    threads = choose_threads(config.model.arch)
    logger.info(
        "CPU threads: %d. OMP_NUM_THREADS sets them; where other work keeps the cores busy, fewer "
        "are faster",
        threads,
    )
    ops.use("cpu", native.load())
    model, kv_caches = _load(config, config.model)
    scheduler = config.scheduler
    try:
        state = DecodeState(
            scheduler.max_num_seqs, scheduler.max_model_len, config.cache.block_size, max_k
        )
    except MemoryError as error:
        raise CapacityError(
            f"no memory for the tokens of max_num_seqs ({scheduler.max_num_seqs}) sequences of "
            f"max_model_len ({scheduler.max_model_len}): {error}. hint: lower one of them"
        ) from error
    drafter = None
    if config.speculative is not None:
        drafter = _build_drafter(config, config.speculative, state)
    sampler = Sampler(config.tokenizer.vocab_size)
    return ModelRunner(model, kv_caches, state, sampler, drafter, num_threads=threads)


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
