"""Split decode attention against the formula in float64, with NaN wherever nobody may read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from triton_kernels import DEVICE, DOT_DTYPES, assert_close, load, noise

decode = load("paceline.attention.triton_decode")

gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


@dataclass(frozen=True)
class Rows:
    """The device rows of a pass, its caches and queries."""

    query: torch.Tensor  # [B * query_len, heads, D]
    caches: torch.Tensor  # [2, num_blocks + 1, block_size, kv_heads, D]
    rows: torch.Tensor
    num_tokens: torch.Tensor
    active: torch.Tensor
    block_table: torch.Tensor
    query_len: int
    offset: int = -1
    window: int | None = None

    @property
    def scale(self) -> float:
        return float(self.query.shape[2] ** -0.5)

    def run(self, num_splits: int = 4) -> torch.Tensor:
        size = decode.workspace_size(*self.query.shape, num_splits)
        workspace = torch.full((size,), float("nan"), device=DEVICE) if size else None
        found: torch.Tensor = decode.paged_decode_attention(
            self.query, self.caches[0], self.caches[1],
            self.rows, self.num_tokens, self.active, self.block_table,
            query_len=self.query_len, offset=self.offset, scale=self.scale,
            sliding_window=self.window, num_splits=num_splits, workspace=workspace,
        )  # fmt: skip
        return found

    def expected(self) -> torch.Tensor:
        """Token by token in float64; zeros for inactive rows."""
        out = torch.zeros_like(self.query, dtype=torch.float64)
        block_size, kv_heads = self.caches.shape[2:4]
        group = self.query.shape[1] // kv_heads
        for token in range(len(self.query)):
            row = int(self.rows[token // self.query_len])
            if not self.active[row]:
                continue
            position = int(self.num_tokens[row]) + self.offset + token % self.query_len
            last = min(max(position, 0), self.block_table.shape[1] * block_size - 1)
            first = 0 if self.window is None else max(0, position - self.window + 1)
            seen = torch.arange(first, last + 1, device=DEVICE)
            blocks = self.block_table[row].long()[seen // block_size]
            key, value = self.caches[:, blocks, seen % block_size].double()
            key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
            scores = torch.einsum("hd,khd->hk", self.query[token].double(), key) * self.scale
            out[token] = torch.einsum("hk,khd->hd", scores.softmax(-1), value)
        return out


def make_rows(
    lengths: list[int],  # committed tokens; 0 makes the row inactive
    query_len: int = 1,
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 32,
    block_size: int = 16,
    offset: int = -1,
    window: int | None = None,
    max_blocks: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Rows:
    """Rows in shuffled order on shuffled blocks, NaN in every slot a row has not written."""
    generator = torch.Generator().manual_seed(0)
    blocks = max_blocks or -(-(max(lengths) + offset + query_len) // block_size) + 1
    count = len(lengths)
    order = torch.randperm(count * blocks, generator=generator) + 1
    table = order.view(count, blocks).int().to(DEVICE)
    caches = noise(2, count * blocks + 1, block_size, kv_heads, head_dim, dtype=dtype, seed=1)
    caches[:, 0] = float("nan")
    for row, length in enumerate(lengths):
        end = length + offset + query_len if length else 0
        slots = blocks * block_size
        unwritten = torch.arange(min(max(end, 0), slots), slots, device=DEVICE)
        caches[:, table[row].long()[unwritten // block_size], unwritten % block_size] = float("nan")
    return Rows(
        noise(count * query_len, heads, head_dim, dtype=dtype, seed=2),
        caches,
        torch.randperm(count, generator=generator).int().to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        torch.tensor([length > 0 for length in lengths], dtype=torch.int32, device=DEVICE),
        table,
        query_len,
        offset,
        window,
    )


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("query_len", [1, 2, 6])
def test_matches_the_formula(query_len: int, dtype: torch.dtype) -> None:
    state = make_rows([1, 64, 65, 300, 0], query_len, dtype=dtype)
    assert_close(state.run(), state.expected())


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 14, "kv_heads": 2, "head_dim": 64},
        {"heads": 4, "kv_heads": 4, "head_dim": 96},
        {"heads": 5, "kv_heads": 1, "head_dim": 80, "block_size": 32},
        {"heads": 8, "kv_heads": 1, "head_dim": 16, "block_size": 8},
    ],
    ids=str,
)
def test_head_and_block_shapes(shape: dict[str, int]) -> None:
    state = make_rows([33, 150], 3, **shape)
    assert_close(state.run(), state.expected())


@pytest.mark.parametrize("window", [1, 7, 64, 100])
@pytest.mark.parametrize("query_len", [1, 6])
def test_sliding_window(query_len: int, window: int) -> None:
    state = make_rows([3, 100, 290], query_len, window=window)
    assert_close(state.run(), state.expected())


def test_more_query_rows_than_one_tile() -> None:
    state = make_rows([40, 70], 17, heads=8, kv_heads=1, head_dim=16)
    assert_close(state.run(2), state.expected())


@pytest.mark.parametrize(("query_len", "offset"), [(2, -2), (1, 0), (1, 3)])
def test_offsets(query_len: int, offset: int) -> None:
    """A row of one token asked for its last two has its first query at a negative position."""
    state = make_rows([1, 2, 90], query_len, offset=offset)
    assert_close(state.run(), state.expected())


def test_beyond_the_block_table() -> None:
    state = make_rows([30, 12], 4, max_blocks=2)
    assert_close(state.run(), state.expected())


def test_inactive_rows_read_nothing_and_give_zeros() -> None:
    state = make_rows([70, 80], 2)
    state = replace(
        state,
        active=torch.zeros_like(state.active),
        caches=torch.full_like(state.caches, float("nan")),
    )
    assert torch.equal(state.run(), torch.zeros_like(state.query))


@pytest.mark.parametrize("num_splits", [1, 2, 8])
def test_any_number_of_splits(num_splits: int) -> None:
    state = make_rows([5, 200, 700], 2, heads=2, kv_heads=1)
    assert_close(state.run(num_splits), state.expected())


@pytest.mark.parametrize("query_len", [1, 3])
def test_a_row_alone_gives_the_bits_it_gives_in_a_batch(query_len: int) -> None:
    state = make_rows([7, 500, 130, 260], query_len, dtype=torch.float16)
    together = state.run().view(4, query_len, *state.query.shape[1:])
    for entry in range(4):
        query = state.query.view(4, query_len, *state.query.shape[1:])[entry]
        alone = replace(state, query=query.contiguous(), rows=state.rows[entry : entry + 1])
        assert torch.equal(alone.run(), together[entry])


def test_number_of_splits() -> None:
    for batch in (1, 3, 4, 16, 64, 256, 1024):
        for max_model_len in (32, 128, 2048, 131_072):
            splits = decode.num_splits_for(batch, 4, 132, max_model_len)
            assert splits == 1 or splits & (splits - 1) == 0
            assert splits == 1 or (batch * 4 * splits <= 2 * 132 and splits * 64 <= max_model_len)
    assert decode.num_splits_for(1, 4, 132, 32_768) == 32  # one row alone fills the card
    assert decode.num_splits_for(1, 4, 132, 300) == 4
    assert decode.num_splits_for(64, 4, 132, 32_768) == 1


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("query_len", [1, 2, 6, 17])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(28, 4, 128), (14, 2, 64)])
def test_real_shapes(
    heads: int, kv_heads: int, head_dim: int, query_len: int, dtype: torch.dtype
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    state = make_rows([300, 1, 2048, 5000, 17, 0], query_len, dtype=dtype, **shape)
    for num_splits in (1, 4, 32):
        assert_close(state.run(num_splits), state.expected())


@pytest.mark.gpu
@gpu
def test_a_captured_graph_serves_any_length() -> None:
    state = make_rows([300, 1, 2000, 90], 2, heads=28, kv_heads=4, head_dim=128)
    longest = state.num_tokens.clone()
    state.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    state.num_tokens.fill_(1)
    with torch.cuda.graph(graph):
        found = state.run()
    for lengths in (longest, (longest + 1) // 2, torch.ones_like(longest)):
        state.num_tokens.copy_(lengths)
        graph.replay()
        assert_close(found, state.expected())


@pytest.mark.gpu
@gpu
def test_caches_of_more_than_two_billion_elements() -> None:
    blocks, block_size, kv_heads, head_dim = 270_000, 16, 4, 128
    state = make_rows([300, 77], 2, heads=28, kv_heads=4, head_dim=128, dtype=torch.bfloat16)
    used = state.caches.shape[1] - 1
    caches = torch.empty(
        2, blocks, block_size, kv_heads, head_dim, dtype=torch.bfloat16, device=DEVICE
    )
    assert caches[0].numel() > 2**31
    caches[:, blocks - used :] = state.caches[:, 1:]
    far = replace(state, caches=caches, block_table=state.block_table + (blocks - used - 1))
    assert torch.equal(far.run(), state.run())
