"""From a resolved configuration to a runner on a GPU: weights, measured memory, KV pool, graphs."""

from __future__ import annotations

import dataclasses
import logging
import time

import numpy as np
import torch

from paceline import ops
from paceline.attention.triton import TritonAttention
from paceline.config import EngineConfig, ModelConfig, SpeculativeConfig
from paceline.distributed.tp_group import SingleProcessGroup
from paceline.errors import CapacityError
from paceline.models.loader import TORCH_DTYPES, load_model
from paceline.ops import triton as triton_ops
from paceline.sample.triton import DeviceSampler
from paceline.worker.decode_graphs import DecodeGraphs, bucket_of
from paceline.worker.decode_step import (
    LOGITS_ROWS,
    DecodeStep,
    DeviceDrafter,
    DeviceDraftModel,
    DeviceModel,
    DeviceNgram,
)
from paceline.worker.device_rows import DeviceRows
from paceline.worker.device_runner import DeviceRunner
from paceline.worker.graphs import Graphs
from paceline.worker.kv_cache import KVCache, allocate_kv_caches
from paceline.worker.prefill import PrefillPass

logger = logging.getLogger(__name__)

_GIB = 1024**3
# Kept free for what measuring cannot see: fragments, later graphs, the library's workspaces.
_SLACK_BYTES = _GIB // 2


class DeviceBuilder:
    """Builds a ``DeviceRunner``; ``config`` is the given one with the pool that was measured.

    max_k: the largest draft length a policy may choose. device: "cuda", or "cpu" where Triton's
    interpreter runs (tests). Raises ConfigError (files that do not fit their configuration) or
    CapacityError (no memory).
    """

    def __init__(self, config: EngineConfig, max_k: int, device: str = "cuda") -> None:
        self.config = config
        self.max_k = max_k
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.phases: dict[str, float] = {}
        self._since = time.perf_counter()

    @torch.inference_mode()
    def build(self) -> DeviceRunner:
        """Load, measure, allocate, capture; the phases' times are logged."""
        ops.use(self.device.type, triton_ops)
        config = self.config
        self._phase("device")
        target = self._load(config.model)
        speculative = config.speculative
        draft = None
        if speculative is not None and speculative.model is not None:
            draft = self._load(speculative.model)
        self._phase("weights")
        runner = self._assemble(target, draft, speculative)
        step = runner.decode.step
        if self.device.type == "cuda":
            if config.cache.gpu_memory_utilization:
                self._size_pool(step, draft, runner)
            self._phase("memory measured")
        for side in (target, draft):
            if side is not None:
                side.kv_caches = self._kv_caches(side, self.config.cache.num_blocks)
        self._phase("KV pool")
        if runner.decode.graphs.enabled:
            for k in sorted({0, self.max_k}):
                runner.decode.capture(1, k)
            self._phase("graphs")
        logger.info(
            "start-up: %s", ", ".join(f"{name} {t:.1f} s" for name, t in self.phases.items())
        )
        return runner

    def _load(self, model: ModelConfig) -> DeviceModel:
        backend = TritonAttention()
        loaded = load_model(model, str(self.device), backend, SingleProcessGroup())
        side = DeviceModel(loaded, [], self.config.scheduler.max_model_len)
        side.kv_caches = self._kv_caches(side, 0)  # the null block, to measure with
        return side

    def _kv_caches(self, side: DeviceModel, num_blocks: int) -> list[KVCache]:
        return allocate_kv_caches(
            side.model.arch,
            num_blocks,
            self.config.cache.block_size,
            TORCH_DTYPES[self.config.model.dtype],
            self.device,
        )

    def _assemble(
        self, target: DeviceModel, draft: DeviceModel | None, speculative: SpeculativeConfig | None
    ) -> DeviceRunner:
        scheduler = self.config.scheduler
        most = scheduler.max_num_seqs
        state = DeviceRows(
            most,
            scheduler.max_model_len,
            block_size=self.config.cache.block_size,
            max_k=self.max_k,
            device=self.device,
        )
        known = self.config.tokenizer.vocab_size
        vocab = target.model.arch.vocab_size
        limit = vocab if known is None else min(vocab, known)
        # No larger pass is sampled at a time, see ``DecodeStep``.
        entries = max(LOGITS_ROWS, self.max_k + 1)
        sampler = DeviceSampler(entries, vocab, self.device, vocab_limit=limit)
        drafter: DeviceDrafter | None = None
        if draft is not None:
            draft_vocab = draft.model.arch.vocab_size
            draft_sampler = DeviceSampler(
                most,
                draft_vocab,
                self.device,
                vocab_limit=min(limit, draft_vocab),
                truncation=False,
            )
            drafter = DeviceDraftModel(draft, state, draft_sampler)
        elif speculative is not None:
            drafter = DeviceNgram(
                state, self.max_k, speculative.prompt_lookup_max, speculative.prompt_lookup_min
            )
        step = DecodeStep(target, state, sampler, drafter, most, self.max_k)
        graphs = Graphs(enabled=self.device.type == "cuda" and not self.config.enforce_eager)
        catch_up = None if draft is None else PrefillPass(draft, state, graphs, "catch-up")
        prefill = PrefillPass(target, state, graphs, "prefill")
        return DeviceRunner(DecodeGraphs(step, graphs), prefill, catch_up, limit)

    # ---- memory ----------------------------------------------------------------------------------

    def _size_pool(self, step: DecodeStep, draft: DeviceModel | None, runner: DeviceRunner) -> None:
        """Put into ``config`` the blocks that the measured rest of the memory holds.

        Runs the largest passes once, over the null block alone.
        """
        weights = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self._largest_prefill(runner)
        prefill = torch.cuda.max_memory_allocated() - weights
        torch.cuda.reset_peak_memory_stats()
        step.rows.fill_(step.state.max_num_seqs)
        step.run(bucket_of(step.max_entries, step.max_entries), self.max_k)
        torch.cuda.synchronize()
        decode = torch.cuda.max_memory_allocated() - weights
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        # Graphs keep memory of their own, so both peaks count.
        counts = (step.max_entries + 1) * step.target.model.arch.vocab_size * 4
        share = self.config.cache.gpu_memory_utilization
        other = total - free - weights + decode + counts + _SLACK_BYTES
        left = int(share * total) - weights - prefill - other
        sides = [step.target] if draft is None else [step.target, draft]
        block = self.config.cache.block_size * sum(
            side.model.arch.kv_bytes_per_token(self.config.model.dtype_bytes) for side in sides
        )
        num_blocks = left // block - 1
        cache = self.config.cache
        needed = -(-(self.config.scheduler.max_model_len - 1) // cache.block_size)
        parts = (
            f"weights {weights / _GIB:.2f} GiB, activations {prefill / _GIB:.2f}, graphs and "
            f"scratch {other / _GIB:.2f}"
        )
        allowed = f"{share * total / _GIB:.2f} of {total / _GIB:.2f} GiB"
        if num_blocks < needed:
            raise CapacityError(
                f"the KV pool would hold {max(num_blocks, 0) * cache.block_size} tokens, fewer "
                f"than one sequence of max_model_len ({self.config.scheduler.max_model_len}): "
                f"{parts} of the {allowed} that gpu_memory_utilization={share} allows. hint: lower "
                "max_model_len, max_num_batched_tokens or max_num_seqs, or raise "
                "gpu_memory_utilization"
            )
        logger.info(
            "GPU memory: %s may be used; %s, KV pool %.2f (%d blocks of %d tokens)",
            allowed,
            parts,
            left / _GIB,
            num_blocks,
            cache.block_size,
        )
        self.config = dataclasses.replace(
            self.config, cache=dataclasses.replace(cache, num_blocks=num_blocks)
        )

    def _largest_prefill(self, runner: DeviceRunner) -> None:
        """A prefill pass of a whole token budget."""
        scheduler = self.config.scheduler
        left = scheduler.max_num_batched_tokens
        lens: list[int] = []
        while left > 0 and len(lens) < scheduler.max_num_seqs:
            lens.append(min(left, scheduler.max_model_len))
            left -= lens[-1]
        rows = np.arange(len(lens))
        runner.prefill.run(rows, np.zeros_like(rows), np.array(lens))
        torch.cuda.synchronize()

    def _phase(self, name: str) -> None:
        now = time.perf_counter()
        self.phases[name] = now - self._since
        self._since = now
