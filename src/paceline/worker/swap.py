"""KV blocks of preempted sequences in host memory.

A host slot holds one block of all layers, K and V. Blocks are gathered on the device, so that one
copy moves a block, or a run of neighbouring slots; a copy of each layer by itself would take the
host longer than the bytes take the bus.

All copies go to the current stream, in order with the work that writes and reads the blocks, and
the host never looks into a slot. So a block may be handed out as soon as its copy is enqueued, a
slot may be written again as soon as reading it is enqueued, and nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paceline.errors import CapacityError
from paceline.worker.kv_cache import KVCache
from paceline.worker.transfer import upload

# torch rounds a pinned allocation up to a power of two, so a large one could waste half.
_PIECE_BYTES = 256 * 1024**2
_STAGING_BYTES = 64 * 1024**2  # gathered on the device at a time


def staging_blocks(num_slots: int, block_bytes: int) -> int:
    """Blocks of device memory that ``HostBlocks`` gathers into."""
    return min(num_slots, max(1, _STAGING_BYTES // block_bytes))


class HostBlocks:
    """``num_slots`` slots of pinned memory for blocks of ``kv_caches``.

    kv_caches: (K, V) a layer, [blocks, block_size, kv_heads, head_dim] each. On a device that is
    not a GPU (tests) the memory is not pinned. Raises CapacityError when the host has too little.
    """

    def __init__(self, num_slots: int, kv_caches: Sequence[KVCache]) -> None:
        self._kv_caches = kv_caches
        first = kv_caches[0][0]
        block = (len(kv_caches), 2, *first.shape[1:])
        self.block_bytes = first[0].nbytes * 2 * len(kv_caches)
        self._device = first.device
        staged = staging_blocks(num_slots, self.block_bytes)
        self._staging = torch.empty(staged, *block, dtype=first.dtype, device=first.device)
        self._piece_slots = max(1, _PIECE_BYTES // self.block_bytes)
        try:
            self._pieces = [
                torch.empty(
                    min(self._piece_slots, num_slots - start),
                    *block,
                    dtype=first.dtype,
                    pin_memory=first.device.type == "cuda",
                )
                for start in range(0, num_slots, self._piece_slots)
            ]
        except RuntimeError as error:  # torch's for what the host or the driver refuses
            size = num_slots * self.block_bytes
            raise CapacityError(
                f"no {size / 1024**3:.2f} GiB of pinned host memory for swapped KV blocks: "
                f"{str(error).splitlines()[0]}. hint: lower swap_space, or use "
                "preemption_mode='recompute'"
            ) from None

    def copy_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Enqueue copies to the host: (block, slot) pairs, in order."""
        for part in self._parts(pairs):
            blocks = self._index([block for block, _ in part])
            staged = self._staging[: len(part)]
            for layer, caches in enumerate(self._kv_caches):
                for which, cache in enumerate(caches):
                    staged[:, layer, which] = cache.index_select(0, blocks)
            for at, slots in self._runs([slot for _, slot in part]):
                slots.copy_(staged[at : at + len(slots)], non_blocking=True)

    def copy_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Enqueue copies from the host: (slot, block) pairs with distinct blocks."""
        for part in self._parts(pairs):
            staged = self._staging[: len(part)]
            for at, slots in self._runs([slot for slot, _ in part]):
                staged[at : at + len(slots)].copy_(slots, non_blocking=True)
            blocks = self._index([block for _, block in part])
            for layer, caches in enumerate(self._kv_caches):
                for which, cache in enumerate(caches):
                    cache.index_copy_(0, blocks, staged[:, layer, which])

    def _parts(self, pairs: Sequence[tuple[int, int]]) -> list[Sequence[tuple[int, int]]]:
        size = len(self._staging)
        return [pairs[at : at + size] for at in range(0, len(pairs), size)]

    def _index(self, blocks: list[int]) -> torch.Tensor:
        return upload(np.array(blocks, np.int64), self._device)

    def _runs(self, slots: list[int]) -> list[tuple[int, torch.Tensor]]:
        """Stretches of neighbouring slots as views of host memory, each with where it begins."""
        runs: list[tuple[int, torch.Tensor]] = []
        start = 0
        for end in range(1, len(slots) + 1):
            piece, offset = divmod(slots[start], self._piece_slots)
            expected = slots[start] + end - start
            if end < len(slots) and slots[end] == expected and expected % self._piece_slots:
                continue
            runs.append((start, self._pieces[piece][offset : offset + end - start]))
            start = end
        return runs
