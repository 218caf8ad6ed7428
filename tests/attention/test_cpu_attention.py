"""The CPU backend against the reference, over passes of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from passes import PASSES

from paceline.attention import cpu
from paceline.attention.cpu import CpuAttention
from paceline.attention.reference import ReferenceAttention


def check(made: Any, atol: float = 2e-6) -> torch.Tensor:
    expected = made.run(ReferenceAttention())
    found = made.run(CpuAttention())
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-5)
    return found


@pytest.mark.parametrize("window", [None, 1, 5, 33, 39, 89, 1000])
@pytest.mark.parametrize("name", list(PASSES))
def test_equals_reference(random_pass: Callable[..., Any], name: str, window: int | None) -> None:
    check(random_pass(PASSES[name], window=window))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 1), (14, 2), (9, 3)])
def test_head_groups(random_pass: Callable[..., Any], heads: int, kv_heads: int) -> None:
    check(random_pass(PASSES["mixed"], heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["decode", "verify", "mixed"])
def test_half_precision(random_pass: Callable[..., Any], name: str, dtype: torch.dtype) -> None:
    check(random_pass(PASSES[name], dtype=dtype), atol=2e-2)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    spans=st.lists(st.tuples(st.integers(1, 45), st.integers(0, 80)), min_size=1, max_size=8),
    window=st.one_of(st.none(), st.integers(1, 90)),
    block_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 1000),
)
def test_random_passes(
    random_pass: Callable[..., Any],
    spans: list[tuple[int, int]],
    window: int | None,
    block_size: int,
    seed: int,
) -> None:
    check(random_pass(spans, window=window, block_size=block_size, seed=seed))


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("name", list(PASSES))
def test_small_pieces(
    random_pass: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    window: int | None,
) -> None:
    """Tiles and several batched pieces, as long contexts make them."""
    monkeypatch.setattr(cpu, "_MASK_ELEMENTS", 900)
    monkeypatch.setattr(cpu, "_GATHER_BYTES", 20_000)
    monkeypatch.setattr(cpu, "_SCRATCH_BYTES", 15_000)
    check(random_pass(PASSES[name], window=window))


def test_windows_of_several_layers_in_one_pass(random_pass: Callable[..., Any]) -> None:
    """Layers with and without a window share one prepared pass."""
    made = random_pass(PASSES["mixed"])
    backend = CpuAttention()
    backend.prepare(made.metadata)
    prepared = made.metadata.prepared
    backend.prepare = lambda metadata: None  # type: ignore[method-assign]
    for window in (None, 7, None, 7):
        made.window = window
        assert made.metadata.prepared is prepared
        found = made.run(backend)
        made.metadata.prepared = ()
        expected = made.run(ReferenceAttention())
        made.metadata.prepared = prepared
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    assert len(prepared) == 2


def test_padded_drafts_do_not_read_stale_memory(random_pass: Callable[..., Any]) -> None:
    """Rows with fewer drafts than the others send the rest to the null block.

    Nothing was written at those positions, so what lies there (NaN) must not reach the real ones.
    """
    made = random_pass([(5, 8), (5, 3), (5, 21)])
    expected = made.run(ReferenceAttention())
    slots = made.metadata.slot_mapping.view(3, 5)
    for row, real in enumerate((2, 5, 1)):
        slots[row, real:] = 0
    found = made.run(CpuAttention())
    for row, real in enumerate((2, 5, 1)):
        part = slice(5 * row, 5 * row + real)
        torch.testing.assert_close(found[part], expected[part], atol=2e-6, rtol=1e-5)


def test_infinite_memory_beyond_the_end(random_pass: Callable[..., Any]) -> None:
    made = random_pass(PASSES["decode"])
    expected = made.run(ReferenceAttention())
    made.key_cache.nan_to_num_(nan=float("inf"))
    made.value_cache.nan_to_num_(nan=float("-inf"))
    torch.testing.assert_close(made.run(CpuAttention()), expected, atol=2e-6, rtol=1e-5)


def test_writes_its_slots_and_no_others(random_pass: Callable[..., Any]) -> None:
    made = random_pass(PASSES["mixed"])
    before = made.key_cache.clone()
    made.run_on(CpuAttention(), made.key_cache, made.value_cache)
    slots = made.metadata.slot_mapping
    assert torch.equal(made.key_cache.flatten(0, 1)[slots], made.key)
    assert torch.equal(made.value_cache.flatten(0, 1)[slots], made.value)
    untouched = torch.ones(before.shape[0] * before.shape[1], dtype=torch.bool)
    untouched[slots] = False
    torch.testing.assert_close(
        made.key_cache.flatten(0, 1)[untouched],
        before.flatten(0, 1)[untouched],
        equal_nan=True,
        atol=0,
        rtol=0,
    )


def test_scratch_is_safe_after_non_finite_pass(random_pass: Callable[..., Any]) -> None:
    """What one pass leaves in the reused buffer does not reach the next."""
    backend = CpuAttention()
    poisoned = random_pass(PASSES["decode"])
    poisoned.key.fill_(float("nan"))
    poisoned.run(backend)
    made = random_pass(PASSES["decode"], seed=1)
    torch.testing.assert_close(
        made.run(backend), made.run(ReferenceAttention()), atol=2e-6, rtol=1e-5
    )


def test_decode_is_one_piece(random_pass: Callable[..., Any]) -> None:
    """Equal query lengths and similar contexts cost one gather and one attention call a layer."""
    made = random_pass([(3, 40 + row) for row in range(30)])
    made.run(CpuAttention())
    (pieces,) = made.metadata.prepared.values()
    assert len(pieces) == 1
    assert isinstance(pieces[0].tokens, slice)
