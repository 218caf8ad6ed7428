"""Prefill attention against the formula in float64, with NaN wherever nobody may read."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from triton_kernels import DEVICE, DOT_DTYPES, assert_close, load, noise

prefill = load("paceline.attention.triton_prefill")

Chunks = list[tuple[int, int]]  # (query tokens, tokens cached before) of each sequence


@dataclass(frozen=True)
class Pass:
    """Chunks of prompts, their K and V written."""

    query: torch.Tensor  # [N, heads, D]
    caches: torch.Tensor  # [2, num_blocks + 1, block_size, kv_heads, D]
    block_table: torch.Tensor
    chunks: Chunks
    window: int | None

    def run(self) -> torch.Tensor:
        counts = torch.tensor([0, *(count for count, _ in self.chunks)])
        lengths = torch.tensor([count + cached for count, cached in self.chunks])
        found: torch.Tensor = prefill.paged_prefill_attention(
            self.query, self.caches[0], self.caches[1],
            counts.cumsum(0).int().to(DEVICE), lengths.int().to(DEVICE), self.block_table,
            max_query_len=int(counts.max()), scale=self.query.shape[2] ** -0.5,
            sliding_window=self.window,
        )  # fmt: skip
        return found

    def expected(self) -> torch.Tensor:
        """One matrix of scores a sequence, in float64."""
        group = self.query.shape[1] // self.caches.shape[3]
        parts = []
        for sequence, (count, cached) in enumerate(self.chunks):
            start = sum(earlier for earlier, _ in self.chunks[:sequence])
            query = self.query[start : start + count].double()
            paged = self.caches[:, self.block_table[sequence].long()].flatten(1, 2)
            key, value = paged[:, : count + cached].double().repeat_interleave(group, dim=2)
            scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[2] ** -0.5
            position = torch.arange(cached, cached + count, device=DEVICE)[:, None]
            keys = torch.arange(count + cached, device=DEVICE)
            hidden = keys > position
            if self.window is not None:
                hidden |= keys <= position - self.window
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, value))
        return torch.cat(parts)


def make_pass(
    chunks: Chunks,
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Pass:
    """Shuffled blocks, NaN in every slot behind a sequence's last token."""
    count = len(chunks)
    longest = max(new + cached for new, cached in chunks)
    blocks = -(-longest // block_size) + 1
    order = torch.randperm(count * blocks, generator=torch.Generator().manual_seed(0)) + 1
    table = order.view(count, blocks).int().to(DEVICE)
    caches = noise(2, count * blocks + 1, block_size, kv_heads, head_dim, dtype=dtype)
    caches[:, 0] = float("nan")
    for sequence, (new, cached) in enumerate(chunks):
        unwritten = torch.arange(new + cached, blocks * block_size, device=DEVICE)
        places = table[sequence].long()[unwritten // block_size], unwritten % block_size
        caches[:, places[0], places[1]] = float("nan")
    query = noise(sum(new for new, _ in chunks), heads, head_dim, dtype=dtype, seed=1)
    return Pass(query, caches, table, chunks, window)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(
    "chunks",
    [[(1, 0)], [(70, 0)], [(5, 100), (33, 31), (1, 64)], [(3, 0), (64, 64), (2, 1), (40, 7)]],
    ids=str,
)
def test_matches_the_formula(chunks: Chunks, dtype: torch.dtype) -> None:
    state = make_pass(chunks, dtype=dtype)
    assert_close(state.run(), state.expected())


@pytest.mark.parametrize("window", [1, 9, 64, 90])
def test_sliding_window(window: int) -> None:
    state = make_pass([(100, 60), (3, 150), (20, 0)], window=window)
    assert_close(state.run(), state.expected())


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 7, "kv_heads": 1, "head_dim": 64, "block_size": 16},
        {"heads": 4, "kv_heads": 4, "head_dim": 80, "block_size": 8},
        {"heads": 16, "kv_heads": 1, "head_dim": 16, "block_size": 32},
    ],
    ids=str,
)
def test_head_and_block_shapes(shape: dict[str, int]) -> None:
    state = make_pass([(40, 30), (9, 0)], **shape)
    assert_close(state.run(), state.expected())


def test_many_sequences() -> None:
    """More than the search for a tile's sequence looks at in one go."""
    state = make_pass([(1 + index % 2, index % 5) for index in range(260)], heads=1, kv_heads=1)
    assert_close(state.run(), state.expected())


def test_a_sequence_without_queries_is_skipped() -> None:
    state = make_pass([(0, 8), (5, 3), (0, 1), (2, 0), (0, 4)])
    assert_close(state.run(), state.expected())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(28, 4, 128), (14, 2, 64)])
def test_real_shapes(
    heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype
) -> None:
    chunks = [(700, 0), (129, 1000), (1, 77)]
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": 16}
    state = make_pass(chunks, window=window, dtype=dtype, **shape)
    assert_close(state.run(), state.expected())
