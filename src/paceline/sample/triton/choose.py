# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Gumbel-max choice on the device: the vocabulary of each entry is shared among programs.

``part_kernel`` finds the best token of a part of an entry's vocabulary, ``choose_kernel`` the best
of the parts. Greedy rows compare logits. For sampled rows a part is searched with noise from the
card's own logarithm; the one token that can be the best by then (rarely are there more) gets its
score by the exact formula. So the ids are those of ``choose_full``, at the cost of the rough
formula. Ties go to the lowest id throughout.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.sample.triton.noise import ROUGH_ERROR, noise_halves, noise_of, rough_noise_of
from paceline.sample.triton.processing import SAMPLED, TRUNCATED, processed
from paceline.sample.triton.row_tensors import (
    ACTIVE,
    FLAGS,
    NUM_TOKENS,
    PROMPT_LEN,
    TEMPERATURE,
    column_of,
    float_column_of,
)

# What ``part_kernel`` says of the raw logits it saw.
_NAN_OR_INF = tl.constexpr(1)
_ABOVE_MINUS_INF = tl.constexpr(2)
_NO_ID = tl.constexpr(2147483647)


@triton.jit
def _search_part(
    source,
    first,
    end,
    sampled,
    truncated,
    threshold,
    temperature,
    low,
    high,
    place,
    state,
    STOPS: tl.constexpr,
    BIASES: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Each lane's largest raw logit (NaN if there is one), best score, its id, and second best.

    Scores of sampled rows are rough. [BLOCK] each, over tokens [first, end).
    """
    lanes = tl.arange(0, BLOCK)
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    second = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = first + lanes
    inverse = 1.0 / temperature
    for start in range(first, end, BLOCK):
        ids = start + lanes
        raw = tl.load(source + ids, mask=ids < end, other=float("-inf"))
        peak = tl.maximum(peak, raw, propagate_nan=tl.PropagateNan.ALL)
        score = processed(raw, ids, start, start + BLOCK, place, state, STOPS, BIASES)
        if sampled:
            if truncated:
                scaled = tl.math.div_rn(score, temperature)
                scaled = tl.where(scaled >= threshold, scaled, float("-inf"))
            else:
                scaled = score * inverse
            score = scaled + rough_noise_of(low, high, ids, INTERPRETED)
        better = score > best
        second = tl.maximum(second, tl.minimum(score, best))
        best_id = tl.where(better, ids, best_id)
        best = tl.where(better, score, best)
    return peak, best, best_id, second


@triton.jit
def _exact_best(
    source,
    first,
    end,
    truncated,
    threshold,
    temperature,
    low,
    high,
    place,
    state,
    STOPS: tl.constexpr,
    BIASES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Best score and its id among tokens [first, end) of a sampled row."""
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = first + lanes
    for start in range(first, end, BLOCK):
        ids = start + lanes
        score = tl.load(source + ids, mask=ids < end, other=float("-inf"))
        score = processed(score, ids, start, start + BLOCK, place, state, STOPS, BIASES)
        score = tl.math.div_rn(score, temperature)
        if truncated:
            score = tl.where(score >= threshold, score, float("-inf"))
        score += noise_of(low, high, ids)
        better = score > best
        best_id = tl.where(better, ids, best_id)
        best = tl.where(better, score, best)
    largest = tl.max(best, 0)
    return largest, tl.min(tl.where(best == largest, best_id, _NO_ID), 0)


@triton.jit(do_not_specialize=["chunk", "offset", "limit"])
def part_kernel(
    logits,
    logits_stride,
    vocab,
    limit,
    chunk,
    offset,
    thresholds,
    scores,
    ids_out,
    seen,
    rows,
    columns,
    column_stride,
    history,
    history_stride,
    stop_ids,
    bias_ids,
    bias_values,
    counts,
    counts_width,
    allowed,
    allowed_stride,
    QUERY_LEN: tl.constexpr,
    STOPS: tl.constexpr,
    BIASES: tl.constexpr,
    BLOCK: tl.constexpr,
    FINE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Best token of ``chunk`` tokens of an entry: scores, ids_out and seen [M, parts].

    thresholds: [M] of ``threshold_kernel``, or None to leave truncation out.
    """
    entry, part = tl.program_id(0), tl.program_id(1)
    slot = entry * tl.num_programs(1) + part
    row = tl.load(rows + entry // QUERY_LEN)
    first = part * chunk
    end = tl.minimum(first + chunk, vocab)
    if column_of(columns, column_stride, row, ACTIVE) == 0:
        tl.store(scores + slot, float("-inf"))
        tl.store(ids_out + slot, 0)
        tl.store(seen + slot, _ABOVE_MINUS_INF)
        return
    flags = column_of(columns, column_stride, row, FLAGS)
    position = column_of(columns, column_stride, row, NUM_TOKENS)
    position += offset + entry % QUERY_LEN + 1
    output_position = position - column_of(columns, column_stride, row, PROMPT_LEN)
    temperature = float_column_of(columns, column_stride, row, TEMPERATURE)
    low, high = noise_halves(columns, column_stride, row, output_position)
    sampled = flags & SAMPLED != 0
    truncated = False
    threshold = float("-inf")
    if thresholds is not None:
        truncated = flags & TRUNCATED != 0
        threshold = tl.load(thresholds + entry, mask=truncated, other=float("-inf"))
    place = (entry, row, flags, position, limit)
    state = (
        columns,
        column_stride,
        history,
        history_stride,
        stop_ids,
        bias_ids,
        bias_values,
        counts,
        counts_width,
        allowed,
        allowed_stride,
    )
    source = logits + entry.to(tl.int64) * logits_stride
    peak, best, best_id, second = _search_part(
        source,
        first,
        end,
        sampled,
        truncated,
        threshold,
        temperature,
        low,
        high,
        place,
        state,
        STOPS,
        BIASES,
        BLOCK,
        INTERPRETED,
    )
    largest = tl.max(best, 0)
    winner = tl.min(tl.where(best == largest, best_id, _NO_ID), 0)
    if sampled & (largest > float("-inf")):
        # Twice the error, and float32 steps of a score and of what it is the sum of.
        room = 2.0 * ROUGH_ERROR + (tl.abs(largest) + 32.0) * 2.0**-20
        rivals = (best >= largest - room).to(tl.int32) + (second >= largest - room).to(tl.int32)
        alone = tl.sum(rivals, 0) == 1
        first = tl.where(alone, winner // FINE * FINE, first)
        end = tl.where(alone, tl.minimum(first + FINE, end), end)
        largest, winner = _exact_best(
            source,
            first,
            end,
            truncated,
            threshold,
            temperature,
            low,
            high,
            place,
            state,
            STOPS,
            BIASES,
            FINE,
        )
    bad = tl.max((peak < float("inf")).to(tl.int32) ^ 1, 0)
    above = tl.max((peak > float("-inf")).to(tl.int32), 0)
    tl.store(scores + slot, largest)
    tl.store(ids_out + slot, winner)
    tl.store(seen + slot, bad * _NAN_OR_INF + above * _ABOVE_MINUS_INF)


@triton.jit(do_not_specialize=["parts", "offset"])
def choose_kernel(
    scores,
    ids,
    seen,
    out,
    status,
    rows,
    columns,
    column_stride,
    history,
    history_stride,
    parts,
    offset,
    QUERY_LEN: tl.constexpr,
    PARTS: tl.constexpr,
    TO_HISTORY: tl.constexpr,
):
    """Best of an entry's parts, to ``out`` and to the row's history if asked."""
    entry = tl.program_id(0)
    lanes = tl.arange(0, PARTS)
    inside = lanes < parts
    slots = entry * parts + lanes
    score = tl.load(scores + slots, mask=inside, other=float("-inf"))
    candidates = tl.load(ids + slots, mask=inside, other=_NO_ID)
    largest = tl.max(score, 0)
    token = tl.min(tl.where(inside & (score == largest), candidates, _NO_ID), 0)
    if out is not None:
        tl.store(out + entry, token)
    if status is not None:
        marks = tl.load(seen + slots, mask=inside, other=0)
        bad = tl.max(marks & _NAN_OR_INF, 0) != 0
        empty = tl.max(marks & _ABOVE_MINUS_INF, 0) == 0
        tl.store(status + entry, (bad | empty).to(tl.int32))
    if TO_HISTORY:
        row = tl.load(rows + entry // QUERY_LEN)
        committed = column_of(columns, column_stride, row, NUM_TOKENS)
        position = committed + offset + entry % QUERY_LEN + 1
        # A committed token is never replaced.
        draft = (position >= committed) & (column_of(columns, column_stride, row, ACTIVE) != 0)
        tl.store(history + row.to(tl.int64) * history_stride + position, token, mask=draft)
