"""Passes over known tokens on the device: prompt chunks, and what a drafter missed.

Short passes are bound by the host, which takes longer to enqueue their kernels than the device to
run them; they are padded to a size from a list and captured. Long ones run as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from paceline.arrays import Int64Array
from paceline.attention.backend import AttentionMetadata
from paceline.worker.decode_step import DeviceModel
from paceline.worker.device_rows import DeviceRows
from paceline.worker.graphs import Graphs
from paceline.worker.transfer import upload

MAX_CAPTURED_TOKENS = 2048  # longer passes keep the device busy longer than the host
_TOKEN_STEPS = 4  # sizes between a power of two and the next, so that padding is at most a quarter
_MIN_TOKENS = 16
_SEQUENCES = (1, 4, 16, 64)


@dataclass(slots=True)
class _Inputs:
    """A pass of N tokens of S sequences, padded by null tokens and sequences without tokens."""

    places: torch.Tensor  # [2, N] int64: row and position of each token
    rows: torch.Tensor  # [S] int64
    lengths: torch.Tensor  # [2 * S + 1] int32: query_start_loc, then seq_lens


class PrefillPass:
    """Forwards of one model over tokens that the rows' histories hold."""

    def __init__(self, side: DeviceModel, state: DeviceRows, graphs: Graphs, name: str) -> None:
        self.side = side
        self._state = state
        self._graphs = graphs
        self._name = name
        self._inputs: dict[tuple[int, int], _Inputs] = {}

    def run(self, rows: Int64Array, starts: Int64Array, lens: Int64Array) -> torch.Tensor:
        """Hidden states of tokens [start, start + len) of each row, in row order, [>= N, hidden].

        rows, starts, lens: [S], every len at least 1. KV is written to the rows' blocks. The result
        may lie in memory that the next graph overwrites.
        """
        size = self._bucket(int(lens.sum()), len(rows))
        if size is None:
            return self.run_eagerly(rows, starts, lens)
        fixed = self._inputs.get(size)
        if fixed is None or (self._name, *size) not in self._graphs:
            fixed = self._capture(size)
        arrays = self._arrays(rows, starts, lens, *size)
        for tensor, array in zip((fixed.places, fixed.rows, fixed.lengths), arrays, strict=True):
            tensor.copy_(upload(array, tensor.device))
        hidden: torch.Tensor = self._graphs.replay((self._name, *size))
        return hidden

    def run_eagerly(self, rows: Int64Array, starts: Int64Array, lens: Int64Array) -> torch.Tensor:
        """The same, never as a graph: those hold on to the KV tensors they were captured with."""
        arrays = self._arrays(rows, starts, lens, int(lens.sum()), len(rows))
        inputs = _Inputs(*(upload(a, self._state.history.device) for a in arrays))
        return self._forward(inputs, int(lens.max()))

    def _bucket(self, tokens: int, sequences: int) -> tuple[int, int] | None:
        """The padded (tokens, sequences) of a captured pass, None for one that runs as it is."""
        if not self._graphs.enabled or tokens > MAX_CAPTURED_TOKENS or sequences > _SEQUENCES[-1]:
            return None
        step = max(_MIN_TOKENS, (1 << (tokens - 1).bit_length() >> 1) // _TOKEN_STEPS)
        padded = -(-tokens // step) * step
        return padded, next(size for size in _SEQUENCES if sequences <= size)

    def _capture(self, size: tuple[int, int]) -> _Inputs:
        nothing = np.zeros(0, np.int64)
        arrays = self._arrays(nothing, nothing, nothing, *size)  # null tokens alone
        inputs = _Inputs(*(upload(a, self._state.history.device) for a in arrays))
        warm_up = not self._inputs
        self._graphs.capture(
            (self._name, *size), lambda: self._forward(inputs, size[0]), warm_up=warm_up
        )
        self._inputs[size] = inputs
        return inputs

    def _arrays(
        self, rows: Int64Array, starts: Int64Array, lens: Int64Array, tokens: int, sequences: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """places, rows and lengths of ``_Inputs``, padded to that many tokens and sequences."""
        null = self._state.max_num_seqs
        ends = np.cumsum(lens)
        count = int(lens.sum())
        places = np.zeros((2, tokens), np.int64)
        places[0] = null
        places[0, :count] = np.repeat(rows, lens)
        places[1, :count] = np.arange(count) + np.repeat(starts - (ends - lens), lens)
        padded_rows = np.full(sequences, null, np.int64)
        padded_rows[: len(rows)] = rows
        lengths = np.zeros(2 * sequences + 1, np.int32)
        lengths[1 : sequences + 1] = count
        lengths[1 : len(rows) + 1] = ends
        lengths[sequences + 1 : sequences + 1 + len(rows)] = starts + lens
        return places, padded_rows, lengths

    def _forward(self, inputs: _Inputs, max_query_len: int) -> torch.Tensor:
        state, model = self._state, self.side.model
        rows, positions = inputs.places
        # Ids that only a larger target knows are fed as 0.
        ids = state.history[rows, positions].long()
        ids = ids.where(ids < model.arch.vocab_size, 0)
        size = state.block_size
        blocks = state.block_table[rows, positions // size].long()
        sequences = len(inputs.rows)
        metadata = AttentionMetadata(
            query_start_loc=inputs.lengths[: sequences + 1],
            seq_lens=inputs.lengths[sequences + 1 :],
            block_table=state.block_table.index_select(0, inputs.rows),
            slot_mapping=blocks * size + positions % size,
            block_size=size,
            query_lens=[max_query_len],
            seq_lens_list=[],
        )
        hidden: torch.Tensor = model(ids, positions, self.side.kv_caches, metadata)
        return hidden
