"""The per-row state of running sequences that the runner works on.

Rows change only when the scheduler says so (a sequence enters, leaves, gets blocks) or when a step
advances them. On a CPU the columns are numpy arrays and the history is a tensor over the same
memory.
"""

from __future__ import annotations

import numpy as np
import torch

from paceline.arrays import BoolArray, Int32Array, Int64Array
from paceline.core.step import NewRow, SchedulerOutput
from paceline.sample.rows import SamplingRows


class DecodeState:
    """Columns [max_num_seqs]; ``history`` [max_num_seqs, max_model_len + max_k + 1] int32."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, max_k: int) -> None:
        def column() -> Int64Array:
            return np.zeros(max_num_seqs, np.int64)

        self.block_size = block_size
        self.num_tokens = column()  # committed
        self.prompt_len = column()
        self.max_total = column()
        self.generation = column()
        self.active: BoolArray = np.zeros(max_num_seqs, np.bool_)
        self.num_logprobs: Int64Array = np.full(max_num_seqs, -1, np.int64)  # -1: not asked
        self.num_prompt_logprobs: Int64Array = np.full(max_num_seqs, -1, np.int64)
        self.stop_ids: Int32Array = np.full((max_num_seqs, 1), -1, np.int32)
        width = max_model_len + max_k + 1
        # calloc'ed: pages of short rows never become real memory.
        self.history: Int32Array = np.zeros((max_num_seqs, width), np.int32)
        blocks = -(-width // block_size)
        self.block_table: Int32Array = np.zeros((max_num_seqs, blocks), np.int32)
        self.sampling = SamplingRows(
            max_num_seqs, torch.from_numpy(self.history), torch.device("cpu")
        )

    def apply(self, out: SchedulerOutput) -> None:
        """Make the row changes of a step."""
        for row in out.freed_rows:
            self.active[row] = False
        for new in out.new_rows:
            self._enter(new)
        self.block_table[out.new_block_rows, out.new_block_indices] = out.new_block_ids

    def _enter(self, new: NewRow) -> None:
        row, count = new.row, len(new.token_ids)
        self.history[row, :count] = new.token_ids
        self.num_tokens[row] = count
        self.prompt_len[row] = new.prompt_len
        self.max_total[row] = new.max_total_tokens
        self.generation[row] = new.generation
        self.active[row] = True
        sampling = new.sampling
        self.num_logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        wanted = sampling.prompt_logprobs if new.sample_index == 0 else None
        self.num_prompt_logprobs[row] = -1 if wanted is None else wanted
        self.block_table[row] = 0
        self.block_table[row, : len(new.block_ids)] = new.block_ids
        self._set_stop_ids(row, new.stop_token_ids)
        # A grammar sees to min_tokens itself: it knows where nothing but an end may follow.
        forbidden = () if new.grammar is not None else new.stop_token_ids
        self.sampling.set_row(row, sampling, new.prompt_len, new.seed, new.sample_index, forbidden)

    def _set_stop_ids(self, row: int, ids: tuple[int, ...]) -> None:
        width = self.stop_ids.shape[1]
        if len(ids) > width:
            self.stop_ids = np.pad(
                self.stop_ids, ((0, 0), (0, len(ids) - width)), constant_values=-1
            )
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(ids)] = ids

    def advance(self, rows: Int64Array, tokens: Int64Array, counts: Int64Array) -> None:
        """Append each row's run and deactivate rows that reached a stop id or their limit.

        rows [B]; tokens [B, K]; counts [B] length of each run. The committed cut is the
        scheduler's; this one only keeps a finished row from going on, by the same rules.
        """
        start = self.num_tokens[rows]
        columns = np.arange(tokens.shape[1])
        keep = np.minimum(counts, self.max_total[rows] - start)
        inside = columns < keep[:, None]  # [B, K]
        stops = (tokens[:, :, None] == self.stop_ids[rows][:, None, :]).any(2) & inside
        stopped = stops.any(1)
        keep = np.where(stopped, stops.argmax(1) + 1, keep)
        inside = columns < keep[:, None]
        at = start[:, None] + columns
        repeated = np.broadcast_to(rows[:, None], inside.shape)
        self.history[repeated[inside], at[inside]] = tokens[inside]
        end = start + keep
        self.num_tokens[rows] = end
        self.active[rows] &= ~stopped & (end < self.max_total[rows])
