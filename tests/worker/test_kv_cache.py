"""Paged K and V tensors: shapes, zeroes, copies, and the message when memory does not suffice."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from paceline.config import ModelArch
from paceline.errors import CapacityError
from paceline.models.hf_config import parse_hf_config
from paceline.worker.kv_cache import allocate_kv_caches, copy_blocks


@pytest.fixture
def arch() -> ModelArch:
    return parse_hf_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
        },
        "config.json",
    )


def test_shapes(arch: ModelArch) -> None:
    caches = allocate_kv_caches(arch, 5, 16, torch.bfloat16, "cpu")
    assert len(caches) == 3
    for key, value in caches:
        assert key.shape == value.shape == (6, 16, 2, 8)
        assert key.dtype == value.dtype == torch.bfloat16
        assert not key.any()
        assert not value.any()
    held = sum(t.numel() * t.itemsize for layer in caches for t in layer)
    assert held == arch.kv_bytes_per_token(2) * 16 * 6
    assert allocate_kv_caches(arch, 5, 16, torch.float32, "cpu", tp_size=2)[0][0].shape[2] == 1


def test_out_of_memory(arch: ModelArch) -> None:
    with pytest.raises(CapacityError, match=r"no memory for 10{12} KV blocks of 16 tokens.*hint"):
        allocate_kv_caches(arch, 10**12, 16, torch.float32, "cpu")


def test_copies(arch: ModelArch) -> None:
    caches = allocate_kv_caches(arch, 9, 4, torch.float32, "cpu")
    for index, layer in enumerate(caches):
        for which, cache in enumerate(layer):
            cache[:] = torch.arange(10.0)[:, None, None, None] + 100 * index + 1000 * which
    copy_blocks(caches, [(1, 5), (1, 6), (2, 7)])
    for index, layer in enumerate(caches):
        for which, cache in enumerate(layer):
            base = 100 * index + 1000 * which
            expected = torch.tensor([0.0, 1, 2, 3, 4, 1, 1, 2, 8, 9]) + base
            assert torch.equal(cache[:, 2, 1, 3], expected)


def test_chained_copies_happen_in_order(arch: ModelArch) -> None:
    caches = allocate_kv_caches(arch, 4, 4, torch.float32, "cpu")
    caches[0][0][:] = torch.arange(5.0)[:, None, None, None]
    copy_blocks(caches, [(1, 2), (2, 3), (4, 1)])
    assert caches[0][0][:, 0, 0, 0].tolist() == [0.0, 4.0, 1.0, 1.0, 4.0]


def test_nothing_to_copy(arch: ModelArch) -> None:
    caches = allocate_kv_caches(arch, 1, 4, torch.float32, "cpu")
    copy_blocks(caches, [])
    assert not caches[0][0].any()


def test_a_cpu_pool_takes_memory_when_it_is_written() -> None:
    arch = parse_hf_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 64,
            "hidden_size": 256,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 512,
        },
        "config.json",
    )

    def resident() -> int:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * mmap.PAGESIZE

    before = resident()
    caches = allocate_kv_caches(arch, 4095, 16, torch.float32, "cpu")
    size = 4096 * 16 * arch.kv_bytes_per_token(4)
    assert size == 2**28
    assert resident() - before < size // 4
    caches[0][0].fill_(1.0)
    assert resident() - before >= size // 5
