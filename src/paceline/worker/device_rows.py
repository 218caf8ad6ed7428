"""The rows of a decode step as device tensors, and how the host changes them.

A step reads and advances these tensors without the host. The host writes only when a sequence
enters or leaves a row or gets blocks: it fills pinned memory (which torch's allocator keeps until
it has been copied) and enqueues a few small copies on the current stream, in order with the steps.

    rows = DeviceRows(256, 4096, block_size=16, max_k=16, device=device)
    rows.enter(out.new_rows)
    rows.set_blocks(out.new_block_rows, out.new_block_indices, out.new_block_ids)
    rows.deactivate(out.freed_rows)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paceline.arrays import Int32Array
from paceline.config import GPU_MAX_LOGIT_BIAS, GPU_MAX_STOP_IDS
from paceline.core.step import NewRow
from paceline.errors import RequestError
from paceline.sample.rows import COUNTED, SamplingRows
from paceline.sample.triton.commit import count_tokens
from paceline.sample.triton.row_tensors import COLUMNS, RowTensors
from paceline.worker.transfer import upload

_ALIGN = 64  # columns start at multiples of 256 bytes
_INT32_MAX = 2**31 - 1


class DeviceRows(RowTensors):
    """``RowTensors`` with block tables: R rows, and the null row R that pads batches.

    block_table: [R + 1, max_blocks] int32, zero beyond a row's blocks. The other tensors are
    described in ``RowTensors``. ``counts`` is None while no row has penalties, so that kernels need
    not ask for them (measured: 0.2 ms of an iteration of 64 rows).
    """

    __slots__ = (
        "_counted",
        "_room_for_counts",
        "_sampling",
        "block_size",
        "block_table",
        "max_num_seqs",
    )

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        *,
        block_size: int,
        max_k: int,
        device: torch.device,
        max_stop_ids: int = GPU_MAX_STOP_IDS,
        max_biases: int = GPU_MAX_LOGIT_BIAS,
    ) -> None:
        rows, width = max_num_seqs + 1, max_model_len + max_k + 1

        def full(*shape: int, value: float = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        super().__init__(
            columns=full(len(COLUMNS), -(-rows // _ALIGN) * _ALIGN),
            history=full(rows, width),
            stop_ids=full(rows, _power_of_two(max_stop_ids), value=-1),
            bias_ids=full(rows, _power_of_two(max_biases), value=-1),
            bias_values=full(rows, _power_of_two(max_biases), dtype=torch.float32),
            counts=None,
        )
        self.max_num_seqs = max_num_seqs
        self.block_size = block_size
        self._counted: set[int] = set()  # rows with penalties
        self._room_for_counts: torch.Tensor | None = None
        self.block_table = full(rows, -(-width // block_size))
        for name in ("num_tokens", "max_total"):  # the null row: one token, of id 0
            self.column(name).fill_(1)
        self.column("temperature").fill_(1.0)
        self._sampling = SamplingRows(1, torch.zeros(1, 1, dtype=torch.int32), torch.device("cpu"))

    @property
    def num_bytes(self) -> int:
        """Device memory of all tensors."""
        tensors = (
            self.columns,
            self.history,
            self.stop_ids,
            self.bias_ids,
            self.bias_values,
            self.block_table,
        )
        counts = 0 if self._room_for_counts is None else self._room_for_counts.numel() * 4
        return counts + sum(x.numel() * x.element_size() for x in tensors)

    def allocate_counts(self, vocab: int) -> None:
        """Make room for the token counts of penalties: (R + 1) × vocab × 4 bytes."""
        shape = (self.max_num_seqs + 1, vocab)
        room = torch.zeros(shape, dtype=torch.int32, device=self.history.device)
        self._room_for_counts = room

    def enter(self, new_rows: Sequence[NewRow]) -> None:
        """Take sequences into their rows.

        Raises:
            RequestError: more stop ids or biases than a row holds, before anything is written.
        """
        if not new_rows:
            return
        self._check_widths(new_rows)
        numbers = np.array([new.row for new in new_rows], np.int32)
        columns = np.zeros((len(COLUMNS), len(new_rows)), np.int32)
        stop_ids = np.full((len(new_rows), self.stop_ids.shape[1]), -1, np.int32)
        bias_ids = np.full((len(new_rows), self.bias_ids.shape[1]), -1, np.int32)
        bias_values = np.zeros(bias_ids.shape, np.float32)
        blocks = np.zeros((len(new_rows), self.block_table.shape[1]), np.int32)
        for i, new in enumerate(new_rows):
            columns[:, i] = self._columns_of(new)
            stop_ids[i, : len(new.stop_token_ids)] = new.stop_token_ids
            biases = sorted((new.sampling.logit_bias or {}).items())
            bias_ids[i, : len(biases)] = [token for token, _ in biases]
            bias_values[i, : len(biases)] = [value for _, value in biases]
            blocks[i, : len(new.block_ids)] = new.block_ids
            self._upload_history(new.row, new.token_ids)
        index = self._to_device(numbers).long()
        self.columns.index_copy_(1, index, self._to_device(columns))
        self.stop_ids.index_copy_(0, index, self._to_device(stop_ids))
        if any(new.sampling.logit_bias for new in new_rows):
            self.bias_ids.index_copy_(0, index, self._to_device(bias_ids))
            self.bias_values.index_copy_(0, index, self._to_device(bias_values))
        self.block_table.index_copy_(0, index, self._to_device(blocks))
        counted = numbers[columns[COLUMNS.index("flags")] & COUNTED != 0]
        self._set_counted(self._counted.difference(numbers.tolist()).union(counted.tolist()))
        if len(counted):
            count_tokens(self._to_device(counted), self)

    def deactivate(self, rows: Sequence[int]) -> None:
        """Rows whose sequence left: they commit nothing from the next step on."""
        if rows:
            index = self._to_device(np.array(rows, np.int64))
            self.column("active").index_fill_(0, index, 0)
            self._set_counted(self._counted.difference(rows))

    def _set_counted(self, rows: set[int]) -> None:
        self._counted = rows
        self.counts = self._room_for_counts if rows else None

    def set_blocks(self, rows: Int32Array, indices: Int32Array, ids: Int32Array) -> None:
        """``block_table[row, index] = id`` for each of three arrays [N]."""
        if len(rows):
            where = self._to_device(np.stack((rows, indices)).astype(np.int64))
            self.block_table.index_put_((where[0], where[1]), self._to_device(ids.astype(np.int32)))

    def _columns_of(self, new: NewRow) -> Int32Array:
        """One row's entry of every column, floats as their bits."""
        one = self._sampling
        # A grammar sees to min_tokens itself: it knows where nothing but an end may follow.
        forbidden = () if new.grammar is not None else new.stop_token_ids
        one.set_row(0, new.sampling, new.prompt_len, new.seed, new.sample_index, forbidden)
        key = int(one.row_keys[0])
        # By torch's logarithm, as the thresholds of ``sample/truncation.py``.
        log_min_p = torch.tensor(one.min_p[0]).log().item()
        integers = {
            "num_tokens": len(new.token_ids),
            "active": 1,
            "prompt_len": new.prompt_len,
            "max_total": new.max_total_tokens,
            "min_tokens": min(int(one.min_tokens[0]), _INT32_MAX),
            "flags": int(one.flags[0]),
            "key_low": _signed(key),
            "key_high": _signed(key >> 32),
            "top_k": min(int(one.top_k[0]), _INT32_MAX),
        }
        floats = {
            "temperature": one.temperature[0],
            "top_p": one.top_p[0],
            "log_min_p": log_min_p,
            "repetition_penalty": one.repetition_penalty[0],
            "presence_penalty": one.presence_penalty[0],
            "frequency_penalty": one.frequency_penalty[0],
        }
        bits = {name: int(np.float32(x).view(np.int32)) for name, x in floats.items()}
        return np.array([(integers | bits)[name] for name in COLUMNS], np.int32)

    def _check_widths(self, new_rows: Sequence[NewRow]) -> None:
        for new in new_rows:
            _check_width("stop token ids", len(new.stop_token_ids), self.stop_ids.shape[1])
            _check_width("logit_bias entries", len(new.sampling.logit_bias or {}), self.max_biases)

    @property
    def max_biases(self) -> int:
        """Most ``logit_bias`` entries a row holds."""
        return self.bias_ids.shape[1]

    def _upload_history(self, row: int, token_ids: Int32Array) -> None:
        self.history[row, : len(token_ids)].copy_(self._to_device(token_ids.astype(np.int32)))

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return upload(values, self.history.device)


def _signed(bits: int) -> int:
    """The low 32 bits as an int32."""
    low = bits & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low


def _power_of_two(count: int) -> int:
    """The least power of two that is not below; kernels read whole lists."""
    return 1 << max(count - 1, 0).bit_length()


def _check_width(what: str, count: int, most: int) -> None:
    if count > most:
        raise RequestError(
            f"a request has {count} {what}, but a row on the device holds {most}. hint: give fewer"
        )
