"""Host slots for the KV of preempted sequences: who holds them, and which blocks move.

A slot holds one block of the target's KV; the drafter's is not kept but caught up later. This file
decides nothing and copies nothing: the KV cache manager says what is worth keeping, the runner
moves the bytes, in the order in which they are listed here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from paceline.request import Sequence


@dataclass(frozen=True, slots=True)
class SavedKV:
    """What a preempted sequence left in host memory.

    first: index of its first saved block; others share the blocks before it, which are found again
    by their hashes. num_tokens: tokens whose KV was computed, those before the first block
    included.
    """

    first: int
    slots: list[int]
    num_tokens: int


class SwapSpace:
    """``num_slots`` slots in host memory, 0 where preempted sequences are recomputed.

    Copies wait here for the next step that is launched, which makes all copies to the host before
    all copies from it, and both before it computes. So a block that was saved may be handed out at
    once, and a slot that was read is free for the next step's copies.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._saved: dict[Sequence, SavedKV] = {}
        self._outs: list[tuple[int, int]] = []  # (block, slot)
        self._ins: list[tuple[int, int]] = []  # (slot, block)

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def saved(self, sequence: Sequence) -> SavedKV | None:
        """What host memory holds of a waiting sequence."""
        return self._saved.get(sequence)

    def save(self, sequence: Sequence, first: int, blocks: list[int], num_tokens: int) -> bool:
        """Keep ``blocks``, the sequence's from index ``first`` on; False without enough slots."""
        if not blocks or len(blocks) > len(self._free):
            return False
        slots = sorted(self._free.pop() for _ in blocks)  # neighbours are copied together
        self._saved[sequence] = SavedKV(first, slots, num_tokens)
        self._outs += zip(blocks, slots, strict=True)
        return True

    def restore(self, slots: list[int], blocks: list[int]) -> None:
        """Copy each slot into a block, before the slots are dropped."""
        self._ins += zip(slots, blocks, strict=True)

    def drop(self, sequence: Sequence) -> None:
        """Free what a sequence holds, if anything."""
        saved = self._saved.pop(sequence, None)
        if saved is not None:
            self._free += reversed(saved.slots)

    def take_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Copies for a step to make: (block, slot) to the host, then (slot, block) from it."""
        outs, ins = self._outs, self._ins
        self._outs, self._ins = [], []
        return outs, ins

    def check_integrity(self, waiting: Collection[Sequence]) -> None:
        """Raise AssertionError unless every slot is free or held once, by a waiting sequence."""
        held = [slot for saved in self._saved.values() for slot in saved.slots]
        if sorted(held + self._free) != list(range(self.num_slots)):
            raise AssertionError("host slots are lost or held twice")
        for sequence in self._saved:
            if sequence.finished or sequence not in waiting:
                raise AssertionError("host memory keeps KV of a sequence that does not wait")
