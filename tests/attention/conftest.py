"""Random passes over a paged cache whose unwritten memory is NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from paceline.attention.backend import AttentionBackend, AttentionMetadata, HeadShape


@dataclass
class RandomPass:
    """One pass: what a layer would hand to a backend, reproducible for several backends."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: AttentionMetadata
    window: int | None

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        """The backend's output [N, heads, head_dim], on copies of the caches."""
        return self.run_on(backend, self.key_cache.clone(), self.value_cache.clone())

    def run_on(
        self, backend: AttentionBackend, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> torch.Tensor:
        """The same on these caches, in the backend's own layout."""
        count, heads, head_dim = self.query.shape
        shape = HeadShape(
            num_heads=heads,
            num_kv_heads=self.key.shape[1],
            head_dim=head_dim,
            scale=head_dim**-0.5,
            sliding_window=self.window,
            head_norm=None,
            eps=1e-6,
        )
        unturned = (
            self.query.new_ones(count, 1, head_dim),
            self.query.new_zeros(count, 1, head_dim),
        )
        fused = torch.cat((self.query, self.key, self.value), dim=1).flatten(1)
        backend.prepare(self.metadata)
        with torch.inference_mode():
            out = backend.attend(fused, shape, unturned, key_cache, value_cache, self.metadata)
        return out.view(count, heads, head_dim)


def make_pass(
    spans: Sequence[tuple[int, int]],  # (query length, tokens cached before) of each sequence
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> RandomPass:
    """Shuffled blocks, a table padded with ids of NaN blocks, NaN in every slot not yet written."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    query_lens = [query_len for query_len, _ in spans]
    seq_lens = [query_len + cached for query_len, cached in spans]
    counts = [-(-length // block_size) for length in seq_lens]
    spare = 3  # blocks that hold nothing but NaN
    total = sum(counts) + spare
    order = torch.randperm(total, generator=generator) + 1
    table = order[-spare:].repeat(len(spans), max(counts) + spare)[:, : max(counts) + 2].int()
    cache = torch.full((2, total + 1, block_size, kv_heads, head_dim), float("nan"), dtype=dtype)
    slots: list[torch.Tensor] = []
    taken = 0
    for row, (length, count) in enumerate(zip(seq_lens, counts, strict=True)):
        table[row, :count] = order[taken : taken + count]
        taken += count
        positions = torch.arange(length)
        slot = table[row].long()[positions // block_size] * block_size + positions % block_size
        cached = length - query_lens[row]
        cache.view(2, -1, kv_heads, head_dim)[:, slot[:cached]] = noise(
            2, cached, kv_heads, head_dim
        )
        slots.append(slot[cached:])
    count = sum(query_lens)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens).int(),
        block_table=table,
        slot_mapping=torch.cat(slots),
        block_size=block_size,
        query_lens=query_lens,
        seq_lens_list=seq_lens,
    )
    # As in a layer: q, k and v are views into one tensor.
    fused = noise(count, heads + 2 * kv_heads, head_dim)
    return RandomPass(
        fused[:, :heads],
        fused[:, heads : heads + kv_heads],
        fused[:, heads + kv_heads :],
        cache[0],
        cache[1],
        metadata,
        window,
    )


@pytest.fixture
def random_pass() -> Callable[..., Any]:
    """``make_pass``."""
    return make_pass


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    """The tensors are tiny, and threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
