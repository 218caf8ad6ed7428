"""Rotated queries and what lands in which KV slot, against float64."""

from __future__ import annotations

import pytest
import torch

from triton_kernels import DEVICE, DTYPES, assert_close, load, noise

ops = load("paceline.ops.triton")

EPS = 1e-5


def frequencies(head_dim: int, theta: float = 1e6) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return torch.pow(theta, exponents).reciprocal().to(DEVICE)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def turned(
    heads: torch.Tensor,  # [N, heads, D]
    positions: torch.Tensor,  # [N]
    table: torch.Tensor,
    norm: torch.Tensor | None,
) -> torch.Tensor:
    """The formula; the angle is float32 as models define it, everything else float64."""
    wide = heads.double()
    if norm is not None:
        scale = (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
        wide = wide * scale * norm.double()
    angles = (positions[:, None].float() * table).double()[:, None]
    cos, sin = angles.cos(), angles.sin()
    low, high = wide.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "normed"),
    [(14, 2, 64, False), (4, 2, 128, True), (3, 3, 96, True), (5, 1, 16, False)],
)
def test_prefill(
    heads: int, kv_heads: int, head_dim: int, normed: bool, dtype: torch.dtype
) -> None:
    positions = torch.tensor([0, 1, 77, 4095, 105_700, 131_071], device=DEVICE)
    slots = torch.tensor([9, 33, 32, 20, 47, 16], device=DEVICE)
    qkv = noise(6, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    norm = noise(heads + kv_heads, head_dim, dtype=dtype, seed=1) if normed else None
    caches = torch.full((2, 3, 16, kv_heads, head_dim), float("nan"), dtype=dtype, device=DEVICE)
    table = frequencies(head_dim)
    found = ops.rotary_kv_prefill(qkv, caches[0], caches[1], table, norm, EPS, positions, slots)
    parts = qkv.view(6, -1, head_dim)
    expected = turned(parts[:, : heads + kv_heads], positions, table, norm)
    flat = caches.view(2, 48, kv_heads, head_dim)
    assert_close(found, expected[:, :heads])
    assert_close(flat[0, slots], expected[:, heads:])
    assert torch.equal(flat[1, slots], parts[:, heads + kv_heads :])
    untouched = torch.ones(48, dtype=torch.bool, device=DEVICE)
    untouched[slots] = False
    assert flat[:, untouched].isnan().all()


@pytest.mark.parametrize(("query_len", "offset"), [(1, -1), (1, 2), (2, -2), (4, -1)])
def test_decode_writes_where_the_rows_say(query_len: int, offset: int) -> None:
    heads, kv_heads, head_dim, block_size = 6, 2, 32, 4
    # Row 0 crosses a block border, 1 has one token, 2 ends beyond its table, 3 is inactive.
    num_tokens, active = integers(8, 1, 13, 9, 1), integers(1, 1, 1, 0, 0)
    block_table = torch.arange(1, 16, dtype=torch.int32, device=DEVICE).view(5, 3)
    rows = integers(2, 0, 3, 1, 4)
    qkv = noise(5 * query_len, (heads + 2 * kv_heads) * head_dim)
    caches = torch.full((2, 16, block_size, kv_heads, head_dim), float("nan"), device=DEVICE)
    table = frequencies(head_dim)
    found = ops.rotary_kv_decode(
        qkv, caches[0], caches[1], table, None, EPS, rows, num_tokens, active, block_table,
        query_len=query_len, offset=offset,
    )  # fmt: skip
    places = (num_tokens[rows.long()] + offset)[:, None] + torch.arange(query_len, device=DEVICE)
    positions = places.flatten()
    parts = qkv.view(5 * query_len, -1, head_dim)
    expected = turned(parts[:, : heads + kv_heads], positions.clamp(min=0), table, None)
    assert_close(found, expected[:, :heads])
    flat = caches.view(2, 64, kv_heads, head_dim)
    written = set(range(block_size))  # the null block holds whatever came last
    for token, position in enumerate(positions.tolist()):
        row = int(rows[token // query_len])
        if active[row] and 0 <= position < 12:
            slot = int(block_table[row, position // 4]) * 4 + position % 4
            assert_close(flat[0, slot], expected[token, heads:])
            assert torch.equal(flat[1, slot], parts[token, heads + kv_heads :])
            written.add(slot)
    others = [slot for slot in range(64) if slot not in written]
    assert flat[:, others].isnan().all()
