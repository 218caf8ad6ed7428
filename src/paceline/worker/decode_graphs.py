"""Decode iterations as graphs: one a (bucket, k).

A batch is padded to the next bucket with null rows. Few rows more cost little, as a decode step
reads the same weights; many are computed like others, so large buckets lie closer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from paceline.worker.decode_step import DecodeStep, Scores
from paceline.worker.graphs import Graphs

_BUCKETS: tuple[int, ...] = (1, 2, 4, 8, *range(16, 257, 16))
_BUCKET_STEP = 128  # beyond the list


def bucket_of(rows: int, most: int) -> int:
    """The number of rows that a batch of ``rows`` is padded to, at most ``most``."""
    for size in _BUCKETS:
        if rows <= size:
            return min(size, most)
    return min(-(-rows // _BUCKET_STEP) * _BUCKET_STEP, most)


def buckets_up_to(most: int) -> Iterator[int]:
    """Every bucket that batches of up to ``most`` rows are padded to."""
    rows = 0
    while rows < most:
        rows = bucket_of(rows + 1, most)
        yield rows


class DecodeGraphs:
    """Runs a ``DecodeStep``, captured where the device can."""

    def __init__(self, step: DecodeStep, graphs: Graphs) -> None:
        self.step = step
        self.graphs = graphs
        self._warm: set[tuple[str, int, bool]] = set()  # part, k, with penalties: have run

    def run(self, entries: int, k: int) -> Scores:
        """Enqueue an iteration of ``entries`` rows, a bucket size; returns the target's scores.

        They lie in memory that the next graph may overwrite.
        """
        scores: Scores = self._replay("decode", entries, k)
        return scores

    def draft(self, entries: int, k: int) -> None:
        """Enqueue the first part of an iteration alone."""
        self._replay("draft", entries, k)

    def verify(self, entries: int, k: int) -> Scores:
        """Enqueue the second part alone; ``DecodeStep.finish`` must follow, as it is no graph."""
        scores: Scores = self._replay("verify", entries, k)
        return scores

    def _replay(self, part: str, entries: int, k: int) -> Any:
        if not self.graphs.enabled:
            return self._work(part)(entries, k)
        key = self._key(entries, k, part)
        if key not in self.graphs:
            self.capture(entries, k, part)
        return self.graphs.replay(key)

    def _work(self, part: str) -> Callable[[int, int], Any]:
        step = self.step
        return {"decode": step.run, "draft": step.draft, "verify": step.verify}[part]

    def capture_ahead(self, lengths: Iterable[int], seconds: float) -> None:
        """Capture the buckets of these draft lengths, small ones first, until the time is spent.

        With kernels compiled before, all take about a second; what is left out is captured when a
        batch first needs it.
        """
        end = time.perf_counter() + seconds
        lengths = sorted(set(lengths))
        for entries in buckets_up_to(self.step.max_entries):
            for k in lengths:
                if time.perf_counter() > end:
                    return
                self.capture(entries, k)

    def capture(self, entries: int, k: int, part: str = "decode") -> None:
        """Capture the graph of a bucket and a draft length; the rows' state stays as it is."""
        step, key = self.step, self._key(entries, k, part)
        work = self._work(part)
        rows = step.rows.clone()
        step.rows.fill_(step.state.max_num_seqs)  # null rows: nothing is committed
        kind = (part, *key[2:])
        self.graphs.capture(key, lambda: work(entries, k), warm_up=kind not in self._warm)
        step.rows.copy_(rows)
        self._warm.add(kind)

    def _key(self, entries: int, k: int, part: str) -> tuple[str, int, int, bool]:
        """A graph's name; kernels that look at penalties are others than those that do not."""
        return part, entries, k, self.step.state.counts is not None
