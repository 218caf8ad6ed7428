# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""What the sampling kernels read of each row, as tensors on the device.

One-number-a-row state lies in ``columns``, a column a number, so that kernels take one pointer for
all of it and a row enters by one copy. Floats are kept as their bits. This file must not know who
fills the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

COLUMNS = (
    "num_tokens",  # committed tokens
    "active",  # 0 or 1: rows that are not active are computed for nothing and commit nothing
    "prompt_len",
    "max_total",  # prompt and output may not exceed this
    "min_tokens",  # stop ids are forbidden while the output is shorter
    "flags",  # bits as in sample/rows.py
    "key_low",  # halves of the row's noise key
    "key_high",
    "temperature",
    "top_k",  # 0 is off
    "top_p",  # 1 is off
    "log_min_p",  # -inf is off
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_FLOATS = frozenset(COLUMNS[8:]) - {"top_k"}

NUM_TOKENS = tl.constexpr(COLUMNS.index("num_tokens"))
ACTIVE = tl.constexpr(COLUMNS.index("active"))
PROMPT_LEN = tl.constexpr(COLUMNS.index("prompt_len"))
MAX_TOTAL = tl.constexpr(COLUMNS.index("max_total"))
MIN_TOKENS = tl.constexpr(COLUMNS.index("min_tokens"))
FLAGS = tl.constexpr(COLUMNS.index("flags"))
KEY_LOW = tl.constexpr(COLUMNS.index("key_low"))
KEY_HIGH = tl.constexpr(COLUMNS.index("key_high"))
TEMPERATURE = tl.constexpr(COLUMNS.index("temperature"))
TOP_K = tl.constexpr(COLUMNS.index("top_k"))
TOP_P = tl.constexpr(COLUMNS.index("top_p"))
LOG_MIN_P = tl.constexpr(COLUMNS.index("log_min_p"))
REPETITION = tl.constexpr(COLUMNS.index("repetition_penalty"))
PRESENCE = tl.constexpr(COLUMNS.index("presence_penalty"))
FREQUENCY = tl.constexpr(COLUMNS.index("frequency_penalty"))

# A word of ``counts``: occurrences in the output, and this bit if the id occurs in the prompt.
IN_PROMPT = tl.constexpr(1 << 30)


@dataclass(slots=True)
class RowTensors:
    """State of R rows and of the null row, number R, that pads batches and is never active.

    columns: [len(COLUMNS), stride >= R + 1] int32. history: [R + 1, L] int32 token ids: prompt,
    output, and behind the committed length the drafts under verification. stop_ids: [R + 1, S]
    int32, padded with -1. bias_ids: [R + 1, B] int32, ascending, padded with -1; bias_values:
    [R + 1, B] float32. S and B are powers of two. counts: [R + 1, V] int32, see ``IN_PROMPT``, or
    None while no row has penalties.
    """

    columns: torch.Tensor
    history: torch.Tensor
    stop_ids: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    counts: torch.Tensor | None

    def column(self, name: str) -> torch.Tensor:
        """[R + 1] view of one column, int32 or float32."""
        values = self.columns[COLUMNS.index(name), : self.history.shape[0]]
        return values.view(torch.float32) if name in _FLOATS else values


@triton.jit
def column_of(columns, stride, row, COLUMN: tl.constexpr):
    """An integer of a row."""
    return tl.load(columns + COLUMN * stride + row)


@triton.jit
def float_column_of(columns, stride, row, COLUMN: tl.constexpr):
    """A float32 of a row."""
    return tl.load(columns + COLUMN * stride + row).to(tl.float32, bitcast=True)
