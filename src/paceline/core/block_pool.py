"""The pool of KV blocks: reference counts, prefix-cache hashes, least-recently-used reuse.

Knows ids and counters only. Block 0 is the null block: written by padding, never read, never handed
out. A block nobody references stays findable by its hash until it is needed for something else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


class BlockPool:
    """``num_blocks`` usable blocks with ids 1 to ``num_blocks``."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * (num_blocks + 1)
        self._hashes: list[bytes | None] = [None] * (num_blocks + 1)
        self._cached: dict[bytes, int] = {}
        # Unreferenced blocks in the order in which they are handed out.
        self._free: OrderedDict[int, None] = OrderedDict(
            (i, None) for i in range(1, num_blocks + 1)
        )
        # Slots of each block, from its first, that hold drafter KV of the same tokens.
        self.drafter_filled: npt.NDArray[np.int32] = np.zeros(num_blocks + 1, np.int32)

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` could hand out now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks, one reference each; the caller has checked ``num_free``."""
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            block_hash = self._hashes[block]
            if block_hash is not None:
                del self._cached[block_hash]
                self._hashes[block] = None
            self._ref_counts[block] = 1
            blocks.append(block)
        self.drafter_filled[blocks] = 0
        return blocks

    def reference(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; a free but cached one leaves the free list."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drop a reference to each block, given in table order.

        Blocks without a hash are reused first; hashed ones join the end of the line, the deepest of
        a prefix ahead of its beginning, which more requests share.
        """
        for block in reversed(list(blocks)):
            count = self._ref_counts[block] - 1
            self._ref_counts[block] = count
            if count == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that holds the tokens behind this hash, if any."""
        return self._cached.get(block_hash)

    def register(self, block: int, block_hash: bytes) -> None:
        """Make a full block findable; the first block of equal content stays the known one."""
        if self._hashes[block] is None and block_hash not in self._cached:
            self._hashes[block] = block_hash
            self._cached[block_hash] = block

    def is_shared(self, block: int) -> bool:
        """Whether the block has several holders."""
        return self._ref_counts[block] > 1

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody references."""
        return sum(self._ref_counts[block] == 0 for block in blocks)

    def reset_prefix_cache(self) -> None:
        """Forget all hashes."""
        self._cached.clear()
        self._hashes = [None] * (self.num_blocks + 1)

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless counts, free list and hashes agree with all tables."""
        held = [0] * (self.num_blocks + 1)
        for table in tables:
            for block in table:
                held[block] += 1
        if held[0]:
            raise AssertionError("the null block is held by a sequence")
        for block in range(1, self.num_blocks + 1):
            if held[block] != self._ref_counts[block]:
                raise AssertionError(
                    f"block {block}: {held[block]} holders, count {self._ref_counts[block]}"
                )
            if (self._ref_counts[block] == 0) != (block in self._free):
                raise AssertionError(f"block {block}: free list and reference count disagree")
            block_hash = self._hashes[block]
            if block_hash is not None and self._cached.get(block_hash) != block:
                raise AssertionError(f"block {block}: its hash does not lead to it")
        if len(self._cached) != sum(h is not None for h in self._hashes):
            raise AssertionError("prefix cache has entries without a block")
