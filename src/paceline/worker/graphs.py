"""Captured work: what a GPU repeats without the host telling it each kernel.

All graphs of an engine share one memory pool, since only one of them runs at a time; what a graph
returns lies in memory that another graph may overwrite.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import Any

import torch

logger = logging.getLogger(__name__)


class Graphs:
    """CUDA graphs by key, made when first needed.

    enabled: False runs all work eagerly (``enforce_eager``, or no CUDA device).
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.seconds = 0.0  # spent capturing
        self.num_bytes = 0  # of the device's memory that captures took
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool: Any = None  # torch names no type for the handle

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def replay(self, key: Hashable) -> Any:
        """Enqueue a captured graph; returns what its work returned."""
        graph, out = self._graphs[key]
        graph.replay()
        return out

    def capture(self, key: Hashable, work: Callable[[], Any], *, warm_up: bool) -> None:
        """Capture ``work``, whose inputs must be such that running it changes nothing that counts.

        warm_up: run it once before, for kernels to compile and the library to choose its own.
        """
        start = time.perf_counter()
        if warm_up:
            work()
            torch.cuda.synchronize()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()  # as a capture begins, so that only what it takes is counted
        free, _ = torch.cuda.mem_get_info()
        graph = torch.cuda.CUDAGraph()
        # Kernels that a shape needs for the first time are loaded while it is captured.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="relaxed"):
            out = work()
        self._graphs[key] = graph, out
        self.num_bytes += free - torch.cuda.mem_get_info()[0]
        seconds = time.perf_counter() - start
        self.seconds += seconds
        logger.debug("captured %s in %.2f s", key, seconds)

    def clear(self) -> None:
        """Forget all graphs, once none runs: the tensors they work on have changed."""
        if self._graphs:
            torch.cuda.synchronize()
        self._graphs.clear()
        self.num_bytes = 0
        self._pool = None  # it went with its last graph
