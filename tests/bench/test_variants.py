"""Variants as a product, and what makes no sense."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.bench.variants import Comparison, make_comparison
from paceline.errors import ConfigError

PAIR = {"model": "m", "speculative_model": "d"}


def compare(
    common: dict[str, Any],
    sides: dict[str, dict[str, Any]] | None = None,
    batchings: list[str] | None = None,
    ks: list[int] | None = None,
) -> Comparison:
    return make_comparison(common, sides or {}, batchings or [], ks or [])


def test_nothing_to_compare_is_one_engine_that_decides_itself() -> None:
    comparison = compare({**PAIR, "num_speculative_tokens": 4})
    assert [(v.name, v.engine, v.k) for v in comparison.variants] == [("engine", 0, None)]
    (engine,) = comparison.engines
    assert engine.max_k is None
    assert engine.arguments["num_speculative_tokens"] == 4


def test_draft_lengths_share_an_engine() -> None:
    comparison = compare(PAIR, ks=[0, 5, 3])
    assert [(v.name, v.engine, v.k) for v in comparison.variants] == [
        ("k=0", 0, 0),
        ("k=5", 0, 5),
        ("k=3", 0, 3),
    ]
    assert comparison.engines[0].max_k == 5
    assert comparison.engines[0].arguments["num_speculative_tokens"] == 5


def test_off_alone_still_loads_the_drafter() -> None:
    (engine,) = compare(PAIR, ks=[0]).engines
    assert (engine.max_k, engine.arguments["num_speculative_tokens"]) == (0, 1)
    (engine,) = compare({"model": "m"}, ks=[0]).engines
    assert (engine.max_k, engine.arguments) == (0, {"model": "m"})


def test_the_product_of_everything() -> None:
    sides = {"a": {}, "b": {"block_size": 32}}
    comparison = compare({**PAIR, "block_size": 8}, sides, ["static", "continuous"], [0, 2])
    assert [v.name for v in comparison.variants] == [
        f"{side} {batching} k={k}"
        for side in "ab"
        for batching in ("static", "continuous")
        for k in (0, 2)
    ]
    assert [v.engine for v in comparison.variants] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [(e.arguments["block_size"], e.arguments["batching"]) for e in comparison.engines] == [
        (8, "static"),
        (8, "continuous"),
        (32, "static"),
        (32, "continuous"),
    ]


def test_a_side_can_drop_the_drafter() -> None:
    sides = {"a": {"speculative_model": None, "num_speculative_tokens": None}, "b": {}}
    comparison = compare({**PAIR, "num_speculative_tokens": 3}, sides)
    assert comparison.engines[0].arguments["speculative_model"] is None
    assert comparison.engines[1].arguments["speculative_model"] == "d"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ({"model": "m"}, {}, [], [0, 3]),
            "draft length k = 3 without a drafter. hint: name one with --speculative-model",
        ),
        (
            (PAIR, {"a": {}, "b": {"speculative_model": None}}, [], [3]),
            "without a drafter in variant b",
        ),
        ((PAIR, {}, [], [3, 3]), "`--k` names 3 twice"),
        ((PAIR, {}, ["static", "static"], []), "`--batching` names static twice"),
        (
            ({**PAIR, "num_speculative_tokens": 5}, {}, [], [3]),
            "`num_speculative_tokens=5` is set by an engine argument, and --k",
        ),
        (
            (PAIR, {"a": {"speculative_disable_by_batch_size": 4}, "b": {}}, [], [3]),
            "`speculative_disable_by_batch_size=4`",
        ),
        (
            (PAIR, {"a": {}, "b": {"batching": "static"}}, ["static", "continuous"], []),
            "`batching='static'` is set by --b, and --batching",
        ),
        (
            (PAIR, {"a": {"block_sise": 3}, "b": {}}, [], []),
            "unknown engine argument `block_sise`. hint: did you mean `block_size`",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_comparison(*arguments)
    assert says in str(caught.value)


def test_an_empty_batching_is_refused() -> None:
    with pytest.raises(ConfigError, match="`--batching` has an empty entry"):
        make_comparison({"model": "m"}, {}, ["static", ""], [])
