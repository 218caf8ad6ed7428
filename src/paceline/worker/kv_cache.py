"""The paged K and V tensors of one model, and copies between blocks.

Which block belongs to whom is the KV cache manager's knowledge; here a block is an index.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

from paceline.config import ModelArch
from paceline.errors import CapacityError

KVCache = tuple[torch.Tensor, torch.Tensor]  # K and V of one layer


def allocate_kv_caches(
    arch: ModelArch,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    tp_size: int = 1,
) -> list[KVCache]:
    """One zeroed (K, V) a layer, each [num_blocks + 1, block_size, kv_heads / tp_size, head_dim].

    Block 0 is the null block: written by rows that have nothing to say, never read. On a CPU pages
    become real memory when they are first written. Raises CapacityError when memory does not
    suffice.
    """
    shape = (num_blocks + 1, block_size, arch.num_kv_heads // tp_size, arch.head_dim)
    try:
        return [
            (_zeros(shape, dtype, device), _zeros(shape, dtype, device))
            for _ in range(arch.num_layers)
        ]
    # torch raises RuntimeError, or its subclass OutOfMemoryError; the system OSError
    except (RuntimeError, OSError, OverflowError) as error:
        size = arch.kv_bytes_per_token(dtype.itemsize) // tp_size * block_size * (num_blocks + 1)
        raise CapacityError(
            f"no memory for {num_blocks} KV blocks of {block_size} tokens ({size / 1e9:.2f} GB). "
            "hint: lower kv_cache_memory_bytes, gpu_memory_utilization or max_model_len"
        ) from error


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """``torch.zeros``; on a CPU without writing, as pages fresh from the system are zero."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)  # which keeps the pages


def copy_blocks(kv_caches: Sequence[KVCache], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks of every layer's K and V: (source, destination) pairs, in order."""
    if not pairs:
        return
    sources, destinations = zip(*pairs, strict=True)
    if set(sources) & set(destinations):  # a chain: what is read may depend on an earlier copy
        for pair in pairs:
            _copy(kv_caches, [pair[0]], [pair[1]])
    else:
        _copy(kv_caches, list(sources), list(destinations))


def _copy(kv_caches: Sequence[KVCache], sources: list[int], destinations: list[int]) -> None:
    device = kv_caches[0][0].device
    source = torch.tensor(sources, device=device)
    destination = torch.tensor(destinations, device=device)
    for layer in kv_caches:
        for cache in layer:
            cache.index_copy_(0, destination, cache.index_select(0, source))
