# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Logits processing of ``sample/processing.py`` inside kernels, as the logits are read.

The logits in memory are never changed: whoever reads them later, for log-probabilities, finds what
the model gave. A feature costs the rows that are flagged for it, and no others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.sample import rows as row_flags
from paceline.sample.triton.row_tensors import (
    FREQUENCY,
    IN_PROMPT,
    MIN_TOKENS,
    NUM_TOKENS,
    PRESENCE,
    PROMPT_LEN,
    REPETITION,
    column_of,
    float_column_of,
)

SAMPLED = tl.constexpr(row_flags.SAMPLED)
TRUNCATED = tl.constexpr(row_flags.TRUNCATED)
_COUNTED = tl.constexpr(row_flags.COUNTED)
_BIASED = tl.constexpr(row_flags.BIASED)
_MIN_TOKENS = tl.constexpr(row_flags.MIN_TOKENS)
_PROCESSED = tl.constexpr(row_flags.PROCESSED)


# Two tuples travel through the kernels. ``place`` says which position of which row is sampled:
#   (entry, row, flags, position, limit): entry of the batch; position of the token to be sampled;
#   ids from ``limit`` on are impossible.
# ``state`` is the rows' tensors and their widths, as ``sampler.py`` passes them:
#   (columns, column_stride, history, history_stride, stop_ids, bias_ids, bias_values, counts,
#   counts_width, allowed, allowed_stride).
# STOPS and BIASES are the widths of stop_ids and bias_ids, powers of two.


@triton.jit
def _forbid_stops(value, ids, row, stop_ids, STOPS: tl.constexpr):
    source = stop_ids + row.to(tl.int64) * STOPS
    known = tl.load(source + tl.arange(0, STOPS)) >= 0
    for i in range(tl.sum(known.to(tl.int32), 0)):
        value = tl.where(ids == tl.load(source + i), float("-inf"), value)
    return value


@triton.jit
def _add_bias(value, ids, start, end, row, bias_ids, bias_values, BIASES: tl.constexpr):
    """Biases of ids in [start, end); a row's bias ids ascend, so these stand together."""
    base = row.to(tl.int64) * BIASES
    known = tl.load(bias_ids + base + tl.arange(0, BIASES))
    first = tl.sum(((known >= 0) & (known < start)).to(tl.int32), 0)
    count = tl.sum(((known >= start) & (known < end)).to(tl.int32), 0)
    for i in range(first, first + count):
        added = value + tl.load(bias_values + base + i)
        value = tl.where(ids == tl.load(bias_ids + base + i), added, value)
    return value


@triton.jit
def _penalise(value, ids, place, state):
    """Repetition, frequency and presence; the context of a position is ``history[row, :position]``.

    ``counts`` knows the committed tokens. Drafts before the position are added; committed tokens
    behind it are taken away (a drafter's first forward samples at the last one again).
    """
    _, row, _, position, limit = place
    columns, stride, history, history_stride, _, _, _, counts, counts_width, _, _ = state
    word = tl.load(
        counts + row.to(tl.int64) * counts_width + ids,
        mask=ids < tl.minimum(limit, counts_width),
        other=0,
    )
    count = word & (IN_PROMPT - 1)
    tokens = history + row.to(tl.int64) * history_stride
    committed = column_of(columns, stride, row, NUM_TOKENS)
    for at in range(committed, position):
        count += (ids == tl.load(tokens + at)).to(tl.int32)
    for at in range(tl.maximum(position, column_of(columns, stride, row, PROMPT_LEN)), committed):
        count -= (ids == tl.load(tokens + at)).to(tl.int32)
    repetition = float_column_of(columns, stride, row, REPETITION)
    penalised = tl.where(value > 0, tl.math.div_rn(value, repetition), value * repetition)
    value = tl.where((count > 0) | (word >= IN_PROMPT), penalised, value)
    value -= float_column_of(columns, stride, row, FREQUENCY) * count.to(tl.float32)
    present = (count > 0).to(tl.float32)
    return value - float_column_of(columns, stride, row, PRESENCE) * present


@triton.jit
def processed(value, ids, start, end, place, state, STOPS: tl.constexpr, BIASES: tl.constexpr):
    """Logits ``value`` of token ids in [start, end) after every step before temperature."""
    entry, row, flags, position, limit = place
    columns, stride, _, _, stop_ids, bias_ids, bias_values, counts, _, allowed, allowed_stride = (
        state
    )
    value = tl.where(ids < limit, value, float("-inf"))
    if allowed is not None:
        words = allowed + tl.cast(entry, tl.int64) * allowed_stride + ids // 32
        bits = tl.load(words, mask=ids < limit, other=0)
        value = tl.where((bits >> (ids % 32)) & 1 != 0, value, float("-inf"))
    if flags & _PROCESSED != 0:
        if flags & _MIN_TOKENS != 0:
            length = position - column_of(columns, stride, row, PROMPT_LEN)
            if length < column_of(columns, stride, row, MIN_TOKENS):
                value = _forbid_stops(value, ids, row, stop_ids, STOPS)
        if flags & _BIASED != 0:
            value = _add_bias(value, ids, start, end, row, bias_ids, bias_values, BIASES)
        if counts is not None:  # noqa: SIM102 (known when the kernel is compiled, the next is not)
            if flags & _COUNTED != 0:
                value = _penalise(value, ids, place, state)
    return value
