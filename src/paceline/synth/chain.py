"""Which id follows which: one cycle of the target, and a drafter's that agrees at a chosen rate.

Greedy output of a synthetic model is a walk along its cycle. A drafter's cycle is the target's cut
into pieces that are joined in another order, so the two agree at every id but the last of each
piece. Which ids these are is drawn at random: agreements at successive ids are independent but for
their fixed total. Numpy only: must not know models or files.
"""

from __future__ import annotations

import numpy as np

from paceline.arrays import Int64Array


def draw_cycle(ids: Int64Array, rng: np.random.Generator) -> Int64Array:
    """``ids`` in random order; each is followed by the next, the last by the first."""
    return rng.permutation(ids)


def count_agreeing(length: int, acceptance: float) -> int:
    """How many ids of a cycle of this length a drafter can agree at: the nearest possible number.

    A cycle cannot differ from another at one or two ids only.
    """
    differing = round((1.0 - acceptance) * length)
    if differing in (1, 2):
        differing = 0 if differing == 1 else 3
    return length - differing


def draw_drafter_cycle(
    cycle: Int64Array, acceptance: float, rng: np.random.Generator
) -> Int64Array:
    """A cycle through the same ids that goes on as ``cycle`` does at ``count_agreeing`` of them."""
    length = len(cycle)
    differing = length - count_agreeing(length, acceptance)
    if differing == 0:
        return cycle.copy()
    last_of_piece = np.sort(rng.choice(length, differing, replace=False))
    # Turned so that the last piece ends where the array does.
    turned = np.roll(cycle, length - 1 - last_of_piece[-1])
    ends = last_of_piece + length - last_of_piece[-1]
    pieces = np.split(turned, ends[:-1])
    return np.concatenate([pieces[i] for i in _order_without_neighbours(differing, rng)])


def _order_without_neighbours(count: int, rng: np.random.Generator) -> Int64Array:
    """A cyclic order of 0 ... count - 1 in which i + 1 never follows i (nor 0 the last).

    Of random orders a share of about 1/e is like that, so a few draws find one.
    """
    while True:
        order = rng.permutation(count)
        if not np.any(np.roll(order, -1) == (order + 1) % count):
            return order


def draw_stand_ins(rows: int, cycle: Int64Array, rng: np.random.Generator) -> Int64Array:
    """For each id below ``rows`` the id that it is continued as, [rows].

    An id of the cycle stands for itself; others (bytes, special tokens, padding) for one of them.
    """
    stand_ins = rng.choice(cycle, rows)
    stand_ins[cycle] = cycle
    return stand_ins


def places(cycle: Int64Array, stand_ins: Int64Array) -> Int64Array:
    """Place on the cycle of every id, [rows]; of its stand-in where it has none."""
    place = np.empty(len(stand_ins), np.int64)
    place[cycle] = np.arange(len(cycle))
    return place[stand_ins]


def next_ids(cycle: Int64Array, stand_ins: Int64Array) -> Int64Array:
    """The id that follows each id, [rows]."""
    following: Int64Array = cycle[(places(cycle, stand_ins) + 1) % len(cycle)]
    return following
