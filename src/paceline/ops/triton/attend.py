# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""The inner part of both attention kernels: a tile of queries against a range of paged keys.

The query heads that share a KV head are packed into a tile beside each other: row r of a tile is
query token r // GROUP, head r % GROUP of the group. So each key is read once for all of them.
Softmax runs along (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), in
powers of two: ``scale_log2`` is the scale times log2(e).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton
import triton.language as tl

from paceline.ops.triton.card import Card


def padded_dims(head_dim: int) -> int:
    """The width of a tile's rows: a power of two, and what a matrix product needs at least."""
    width: int = triton.next_power_of_2(head_dim)
    return max(16, width)


@dataclass(frozen=True, slots=True)
class Tile:
    """How much one program computes at a time, and with what."""

    rows: int  # query tokens times heads of a group
    keys: int
    warps: int
    stages: int  # tiles of K and V in flight

    def fit(self, head_dim: int, itemsize: int, card: Card) -> Tile:
        """This tile with fewer stages, then fewer keys, until it fits a program's memory."""
        tile = self
        while tile.shared_bytes(head_dim, itemsize, card) > card.shared_memory:
            if tile.stages > 2:
                tile = replace(tile, stages=tile.stages - 1)
            elif tile.keys > 16:
                tile = replace(tile, keys=tile.keys // 2)
            elif tile.rows > 16:
                tile = replace(tile, rows=tile.rows // 2)
            else:
                break
        return tile

    def shared_bytes(self, head_dim: int, itemsize: int, card: Card) -> int:
        """At most what the compiled kernel takes: queries, K and V in flight, weights, scratch.

        Before Hopper the stage being computed is read into registers and needs no memory. Softmax
        weights pass through memory in some layouts, not in all.
        """
        width = padded_dims(head_dim)
        buffers = self.stages if card.capability >= (9, 0) else self.stages - 1
        values = (self.rows + 2 * buffers * self.keys) * width + self.rows * self.keys
        return values * itemsize + 1024


@triton.jit
def load_queries(query, valid, offsets, dims, HEAD_DIM: tl.constexpr):
    """A tile of queries, [ROWS, DIMS]; rows that are not valid are zero."""
    inside = valid[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(query + offsets[:, None] + dims[None, :], mask=inside, other=0.0)


@triton.jit
def no_keys_yet(ROWS: tl.constexpr, DIMS: tl.constexpr):
    """What ``attend`` starts from: sums of weights, largest scores, weighted values."""
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    return tl.zeros([ROWS], tl.float32), peak, tl.zeros([ROWS, DIMS], tl.float32)


@triton.jit
def _load_tile(
    key_cache,
    value_cache,
    offsets,
    inside,
    dims,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """K and V of a tile, [KEYS, DIMS]; with MASKED, keys that are not inside are zero."""
    if MASKED:  # a value that no query may see must not be NaN: its weight is zero
        loaded = inside[:, None] & (dims < HEAD_DIM)
        key = tl.load(key_cache + offsets, mask=loaded, other=0.0)
        value = tl.load(value_cache + offsets, mask=loaded, other=0.0)
    elif DIMS == HEAD_DIM:
        key = tl.load(key_cache + offsets)
        value = tl.load(value_cache + offsets)
    else:
        key = tl.load(key_cache + offsets, mask=dims < HEAD_DIM, other=0.0)
        value = tl.load(value_cache + offsets, mask=dims < HEAD_DIM, other=0.0)
    return key, value


@triton.jit
def attend(
    total,
    peak,
    acc,
    queries,
    positions,
    key_cache,
    value_cache,
    table,
    kv_head,
    low,
    high,
    stop,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to the keys of [low, high) that lie before ``stop``, by tiles of KEYS.

    Without MASKED, every query must see every key of the range. Takes and returns the running sum
    of weights [ROWS], the largest score [ROWS] and the weighted values [ROWS, DIMS].
    """
    dims = tl.arange(0, DIMS)[None, :]
    ahead = low + tl.arange(0, KEYS)
    blocks = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < stop, other=0)
    for base in range(low, high, KEYS):
        keys = base + tl.arange(0, KEYS)
        inside = keys < stop
        slots = blocks.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
        # One tile ahead, so that K and V do not wait for it and the compiler can fetch them early.
        ahead = keys + KEYS
        blocks = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < stop, other=0)
        offsets = (slots * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims
        key, value = _load_tile(
            key_cache, value_cache, offsets, inside, dims, HEAD_DIM, DIMS, MASKED
        )
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee")  # [ROWS, KEYS] float32
        if MASKED:
            visible = inside[None, :] & (keys[None, :] <= positions[:, None])
            if WINDOW is not None:
                visible &= keys[None, :] > positions[:, None] - WINDOW
            scores = tl.where(visible, scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
        origin = highest
        if MASKED:  # a query that has seen no key yet
            origin = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores * scale_log2 - origin[:, None])
        decay = tl.exp2(peak - origin)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
        peak = highest
    return total, peak, acc


@triton.jit
def weighted_mean(total, acc):
    """The attention's result; zero for a query that saw no key."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]
