"""The compiled backend against the reference, over passes of every kind, and bit against bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from passes import PASSES

from native_kernels import kernels
from paceline.attention.backend import HeadShape
from paceline.attention.cpu_native import NativeAttention
from paceline.attention.reference import ReferenceAttention


def to_pages(made: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The pass's caches as the kernels lay them out, in tensors of the same shape."""
    keys = made.key_cache.permute(0, 2, 3, 1).contiguous()  # [blocks, heads, head_dim, block_size]
    values = made.value_cache.permute(0, 2, 1, 3).contiguous()
    return keys.view_as(made.key_cache), values.view_as(made.value_cache)


def from_pages(made: Any, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
    """Caches of the kernels as [slots, heads, head_dim]."""
    blocks, block_size, heads, head_dim = made.key_cache.shape
    straight = (
        keys.view(blocks, heads, head_dim, block_size).permute(0, 3, 1, 2),
        values.view(blocks, heads, block_size, head_dim).permute(0, 2, 1, 3),
    )
    return [cache.reshape(-1, heads, head_dim) for cache in straight]


def run(made: Any) -> torch.Tensor:
    found: torch.Tensor = made.run_on(NativeAttention(kernels()), *to_pages(made))
    return found


def check(made: Any, atol: float = 3e-6) -> None:
    expected = made.run(ReferenceAttention())
    found = run(made)
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 5, 33, 39, 89, 1000])
@pytest.mark.parametrize("name", list(PASSES))
def test_equals_reference(random_pass: Callable[..., Any], name: str, window: int | None) -> None:
    check(random_pass(PASSES[name], window=window))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (7, 1)])
def test_shapes(
    random_pass: Callable[..., Any],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    made = random_pass(
        PASSES["mixed"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    check(made, atol=3e-6 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize(("heads", "kv_heads"), [(71, 1), (16, 16), (10, 2)])
def test_head_groups(random_pass: Callable[..., Any], heads: int, kv_heads: int) -> None:
    """More heads in a group than are computed at a time, one, and an odd number."""
    check(random_pass([(20, 7), (1, 60)], heads=heads, kv_heads=kv_heads))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    spans=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 80)), min_size=1, max_size=8),
    window=st.one_of(st.none(), st.integers(1, 90)),
    block_size=st.sampled_from([1, 4, 16, 24, 32, 128]),
    head_dim=st.sampled_from([2, 12, 16, 64]),
    seed=st.integers(0, 1000),
)
def test_random_passes(
    random_pass: Callable[..., Any],
    spans: list[tuple[int, int]],
    window: int | None,
    block_size: int,
    head_dim: int,
    seed: int,
) -> None:
    check(random_pass(spans, window=window, block_size=block_size, head_dim=head_dim, seed=seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("heads", "block_size", "head_dim"), [(6, 16, 64), (14, 4, 20)])
def test_same_bits_in_any_company(
    random_pass: Callable[..., Any],
    heads: int,
    block_size: int,
    head_dim: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    """A token decoded alone, verified in runs of 2 to 6, or prefilled with others around it."""
    shape = {"heads": heads, "block_size": block_size, "head_dim": head_dim, "window": window}
    made = random_pass([(150, 0), (30, 40)], dtype=dtype, **shape)
    whole = run(made)
    keys, values = to_pages(made)
    backend = NativeAttention(kernels())
    position = 0
    for length in [1, 2, 3, 4, 5, 6] * 7:
        part = slice(position, position + length)
        position += length
        metadata = replace(
            made.metadata,
            query_start_loc=torch.tensor([0, length], dtype=torch.int32),
            seq_lens=torch.tensor([position], dtype=torch.int32),
            block_table=made.metadata.block_table[:1],
            slot_mapping=made.metadata.slot_mapping[part],
            query_lens=[length],
            seq_lens_list=[position],
        )
        tokens = (made.query[part], made.key[part], made.value[part])
        alone = replace(
            made, query=tokens[0], key=tokens[1], value=tokens[2], metadata=metadata
        ).run_on(backend, keys, values)
        assert torch.equal(alone, whole[part])


@pytest.mark.parametrize("name", ["mixed", "far apart", "prefill"])
def test_same_bits_with_threads(random_pass: Callable[..., Any], name: str) -> None:
    made = random_pass(PASSES[name], heads=12, kv_heads=3, head_dim=64, block_size=16)
    one = run(made)
    torch.set_num_threads(3)
    try:
        for _ in range(5):
            assert torch.equal(run(made), one)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (12, 4), (80, 16)])
def test_norm_rotation_and_padding(
    random_pass: Callable[..., Any],
    normed: bool,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
) -> None:
    """Head norms and rotation as the unfused backends do them, K and V in the same slots."""
    made = random_pass(
        PASSES["ragged"], heads=6, kv_heads=2, head_dim=head_dim, block_size=block_size, dtype=dtype
    )
    generator = torch.Generator().manual_seed(7)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    count = made.query.shape[0]
    angles = torch.randn(count, 1, head_dim // 2, generator=generator).repeat(1, 1, 2)
    sign = torch.ones(head_dim)
    sign[: head_dim // 2] = -1
    rotary = (angles.cos().to(dtype), (angles.sin() * sign).to(dtype))
    heads = HeadShape(6, 2, head_dim, 0.3, None, noise(8, head_dim) if normed else None, 1e-5)
    fused = torch.cat((made.query, made.key, made.value), dim=1).flatten(1)
    padded = torch.cat((fused, torch.full((3, fused.shape[1]), float("nan"), dtype=dtype)))
    results = []
    for backend in (NativeAttention(kernels()), ReferenceAttention()):
        native = isinstance(backend, NativeAttention)
        caches = to_pages(made) if native else (made.key_cache.clone(), made.value_cache.clone())
        backend.prepare(made.metadata)
        with torch.inference_mode():
            out = backend.attend(padded.clone(), heads, rotary, *caches, made.metadata)
        straight = from_pages(made, *caches) if native else [c.flatten(0, 1) for c in caches]
        written = [cache[made.metadata.slot_mapping] for cache in straight]
        results.append((out, *written))
    tolerance = 3e-6 if dtype is torch.float32 else 4e-2
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(results[0][0][count:], torch.zeros(3, 6 * head_dim, dtype=dtype))


def test_writes_its_slots_and_no_others(random_pass: Callable[..., Any]) -> None:
    made = random_pass(PASSES["mixed"])
    before = from_pages(made, *to_pages(made))
    caches = to_pages(made)
    made.run_on(NativeAttention(kernels()), *caches)
    slots = made.metadata.slot_mapping
    untouched = torch.ones(before[0].shape[0], dtype=torch.bool)
    untouched[slots] = False
    for cache, new, old in zip(
        from_pages(made, *caches), (made.key, made.value), before, strict=True
    ):
        assert torch.equal(cache[slots], new)
        same = {"equal_nan": True, "atol": 0, "rtol": 0}
        torch.testing.assert_close(cache[untouched], old[untouched], **same)


def test_padding_tokens_are_ignored(random_pass: Callable[..., Any]) -> None:
    """Tokens sent to the null block write nothing, and what lies at their place is not read."""
    made = random_pass([(5, 8), (5, 3), (5, 21)])
    expected = made.run(ReferenceAttention())
    slots = made.metadata.slot_mapping.view(3, 5)
    for row, real in enumerate((2, 5, 1)):
        slots[row, real:] = 0
    found = run(made)
    for row, real in enumerate((2, 5, 1)):
        part = slice(5 * row, 5 * row + real)
        torch.testing.assert_close(found[part], expected[part], atol=2e-6, rtol=1e-5)
        assert not found[5 * row + real : 5 * row + 5].any()


@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_infinite_memory_beyond_the_end(random_pass: Callable[..., Any], name: str) -> None:
    made = random_pass(PASSES[name], head_dim=64, block_size=16)
    expected = made.run(ReferenceAttention())
    made.key_cache.nan_to_num_(nan=float("inf"))
    made.value_cache.nan_to_num_(nan=float("-inf"))
    torch.testing.assert_close(run(made), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("part", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(random_pass: Callable[..., Any], part: str, bad: float) -> None:
    """In its own sequence, and in no other."""
    made = random_pass([(1, 40), (1, 30), (40, 0)], head_dim=64, block_size=16)
    expected = made.run(ReferenceAttention())
    getattr(made, part)[1] = bad
    found = run(made)
    assert not found[1].isfinite().all()
    others = torch.arange(42) != 1
    torch.testing.assert_close(found[others], expected[others], atol=2e-6, rtol=1e-5)
