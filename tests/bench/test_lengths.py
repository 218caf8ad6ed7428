"""Lengths as text, drawn by seed."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.bench.lengths import parse_lengths
from paceline.errors import ConfigError


def draw(text: str, count: int = 400) -> np.ndarray:
    return parse_lengths(text).draw(np.random.default_rng(0), count)


def test_one_length() -> None:
    assert set(draw("128").tolist()) == {128}


def test_a_range_holds_both_ends() -> None:
    assert set(draw("32-36").tolist()) == {32, 33, 34, 35, 36}


def test_normal_is_clipped_at_one() -> None:
    lengths = draw("normal:4,5", 4000)
    assert lengths.min() == 1
    assert np.median(lengths) == 4
    assert set(draw("normal:7,0").tolist()) == {7}


def test_shares_of_a_mix_are_met_in_random_order() -> None:
    lengths = draw("mix:0.75=32-64,0.25=512", 100)
    assert (lengths == 512).sum() == 25
    assert ((lengths >= 32) & (lengths <= 64)).sum() == 75
    assert set(lengths[:40].tolist()) & {512}
    assert sorted(draw("mix:0.5=1,0.5=2", 3).tolist()) in ([1, 1, 2], [1, 2, 2])


def test_the_seed_decides() -> None:
    spec = parse_lengths("mix:0.5=1-100,0.5=200-300")
    first, again, other = (spec.draw(np.random.default_rng(s), 50).tolist() for s in (1, 1, 2))
    assert first == again != other


def test_the_longest_lengths_can_be_drawn() -> None:
    assert draw("1-1000000000", 4).max() > 10**6
    assert draw("normal:1000000000,1000000000", 4).min() >= 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0", "must run from 1"),
        ("64-32", "must run from 1"),
        ("many", "`many` is neither a number nor a range"),
        ("-5", "neither a number nor a range"),
        ("poisson:3", "there is no distribution `poisson`"),
        ("99999999999999999999", "99999999999999999999 is more than 1000000000 tokens"),
        ("1-" + "9" * 5000, "is more than 1000000000 tokens"),
        ("normal:100", "not a mean and a standard deviation"),
        ("normal:0,1", "the mean must be at least 1, got 0"),
        ("normal:inf,1", "not a mean and a standard deviation"),
        ("normal:1,1e30", "`1,1e30` is not a mean and a standard deviation"),
        ("normal:1,9999999999", "9999999999 is more than 1000000000 tokens"),
        ("１２", "`１２` is neither a number nor a range"),  # full-width digits
        ("normal:１,2", "not a mean and a standard deviation"),
        ("mix:1=１", "`１` is neither a number nor a range"),
        ("mix:0.75=32,0.5=64", "sum to 1, not to 1.25"),
        ("mix:1=32,0=64", "must be above 0"),
        ("mix:1.5=32,-0.5=64", "`-0.5=64` is not of the form SHARE=LENGTHS"),
        ("mix:32,64", "`32` is not of the form"),
        ("mix:1=normal", "`normal` is neither"),
    ],
)
def test_other_forms_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match="hint: write 128, 32-64") as caught:
        parse_lengths(text)
    assert says in str(caught.value)
