# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Thresholds of top_k, top_p and min_p as ``sample/truncation.py`` defines them, without a sort.

One program does an entry: a pass for the largest value, a pass that lists the values which may
matter (a lower bound on the threshold comes out of the first pass), then a binary search in the
lists. Each lane lists what it saw itself, so nothing is shared on the way; if there are few values,
as a rule, they are then put together and held in registers while the search goes on. Its bounds
always are values that occur, so it ends after about log2 of their number, however logits are
rounded. Where no bound can be had (a very large top_k, or top_p over a flat distribution) the lists
are long, and the search slower but no less exact. Masses are float32 sums of a lane's few values,
and float64 sums of lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.sample.triton.processing import TRUNCATED, processed
from paceline.sample.triton.row_tensors import (
    ACTIVE,
    FLAGS,
    LOG_MIN_P,
    NUM_TOKENS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    column_of,
    float_column_of,
)

_BOUND_STEPS = tl.constexpr(12)
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _bound(peaks, largest, top_k, top_p, log_min_p, vocab, TILE: tl.constexpr):
    """A value that the threshold is not below; -inf if none is known.

    peaks: [TILE] largest value of each lane, each over other tokens: the k-th largest of them is at
    most the k-th largest of all. Tokens below (1 - p) / n of the mass have less than 1 - p of it
    together, so top_p's threshold is not among them; 0.99 leaves room for rounding.
    """
    bound = largest + log_min_p
    if (top_k > 0) & (top_k <= TILE // 4):
        low = tl.min(tl.where(peaks > float("-inf"), peaks, largest), 0)
        if tl.sum((peaks >= low).to(tl.int32), 0) >= top_k:
            high = largest
            for _ in range(_BOUND_STEPS):
                middle = low * 0.5 + high * 0.5
                enough = tl.sum((peaks >= middle).to(tl.int32), 0) >= top_k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
            bound = tl.maximum(bound, low)
    if (top_k == 0) & (log_min_p == float("-inf")) & (top_p < 1.0):
        mass = tl.sum(tl.exp(peaks - largest), 0)  # some of it
        bound = tl.maximum(bound, largest + tl.log(0.99 * (1.0 - top_p) * mass / vocab))
    return bound


@triton.jit
def _split(value, pivot, largest, INCLUSIVE: tl.constexpr, BY_MASS: tl.constexpr):
    """Of each value: what it adds to the amount above the pivot, itself if above, if not above."""
    above = (value >= pivot) & (value > float("-inf")) if INCLUSIVE else value > pivot
    amount = tl.where(above, tl.exp(value - largest) if BY_MASS else 1.0, 0.0)
    return (
        amount,
        tl.where(above, value, float("inf")),
        tl.where(above, float("-inf"), value),
    )


@triton.jit
def _scan(
    few,
    lists,
    sizes,
    depth,
    pivot,
    largest,
    INCLUSIVE: tl.constexpr,
    BY_MASS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of listed values above the pivot: count or mass, and the least; the largest of the others.

    few: all the values in registers, with -inf beyond them, or None: then they are in lists [depth,
    TILE], of which lane i has sizes[i]. INCLUSIVE counts the pivot itself as above. Mass is in
    units of the largest value's.
    """
    if few is not None:
        amount, least, below = _split(few, pivot, largest, INCLUSIVE, BY_MASS)
    else:
        lanes = tl.arange(0, TILE)
        amount = tl.zeros([TILE], tl.float32)
        least = tl.full([TILE], float("inf"), tl.float32)
        below = tl.full([TILE], float("-inf"), tl.float32)
        for i in range(depth):
            value = tl.load(lists + i * TILE + lanes, mask=i < sizes, other=float("-inf"))
            more, above, rest = _split(value, pivot, largest, INCLUSIVE, BY_MASS)
            amount += more
            least = tl.minimum(least, above)
            below = tl.maximum(below, rest)
    return tl.sum(amount.to(tl.float64), 0), tl.min(least, 0), tl.max(below, 0)


@triton.jit
def _search(
    few, lists, sizes, depth, low, largest, need, BY_MASS: tl.constexpr, TILE: tl.constexpr
):
    """Smallest of the listed values, from ``low`` on, above which there is less than ``need``.

    low: one of the values, not above the answer. need: a count, or with BY_MASS a mass.
    """
    high = largest
    while low < high:
        # Inside [low, high): each turn removes at least one value from one end.
        pivot = tl.maximum(low * 0.5 + high * 0.5, low)
        pivot = tl.where(pivot < high, pivot, low)
        amount, least, below = _scan(few, lists, sizes, depth, pivot, largest, False, BY_MASS, TILE)
        reached = amount >= need
        low = tl.where(reached, least, low)
        high = tl.where(reached, high, tl.maximum(below, low))
    return low


@triton.jit
def _threshold_of_values(
    few, lists, sizes, depth, largest, total, top_k, top_p, log_min_p, TILE: tl.constexpr
):
    """The threshold; total: mass of all tokens."""
    floor = largest + log_min_p
    if top_k > 0:
        need = top_k.to(tl.float64)
        _, least, _ = _scan(few, lists, sizes, depth, float("-inf"), largest, False, False, TILE)
        kth = _search(few, lists, sizes, depth, least, largest, need, False, TILE)
        floor = tl.maximum(floor, kth)
    threshold = floor
    if top_p < 1.0:
        mass, least, _ = _scan(few, lists, sizes, depth, floor, largest, True, True, TILE)
        # Without a floor, what is not listed counts too.
        mass = tl.where(floor > float("-inf"), mass, total)
        need = top_p.to(tl.float64) * mass
        threshold = _search(few, lists, sizes, depth, least, largest, need, True, TILE)
    return threshold


@triton.jit
def _gather(lists, sizes, depth, count, together, TILE: tl.constexpr, FEW: tl.constexpr):
    """The listed values in registers [FEW], -inf beyond; ``together``: room to bring them there."""
    lanes = tl.arange(0, TILE)
    first = tl.cumsum(sizes, 0) - sizes
    for i in range(depth):
        value = tl.load(lists + i * TILE + lanes, mask=i < sizes, other=0.0)
        tl.store(together + first + i, value, mask=i < sizes)
    tl.debug_barrier()  # other threads wrote them
    places = tl.arange(0, FEW)
    return tl.load(together + places, mask=places < count, other=float("-inf"))


@triton.jit
def _divide(lists, sizes, depth, temperature, TILE: tl.constexpr):
    """Listed logits over temperature, in place."""
    lanes = tl.arange(0, TILE)
    for i in range(depth):
        value = tl.load(lists + i * TILE + lanes, mask=i < sizes, other=0.0)
        value = tl.math.div_rn(value, temperature)
        tl.store(lists + i * TILE + lanes, value, mask=i < sizes)
    tl.debug_barrier()  # whichever threads will read them


@triton.jit
def _logits(
    source,
    ids,
    start,
    vocab,
    place,
    state,
    STOPS: tl.constexpr,
    BIASES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Processed logits of ids in [start, start + TILE); -inf from vocab on."""
    value = tl.load(source + ids, mask=ids < vocab, other=float("-inf"))
    return processed(value, ids, start, start + TILE, place, state, STOPS, BIASES)


@triton.jit
def _make_lists(
    source,
    vocab,
    lists,
    bound,
    highest,
    temperature,
    place,
    state,
    STOPS: tl.constexpr,
    BIASES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write all logits that may be ``bound`` or more over temperature to ``lists``; -inf never.

    highest: the largest logit. Returns how many each lane wrote, and the mass of all tokens.
    """
    lanes = tl.arange(0, TILE)
    mass = tl.zeros([TILE], tl.float32)
    sizes = tl.zeros([TILE], tl.int32)
    least = bound * temperature
    least = tl.maximum(least - tl.abs(least) * 2.0**-20, _LOWEST)  # room for rounding; never -inf
    inverse = 1.0 / temperature
    for start in range(0, vocab, TILE):
        ids = start + lanes
        value = _logits(source, ids, start, vocab, place, state, STOPS, BIASES, TILE)
        mass += tl.exp((value - highest) * inverse)
        keep = value >= least
        tl.store(lists + sizes * TILE + lanes, value, mask=keep)
        sizes += keep.to(tl.int32)
    tl.debug_barrier()  # whichever threads will read a lane's list
    return sizes, tl.sum(mass.to(tl.float64), 0)


@triton.jit
def _threshold(
    source,
    vocab,
    lists,
    place,
    state,
    STOPS: tl.constexpr,
    BIASES: tl.constexpr,
    TILE: tl.constexpr,
    FEW: tl.constexpr,
):
    """The threshold of one entry; ``lists``: room for its values."""
    row = place[1]
    columns, stride = state[0], state[1]
    temperature = float_column_of(columns, stride, row, TEMPERATURE)
    top_k = column_of(columns, stride, row, TOP_K)
    top_p = float_column_of(columns, stride, row, TOP_P)
    log_min_p = float_column_of(columns, stride, row, LOG_MIN_P)
    lanes = tl.arange(0, TILE)
    peaks = tl.full([TILE], float("-inf"), tl.float32)
    for start in range(0, vocab, TILE):
        ids = start + lanes
        value = _logits(source, ids, start, vocab, place, state, STOPS, BIASES, TILE)
        peaks = tl.maximum(peaks, value)
    highest = tl.max(peaks, 0)
    # Division keeps the order, so the peaks alone need it; it costs more than all else in a pass.
    peaks = tl.math.div_rn(peaks, temperature)
    largest = tl.max(peaks, 0)
    threshold = largest + log_min_p
    finite = (largest > float("-inf")) & (largest < float("inf"))
    if finite & ((top_k > 0) | (top_p < 1.0)):
        bound = _bound(peaks, largest, top_k, top_p, log_min_p, vocab, TILE)
        sizes, total = _make_lists(
            source, vocab, lists, bound, highest, temperature, place, state, STOPS, BIASES, TILE
        )
        depth, count = tl.max(sizes, 0), tl.sum(sizes, 0)
        if count <= FEW:
            together = lists + tl.cdiv(vocab, TILE) * TILE
            few = _gather(lists, sizes, depth, count, together, TILE, FEW)
            few = tl.math.div_rn(few, temperature)
            threshold = _threshold_of_values(
                few, lists, sizes, depth, largest, total, top_k, top_p, log_min_p, TILE
            )
        else:
            _divide(lists, sizes, depth, temperature, TILE)
            threshold = _threshold_of_values(
                None, lists, sizes, depth, largest, total, top_k, top_p, log_min_p, TILE
            )
        tl.debug_barrier()  # the next entry's lists take the place of these
    return threshold


@triton.jit(do_not_specialize=["num_entries", "offset", "limit"])
def threshold_kernel(
    logits,
    logits_stride,
    vocab,
    limit,
    num_entries,
    offset,
    thresholds,
    lists,
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
    ENTRIES: tl.constexpr,
    TILE: tl.constexpr,
    FEW: tl.constexpr,
):
    """Smallest logit / temperature kept at each entry of a truncated row: thresholds [M].

    Programs share the entries among them, at most ENTRIES each. ``lists`` has room for
    [ceil(vocab / TILE), TILE] and FEW values a program. Entries of other rows are left alone.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    entries = program + num_programs * tl.arange(0, ENTRIES)
    inside = entries < num_entries
    its_rows = tl.load(rows + entries // QUERY_LEN, mask=inside, other=0)
    its_flags = tl.load(columns + FLAGS * column_stride + its_rows, mask=inside, other=0)
    if tl.max(its_flags & TRUNCATED, 0) == 0:
        return
    for entry in range(program, num_entries, num_programs):
        row = tl.load(rows + entry // QUERY_LEN)
        flags = column_of(columns, column_stride, row, FLAGS)
        active = column_of(columns, column_stride, row, ACTIVE)
        if (flags & TRUNCATED != 0) & (active != 0):
            position = column_of(columns, column_stride, row, NUM_TOKENS)
            position += offset + entry % QUERY_LEN + 1
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
            source = logits + tl.cast(entry, tl.int64) * logits_stride
            room = tl.cdiv(vocab, TILE) * TILE + FEW
            mine = lists + program.to(tl.int64) * room
            threshold = _threshold(source, vocab, mine, place, state, STOPS, BIASES, TILE, FEW)
            tl.store(thresholds + entry, threshold)
