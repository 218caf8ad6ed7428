"""The map over ids: one cycle each, and agreement at exactly the rate that was asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.arrays import Int64Array
from paceline.synth.chain import (
    count_agreeing,
    draw_cycle,
    draw_drafter_cycle,
    draw_stand_ins,
    next_ids,
)


def agreements(cycle: Int64Array, other: Int64Array) -> list[bool]:
    """In the order of ``cycle``: whether ``other`` goes on with the same id."""
    after = dict(zip(other.tolist(), np.roll(other, -1).tolist(), strict=True))
    pairs = zip(cycle.tolist(), np.roll(cycle, -1).tolist(), strict=True)
    return [after[one] == following for one, following in pairs]


@settings(max_examples=200, deadline=None)
@given(
    length=st.integers(3, 60),
    acceptance=st.floats(0, 1),
    seed=st.integers(0, 1000),
    first=st.integers(0, 5),
)
def test_the_drafter_agrees_at_exactly_the_nearest_possible_number(
    length: int, acceptance: float, seed: int, first: int
) -> None:
    rng = np.random.default_rng(seed)
    ids = np.arange(first, first + length)
    cycle = draw_cycle(ids, rng)
    other = draw_drafter_cycle(cycle, acceptance, rng)
    assert sorted(cycle) == sorted(other) == ids.tolist()
    agreeing = count_agreeing(length, acceptance)
    assert sum(agreements(cycle, other)) == agreeing
    assert abs(agreeing - acceptance * length) <= 1.5
    assert length - agreeing not in (1, 2)


def test_the_rate_is_exact_to_one_id_of_the_cycle() -> None:
    for acceptance in (0.0, 0.05, 0.3, 0.8, 0.95, 1.0):
        assert abs(count_agreeing(151_287, acceptance) / 151_287 - acceptance) <= 0.5 / 151_287


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.8, 0.95])
def test_agreements_come_without_runs(acceptance: float) -> None:
    """The share of places from which i agreements follow is a to the power of i."""
    rng = np.random.default_rng(3)
    cycle = draw_cycle(np.arange(151_287), rng)
    agree = np.array(agreements(cycle, draw_drafter_cycle(cycle, acceptance, rng)))
    so_far = np.ones(len(agree), bool)
    for i in range(1, 9):
        so_far &= np.roll(agree, 1 - i)
        share = acceptance**i
        # Windows of i overlap, so up to 2i - 1 of them are dependent.
        sigma = (share * (1 - share) * (2 * i - 1) / len(agree)) ** 0.5
        assert abs(so_far.mean() - share) < 4 * sigma, i


def test_every_id_goes_on_and_only_with_ids_of_the_cycle() -> None:
    rng = np.random.default_rng(1)
    words = np.arange(10, 40)
    cycle = draw_cycle(words, rng)
    stand_ins = draw_stand_ins(50, cycle, rng)
    following = next_ids(cycle, stand_ins)
    assert following.shape == (50,)
    assert set(following.tolist()) <= set(words.tolist())
    assert sorted(following[words]) == words.tolist()
    # One cycle through all of them.
    seen, current = [], 17
    for _ in words:
        seen.append(current)
        current = int(following[current])
    assert current == 17
    assert sorted(seen) == words.tolist()
    # An id outside goes on as its stand-in does.
    assert following[45] == following[stand_ins[45]]
