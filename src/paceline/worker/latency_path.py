"""Gives a model on a card its latency forward: where it applies, fits, and is measured faster.

One persistent kernel computes a whole pass of few tokens (``paceline/latency``). It reads weights
packed in its own order, a second copy beside the one that longer passes and prefill use.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from paceline.config import EngineConfig, ModelConfig
from paceline.latency.build import LatencyUnavailable, build
from paceline.latency.forward import LatencyForward
from paceline.latency.pack import PackedWeights
from paceline.latency.plan import CardLimits, LatencyPlan, plan
from paceline.ops.triton.card import card_of
from paceline.worker.decode_step import DeviceModel
from paceline.worker.device_rows import DeviceRows
from paceline.worker.memory_plan import GIB, Limits, MemoryParts, count_blocks

logger = logging.getLogger(__name__)

_REPEATS = 5  # replays a measurement is the median of


# Of the KV pool, what packed weights must leave.
_POOL_SHARE = 2 / 3


class LatencyPath:
    """One model's way to it: ``pack`` once memory is planned, ``open`` once its KV is there."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        device: torch.device,
        max_positions: int,
        pass_sizes: set[int],
    ) -> None:
        """max_positions: tokens of the longest sequence, drafts included; pass_sizes: of which
        passes there may be."""
        self.plan: LatencyPlan | None = None
        self._kernels: Future[dict[int, bytes]] | None = None
        self.packed: PackedWeights | None = None
        self.name = model.name
        if config.latency_path == "off" or device.type != "cuda":
            return
        card = card_of(device)
        found = plan(
            model.arch,
            CardLimits(card.capability, card.num_sms, card.shared_memory),
            dtype=model.dtype,
            block_size=config.cache.block_size,
            max_positions=max_positions,
        )
        if isinstance(found, LatencyPlan):
            self.plan = found
            # Compiled while weights load, since a first time takes seconds.
            counts = [n for n in found.token_counts if n in pass_sizes]
            self._kernels = ThreadPoolExecutor(1).submit(_build_all, found, counts)
        else:
            self._leave_out(found.reason)

    @property
    def num_bytes(self) -> int:
        """Device memory of the packed weights, 0 without a latency forward."""
        return 0 if self.plan is None else self.plan.packed_bytes

    def pack(self, side: DeviceModel) -> None:
        """Make the second copy of the weights."""
        if self.plan is not None:
            self.packed = PackedWeights(side.model, self.plan)

    def drop(self, reason: str) -> None:
        """Give the memory back and stay on the throughput path."""
        self.plan = self.packed = None
        self._leave_out(reason)

    def open(self, side: DeviceModel, state: DeviceRows) -> None:
        """Compile, and take the kernel for as many tokens as it is faster for.

        The model's KV is at its place by now.
        """
        if self.plan is None or self._kernels is None:
            return
        try:
            kernels = self._kernels.result()
            most = max(kernels)
            forward = LatencyForward(side.model, side.kv_caches, self.plan, most, self.packed)
            for tokens, cubin in kernels.items():
                forward.load(tokens, cubin)
        except LatencyUnavailable as error:
            logger.warning("%s: %s", self.name, error)
            self.plan = self.packed = None
            return
        tried = [n for n in kernels if n & (n - 1) == 0 or n == most]  # powers of two, and the last
        times = {n: _compare(side, forward, state, n) for n in tried}
        faster = [n for n, (latency, throughput) in times.items() if latency < throughput]
        if not faster:
            self.drop("slower here than the throughput path")
            return
        side.latency = forward
        side.latency_tokens = frozenset(n for n in kernels if n <= max(faster))
        logger.info(
            "latency path: %s, passes of up to %d tokens; ms beside the throughput path: %s",
            self.name,
            max(faster),
            ", ".join(f"{n}: {a:.2f} / {b:.2f}" for n, (a, b) in times.items()),
        )

    def _leave_out(self, reason: str) -> None:
        logger.info("latency path: not for %s: %s", self.name, reason)


def _build_all(plan: LatencyPlan, counts: list[int]) -> dict[int, bytes]:
    """The kernel for each number of tokens; where none is cached they compile side by side."""
    with ThreadPoolExecutor(len(counts)) as pool:
        cubins = pool.map(lambda n: build(plan.options(n), plan.card.capability), counts)
        return dict(zip(counts, cubins, strict=True))


def drop_until(paths: list[LatencyPath], enough: Callable[[int], bool], mode: str) -> None:
    """Leave out the largest until ``enough(bytes of packed weights)``, unless the mode is "on"."""
    for path in sorted(paths, key=lambda path: -path.num_bytes):
        if mode == "on" or enough(sum(path.num_bytes for path in paths)):
            return
        if path.num_bytes:
            path.drop(f"its {path.num_bytes / GIB:.2f} GiB of packed weights would take KV room")


def leaves_pool(parts: MemoryParts, limits: Limits, block_bytes: int) -> Callable[[int], bool]:
    """Whether packed weights of some bytes leave most of the KV pool."""
    without = count_blocks(parts, limits, block_bytes)

    def enough(packed: int) -> bool:
        left = replace(parts, packed=packed).left(limits.gpu_memory_utilization)
        return left // block_bytes - 1 >= max(limits.blocks_needed, _POOL_SHARE * without)

    return enough


def _compare(
    side: DeviceModel, forward: LatencyForward, state: DeviceRows, tokens: int
) -> tuple[float, float]:
    """Milliseconds of a pass of ``tokens`` rows by each path, logits included."""
    rows = torch.full((tokens,), state.max_num_seqs, dtype=torch.int32, device=state.history.device)
    active = state.column("active")

    def run() -> None:
        side.decode(state, rows, active, query_len=1, offset=-1).logits(slice(0, tokens))

    side.latency, side.latency_tokens = forward, frozenset({tokens})
    latency = _time(run)
    side.latency, side.latency_tokens = None, frozenset()
    return latency, _time(run)


def _time(run: Callable[[], None]) -> float:
    """Median milliseconds of a replay."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        run()
    times: list[float] = []
    for _ in range(_REPEATS + 1):
        start, end = (_event() for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
