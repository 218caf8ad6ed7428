"""From a resolved configuration to a runner on a GPU: weights, measured memory, KV pool, graphs."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from paceline import ops
from paceline.attention.triton import TritonAttention
from paceline.config import EngineConfig, ModelConfig, SpeculativeConfig
from paceline.distributed.tp_group import SingleProcessGroup
from paceline.errors import CapacityError
from paceline.models.loader import TORCH_DTYPES, create_model, fill_model
from paceline.ops import triton as triton_ops
from paceline.sample.triton import DeviceSampler
from paceline.worker.decode_graphs import DecodeGraphs, bucket_of, buckets_up_to
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
from paceline.worker.latency_path import LatencyPath, drop_until, leaves_pool
from paceline.worker.memory_plan import (
    GIB,
    SPARE_BYTES,
    Limits,
    MemoryParts,
    count_blocks,
    out_of_memory,
)
from paceline.worker.prefill import MAX_CAPTURED_TOKENS, PrefillPass
from paceline.worker.swap import HostBlocks, staging_blocks

logger = logging.getLogger(__name__)

_CAPTURE_SECONDS = 4.0  # for graphs at start; with compiled kernels all take about one


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
        self._doing = ("starting", "")  # what may run out of memory, and what helps then
        self._since = time.perf_counter()

    def build(self) -> DeviceRunner:
        """Load, measure, allocate, capture; the phases' times are logged."""
        try:
            return self._build()
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
        # Raised here, where torch's error no longer holds what was allocated.
        raise self._out_of_memory()

    @torch.inference_mode()
    def _build(self) -> DeviceRunner:
        ops.use(self.device.type, triton_ops)
        config = self.config
        self._phase("device")
        speculative = config.speculative
        drafter = None if speculative is None else speculative.model
        models = [m for m in (config.model, drafter) if m is not None]
        widths = [{k + 1 for k in range(self.max_k + 1)}, {1, 2}]  # tokens a row, of each model
        paths = [
            self._latency_path(model, sizes) for model, sizes in zip(models, widths, strict=False)
        ]
        allocated, sides = [self._allocated()], []
        for model in models:
            sides.append(self._create(model))
            allocated.append(self._allocated())
        allocated += allocated[-1:] * (3 - len(allocated))
        settings = f"max_num_seqs ({config.scheduler.max_num_seqs})"
        with ThreadPoolExecutor(1) as pool:  # weights stream in while kernels compile
            filled = [
                pool.submit(fill_model, side.model, model)
                for side, model in zip(sides, models, strict=True)
            ]
            self._doing = ("allocating rows and scratch tensors", f"lower {settings}")
            runner = self._assemble(sides, speculative)
            budget = f"max_num_batched_tokens ({config.scheduler.max_num_batched_tokens})"
            self._doing = ("running the largest passes", f"lower {budget} or {settings}")
            self._compile(runner)
            for weights in filled:
                weights.result()
        self._phase("weights")
        if self.device.type == "cuda":
            if config.cache.gpu_memory_utilization:
                self._size_pool(runner, allocated, paths)
            else:
                self._fit_beside_pool(paths)
            self._phase("memory measured")
        self._allocate(runner, sides, paths, settings)
        logger.info(
            "start-up: %s", ", ".join(f"{name} {t:.1f} s" for name, t in self.phases.items())
        )
        return runner

    def _allocate(
        self,
        runner: DeviceRunner,
        sides: list[DeviceModel],
        paths: list[LatencyPath],
        settings: str,
    ) -> None:
        """Packed weights, the KV pool, and what works on it: latency forwards and graphs."""
        cache = self.config.cache
        self._doing = ("packing weights for the latency path", "set latency_path=off")
        for path, side in zip(paths, sides, strict=True):
            path.pack(side)
        settings += ", gpu_memory_utilization or kv_cache_memory_bytes"
        self._doing = ("allocating the KV pool", f"lower {settings}")
        for side in sides:
            side.kv_caches = self._kv_caches(side, cache.num_blocks)
        if cache.num_host_blocks:
            runner.host_blocks = HostBlocks(cache.num_host_blocks, sides[0].kv_caches)
        self._phase("KV pool")
        for path, side in zip(paths, sides, strict=True):
            path.open(side, runner.decode.step.state)
        self._phase("latency path")
        self._doing = ("capturing graphs", f"set enforce_eager=True, or lower {settings}")
        if runner.decode.graphs.enabled:
            graphs = runner.decode.graphs
            runner.decode.capture_ahead({0, self.max_k}, _CAPTURE_SECONDS)
            self._phase("graphs")
            logger.info("%d graphs captured, %.2f GiB", len(graphs), graphs.num_bytes / GIB)

    def _create(self, model: ModelConfig) -> DeviceModel:
        """A model whose weights are still to come, with the null block's KV alone."""
        hint = "choose a smaller model or drafter, or end other processes on the GPU"
        self._doing = (f"allocating the weights of {model.name}", hint)
        empty = create_model(model, str(self.device), TritonAttention(), SingleProcessGroup())
        side = DeviceModel(empty, [], self.config.scheduler.max_model_len)
        side.kv_caches = self._kv_caches(side, 0)
        return side

    def _latency_path(self, model: ModelConfig, widths: set[int]) -> LatencyPath:
        """widths: tokens a row has in the model's decode passes."""
        scheduler = self.config.scheduler
        longest = scheduler.max_model_len + self.max_k + 1
        sizes = {n * width for n in buckets_up_to(scheduler.max_num_seqs) for width in widths}
        return LatencyPath(self.config, model, self.device, longest, sizes)

    def _kv_caches(self, side: DeviceModel, num_blocks: int) -> list[KVCache]:
        return allocate_kv_caches(
            side.model.arch,
            num_blocks,
            self.config.cache.block_size,
            TORCH_DTYPES[self.config.model.dtype],
            self.device,
        )

    def _assemble(
        self, sides: list[DeviceModel], speculative: SpeculativeConfig | None
    ) -> DeviceRunner:
        """A runner of the target and, if there are two, the drafter."""
        target, draft = sides[0], sides[1] if len(sides) > 1 else None
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
        state.allocate_counts(vocab)
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

    def _fit_beside_pool(self, paths: list[LatencyPath]) -> None:
        """Leave out latency forwards that do not fit beside a pool of the given size."""
        blocks = self.config.cache.num_blocks * sum(self._block_bytes())
        free, _ = torch.cuda.mem_get_info()
        drop_until(
            paths, lambda packed: blocks + packed + SPARE_BYTES <= free, self.config.latency_path
        )

    def _size_pool(
        self, runner: DeviceRunner, allocated: list[int], paths: list[LatencyPath]
    ) -> None:
        """Put into ``config`` the blocks that the measured rest of the memory holds.

        allocated: bytes before the target was loaded, after it, and after the drafter. Runs the
        largest passes once, over the null block alone.
        """
        config, cache = self.config, self.config.cache
        parts = self._measure(runner, allocated)
        limits = Limits(
            gpu_memory_utilization=cache.gpu_memory_utilization,
            max_model_len=1 if cache.lowers_model_len else config.scheduler.max_model_len,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_num_seqs=config.scheduler.max_num_seqs,
            block_size=cache.block_size,
        )
        block_bytes = sum(self._block_bytes())
        drop_until(paths, leaves_pool(parts, limits, block_bytes), config.latency_path)
        parts = dataclasses.replace(parts, packed=sum(path.num_bytes for path in paths))
        num_blocks = count_blocks(parts, limits, block_bytes)
        logger.info(
            "GPU memory in GiB: %.2f of %.2f may be used; %s; KV pool %.2f (%d blocks of %d "
            "tokens)",
            cache.gpu_memory_utilization * parts.total / GIB,
            parts.total / GIB,
            parts,
            parts.left(cache.gpu_memory_utilization) / GIB,
            num_blocks,
            cache.block_size,
        )
        self.config = _with_pool(config, num_blocks)

    def _measure(self, runner: DeviceRunner, allocated: list[int]) -> MemoryParts:
        """What everything but the KV pool takes, after the largest passes have run."""
        budget = self.config.scheduler.max_num_batched_tokens
        before = torch.cuda.memory_allocated()
        prefill, decode = (peak - before for peak in self._run_largest(runner))
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        captured = prefill * min(MAX_CAPTURED_TOKENS, budget) // budget
        start, with_target, with_drafter = allocated
        return MemoryParts(
            total=total,
            elsewhere=total - free - (before - start),
            target=with_target - start,
            drafter=with_drafter - with_target,
            state=before - with_drafter + self._staging_bytes(),
            activations=prefill,
            # Graphs keep a pool of their own, so this comes on top of what passes take eagerly.
            graphs=max(decode, captured),
        )

    def _block_bytes(self) -> tuple[int, int]:
        """Bytes of one block's KV of target and drafter."""
        config = self.config
        size = config.cache.block_size
        drafter = config.speculative.model if config.speculative is not None else None
        sides = [config.model, drafter]
        target, other = (
            0 if side is None else size * side.arch.kv_bytes_per_token(config.model.dtype_bytes)
            for side in sides
        )
        return target, other

    def _staging_bytes(self) -> int:
        target, _ = self._block_bytes()
        return staging_blocks(self.config.cache.num_host_blocks, target) * target

    def _compile(self, runner: DeviceRunner) -> None:
        """Run each part once, over the null block, so that kernels compile side by side.

        The weights may hold anything, and parts overwrite each other's scratch: nothing is kept of
        what comes out. Triton's compiler lets other threads run most of the time.
        """
        if self.device.type != "cuda":
            return
        step = runner.decode.step
        step.rows.fill_(step.state.max_num_seqs)
        parts: list[Callable[[], object]] = [partial(self._largest_prefill, runner.prefill)]
        if runner.catch_up is not None:
            parts.append(partial(self._largest_prefill, runner.catch_up))
        for entries in {1, bucket_of(step.max_entries, step.max_entries)}:
            for k in {0, self.max_k}:
                scores = step.no_scores(entries, k)
                parts.append(partial(step.draft, entries, k))
                parts.append(partial(step.verify, entries, k))
                parts.append(partial(step.finish, entries, scores, k))

        def run(part: Callable[[], object]) -> None:
            torch.cuda.set_device(self.device)  # this and the mode are a thread's own
            with torch.inference_mode():
                part()

        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(run, parts))
        torch.cuda.synchronize()
        self._phase("kernels")

    def _run_largest(self, runner: DeviceRunner) -> tuple[int, int]:
        """Run the largest prefill and decode pass, over the null block alone.

        Returns the bytes that were allocated at most in each. The first time, kernels compile.
        """
        scheduler, step = self.config.scheduler, runner.decode.step
        budget = scheduler.max_num_batched_tokens
        self._doing = (
            "running the largest prefill pass",
            f"lower max_num_batched_tokens ({budget})",
        )
        torch.cuda.reset_peak_memory_stats()
        self._largest_prefill(runner.prefill)
        prefill = torch.cuda.max_memory_allocated()
        hint = f"lower max_num_seqs ({scheduler.max_num_seqs}) or num_speculative_tokens"
        self._doing = ("running the largest decode pass", hint)
        torch.cuda.reset_peak_memory_stats()
        step.rows.fill_(step.state.max_num_seqs)
        step.run(bucket_of(step.max_entries, step.max_entries), self.max_k)
        torch.cuda.synchronize()
        return prefill, torch.cuda.max_memory_allocated()

    def _largest_prefill(self, prefill: PrefillPass) -> None:
        """A pass of a whole token budget."""
        scheduler = self.config.scheduler
        left = scheduler.max_num_batched_tokens
        lens: list[int] = []
        while left > 0 and len(lens) < scheduler.max_num_seqs:
            lens.append(min(left, scheduler.max_model_len))
            left -= lens[-1]
        rows = np.arange(len(lens))
        prefill.run_eagerly(rows, np.zeros_like(rows), np.array(lens))
        torch.cuda.synchronize()

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def _out_of_memory(self) -> CapacityError:
        """The error for what ran out of memory."""
        doing, hint = self._doing
        free = total = 0
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
        return out_of_memory(doing, hint, free, total, self._allocated())

    def _phase(self, name: str) -> None:
        now = time.perf_counter()
        self.phases[name] = now - self._since
        self._since = now


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether the device's memory did not suffice: torch's own error, a library's or Triton's."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        "CUDA" in text and ("out of memory" in text or "ALLOC_FAILED" in text)
    )


def _with_pool(config: EngineConfig, num_blocks: int) -> EngineConfig:
    """The configuration with the pool it got, and a length that fits it where that may change."""
    cache = dataclasses.replace(config.cache, num_blocks=num_blocks)
    longest = num_blocks * cache.block_size + 1
    if longest >= config.scheduler.max_model_len:
        return dataclasses.replace(config, cache=cache)
    logger.warning(
        "max_model_len is lowered from %d to %d, the longest sequence that the KV pool holds",
        config.scheduler.max_model_len,
        longest,
    )
    return dataclasses.replace(
        config,
        cache=cache,
        model=dataclasses.replace(config.model, max_model_len=longest),
        scheduler=dataclasses.replace(config.scheduler, max_model_len=longest),
    )
