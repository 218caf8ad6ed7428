"""The drafter's missing KV, and the work of a step that fills it.

A drafter that did not draft for a while (k was 0, or a prefix hit brought only the target's KV)
lacks KV for tokens in between: the gap. It is filled by the drafter's own prefill over known
tokens, chunked under the token budget. Works on the row table's ``draft_filled`` and
``draft_lag``; no tensors.
"""

from __future__ import annotations

import numpy as np

from paceline.core.kv_cache_manager import KVCacheManager
from paceline.core.rows import RowTable
from paceline.core.stats import EngineStats
from paceline.core.step import SchedulerOutput

# A drafting round feeds the drafter the last two committed tokens, so KV of these may be missing.
READY_LAG = 2


class CatchUp:
    """One step's drafter prefill; made anew for every step that may draft.

    context: tokens the drafter can reach; nothing is computed beyond.
    """

    def __init__(
        self, table: RowTable, kv: KVCacheManager, stats: EngineStats, budget: int, context: int
    ) -> None:
        self._table = table
        self._kv = kv
        self._stats = stats
        self._budget = budget
        self._context = context
        self._ranges: list[tuple[int, int, int]] = []  # row, start, end

    def add_decode_rows(self, out: SchedulerOutput) -> None:
        """Fill what decode rows missed while they did not draft; all of it counts."""
        table = self._table
        behind = table.decoding & ~table.finished & (table.draft_lag > READY_LAG)
        behind &= table.num_tokens + table.in_flight_min < table.max_total
        for row in table.rows_in_order(behind).tolist():
            start, known = int(table.draft_filled[row]), int(table.num_tokens[row])
            if known >= self._context:
                continue
            # While a static batch forms, a row's last token may have no block yet.
            slots = int(table.num_blocks[row]) * self._kv.block_size
            end = min(known, slots, start + self._budget - out.num_batched_tokens)
            if end > start:
                self._add(out, row, end, counted=end - start)
                table.draft_lag[row] = known + table.in_flight_max[row] - end

    def add_prefill_chunk(self, out: SchedulerOutput, row: int, start: int, end: int) -> None:
        """Follow the target's prefill chunk [start, end).

        In lockstep with the target this is free of the budget; tokens missed before it are not.
        """
        filled = int(self._table.draft_filled[row])
        gap = max(0, start - filled)
        left = self._budget - out.num_batched_tokens
        to = min(end if gap <= left else filled + left, self._context)
        if to > filled:
            self._add(out, row, to, counted=min(gap, to - filled))

    def _add(self, out: SchedulerOutput, row: int, end: int, counted: int) -> None:
        self._ranges.append((row, int(self._table.draft_filled[row]), end))
        self._table.draft_filled[row] = end
        out.num_batched_tokens += counted
        self._stats.num_catch_up_tokens += counted

    def emit(self, out: SchedulerOutput) -> None:
        """Put the ranges into the step and note what their blocks will hold."""
        if self._ranges:
            rows, starts, ends = np.array(self._ranges, np.int64).T
            self._kv.record_drafter_fill(rows, starts, ends)
            out.catch_up_rows = rows.astype(np.int32)
            out.catch_up_starts = starts.astype(np.int32)
            out.catch_up_ends = ends.astype(np.int32)
