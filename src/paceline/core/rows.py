"""The row table: everything the scheduler knows of running sequences, as numpy columns.

Columns make a step's bookkeeping a few array operations, whatever the number of rows; Python
touches a single row only when it enters, leaves, crosses a block border or needs text. The runner
holds its own copy of what it needs (``core.step.NewRow``); this table is the committed truth.
"""

from __future__ import annotations

import numpy as np

from paceline.arrays import Int32Array, Int64Array
from paceline.core.step import NewRow
from paceline.request import Sequence, SequenceStatus


class RowTable:
    """``max_num_seqs`` rows. Integer columns are [max_num_seqs].

    A row is free, prefilling (``decoding`` False) or decoding. ``finished`` marks rows that a
    static batch keeps computing after their sequence ended.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        def column() -> Int64Array:
            return np.zeros(max_num_seqs, np.int64)

        self.max_num_seqs = max_num_seqs
        self.sequences: list[Sequence | None] = [None] * max_num_seqs
        self.generation = column()
        self.occupied = np.zeros(max_num_seqs, np.bool_)
        self.decoding = np.zeros(max_num_seqs, np.bool_)
        self.finished = np.zeros(max_num_seqs, np.bool_)
        self.order = column()  # grows with every admission: larger is newer
        self.prompt_len = column()
        self.num_tokens = column()  # committed: prompt + output
        self.max_total = column()  # num_tokens never passes this
        self.num_computed = column()  # prefill progress as scheduled
        self.prefill_end = column()  # tokens to compute before decoding starts
        # Tokens that launched steps may still add: at most and at least.
        self.in_flight_max = column()
        self.in_flight_min = column()
        self.num_blocks = column()
        self.num_hashed_blocks = column()
        self.draft_filled = column()  # leading tokens with drafter KV, as known or scheduled
        # upper bound of num_tokens - draft_filled once launched steps end
        self.draft_lag = column()
        self.num_drafts = column()
        self.num_draft_tokens = column()
        self.num_accepted_tokens = column()
        self.has_stop_strings = np.zeros(max_num_seqs, np.bool_)
        self.streams = np.zeros(max_num_seqs, np.bool_)
        self.keeps_rounds = np.zeros(max_num_seqs, np.bool_)
        self.stop_ids = np.full((max_num_seqs, 1), -1, np.int32)  # [rows, most stop ids], padded
        max_blocks = -(-max_model_len // block_size)
        # calloc'ed: rows that stay short never touch their tail.
        self.tokens: Int32Array = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.block_table: Int32Array = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._next_order = 0
        self._next_generation = 1

    @property
    def num_occupied(self) -> int:
        return self.max_num_seqs - len(self._free_rows)

    @property
    def has_free_row(self) -> bool:
        return bool(self._free_rows)

    def sequence(self, row: int) -> Sequence:
        """The row's owner; the row must be occupied."""
        sequence = self.sequences[row]
        if sequence is None:
            raise AssertionError(f"row {row} is free")
        return sequence

    def rows_in_order(self, mask: np.ndarray) -> Int64Array:
        """Rows of the mask, oldest first."""
        rows = np.flatnonzero(mask)
        return rows[np.argsort(self.order[rows])]

    def draft_room(self, rows: Int64Array) -> Int64Array:
        """Drafts that could still be accepted before each row's last token."""
        left: Int64Array = self.max_total[rows] - self.num_tokens[rows]
        return left - self.in_flight_min[rows] - 1

    def blocks(self, row: int) -> list[int]:
        """The row's block ids in order."""
        ids: list[int] = self.block_table[row, : self.num_blocks[row]].tolist()
        return ids

    def append_blocks(self, row: int, blocks: list[int]) -> None:
        start = int(self.num_blocks[row])
        self.block_table[row, start : start + len(blocks)] = blocks
        self.num_blocks[row] = start + len(blocks)

    def assign(self, sequence: Sequence, blocks: list[int], num_computed: int) -> int:
        """Give a waiting sequence a row, its blocks and the tokens whose KV it found computed."""
        row = self._free_rows.pop()
        request = sequence.request
        count = len(sequence.token_ids)
        self.sequences[row] = sequence
        self.occupied[row] = True
        self.generation[row] = self._next_generation
        self.order[row] = self._next_order
        self._next_generation += 1
        self._next_order += 1
        self.prompt_len[row] = request.prompt_len
        self.num_tokens[row] = self.prefill_end[row] = count
        self.max_total[row] = request.max_total_tokens
        self.num_computed[row] = num_computed
        self.tokens[row, :count] = sequence.token_ids
        self.append_blocks(row, blocks)
        self.has_stop_strings[row] = sequence.stop_checker is not None
        self.streams[row] = request.stream
        self.keeps_rounds[row] = request.keep_rounds
        self._set_stop_ids(row, request.stop_token_ids)
        sequence.row = row
        sequence.status = SequenceStatus.RUNNING
        return row

    def describe(self, row: int) -> NewRow:
        """What a runner must know of a row that was just assigned."""
        sequence = self.sequence(row)
        request = sequence.request
        return NewRow(
            row=row,
            generation=int(self.generation[row]),
            token_ids=sequence.token_ids,
            prompt_len=request.prompt_len,
            max_total_tokens=request.max_total_tokens,
            sampling=request.sampling,
            stop_token_ids=request.stop_token_ids,
            seed=request.seed,
            sample_index=sequence.index,
            block_ids=self.blocks(row),
            grammar=sequence.grammar,
        )

    def release(self, row: int) -> None:
        """Free the row; its ids and counters go back to the sequence if that still owns it."""
        sequence = self.sequence(row)
        if not self.finished[row]:
            self.detach(row)
        self.sequences[row] = None
        for flags in (
            self.occupied,
            self.decoding,
            self.finished,
            self.has_stop_strings,
            self.streams,
            self.keeps_rounds,
        ):
            flags[row] = False
        for values in (
            self.in_flight_max,
            self.in_flight_min,
            self.num_blocks,
            self.num_hashed_blocks,
            self.draft_filled,
            self.draft_lag,
        ):
            values[row] = 0
        self.generation[row] = 0
        self.block_table[row] = 0
        self._free_rows.append(row)
        if sequence.row == row:
            sequence.row = -1

    def detach(self, row: int) -> None:
        """Copy ids and counters of a row to its sequence."""
        sequence = self.sequence(row)
        sequence.token_ids = self.tokens[row, : self.num_tokens[row]].copy()
        metrics = sequence.speculative
        metrics.num_drafts += int(self.num_drafts[row])
        metrics.num_draft_tokens += int(self.num_draft_tokens[row])
        metrics.num_accepted_tokens += int(self.num_accepted_tokens[row])
        for values in (self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens):
            values[row] = 0

    def _set_stop_ids(self, row: int, ids: tuple[int, ...]) -> None:
        width = self.stop_ids.shape[1]
        if len(ids) > width:
            wider = np.full((self.max_num_seqs, len(ids)), -1, np.int32)
            wider[:, :width] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(ids)] = ids
