"""Blocks go to host slots and come back as they were, wherever they and the slots lie."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.errors import CapacityError
from paceline.worker import swap
from paceline.worker.swap import HostBlocks
from triton_kernels import DEVICE

LAYERS, BLOCKS, SHAPE = 3, 24, (4, 2, 8)


def caches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def cache() -> torch.Tensor:
        return torch.randn(BLOCKS, *SHAPE, generator=generator).to(DEVICE)

    return [(cache(), cache()) for _ in range(LAYERS)]


BLOCK_BYTES = LAYERS * 2 * 4 * 2 * 8 * 4


@pytest.mark.parametrize(("staged", "piece"), [(1, 1), (3, 4), (100, 5), (100, 100)])
@pytest.mark.parametrize("seed", range(4))
def test_there_and_back(
    monkeypatch: pytest.MonkeyPatch, staged: int, piece: int, seed: int
) -> None:
    monkeypatch.setattr(swap, "_STAGING_BYTES", staged * BLOCK_BYTES)
    monkeypatch.setattr(swap, "_PIECE_BYTES", piece * BLOCK_BYTES + 1)
    kv, rng = caches(), random.Random(seed)
    before = [(k.clone(), v.clone()) for k, v in kv]
    host = HostBlocks(17, kv)
    assert host.block_bytes == BLOCK_BYTES
    count = rng.randint(1, 17)
    blocks, others = rng.sample(range(BLOCKS), count), rng.sample(range(BLOCKS), count)
    slots = rng.sample(range(17), count)
    if seed % 2:
        slots.sort()
    host.copy_out(list(zip(blocks, slots, strict=True)))
    for layer in kv:
        for cache in layer:
            cache.fill_(-1)
    host.copy_in(list(zip(slots, others, strict=True)))
    for (k, v), (old_k, old_v) in zip(kv, before, strict=True):
        for cache, old in ((k, old_k), (v, old_v)):
            for block, other in zip(blocks, others, strict=True):
                assert torch.equal(cache[other], old[block])
            assert (cache == -1).flatten(1).all(1).sum() == BLOCKS - count


def test_a_slot_holds_what_was_copied_last() -> None:
    kv = caches()
    before = kv[0][0].clone()
    host = HostBlocks(4, kv)
    host.copy_out([(5, 2), (6, 2), (7, 3)])
    host.copy_in([(2, 9), (3, 10)])
    assert torch.equal(kv[0][0][9:11], before[6:8])
    host.copy_out([])
    host.copy_in([])


def test_a_host_without_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "_PIECE_BYTES", 10**18)
    with pytest.raises(CapacityError, match=r"no .* GiB of pinned host memory.*hint: lower swap"):
        HostBlocks(10**15, caches())
