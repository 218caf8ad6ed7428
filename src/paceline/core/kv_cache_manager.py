"""Which blocks a sequence gets: prefix hits, growth, sharing, release, what preemption keeps.

Sits between the scheduler, which thinks in sequences, and the ``BlockPool``, which thinks in
blocks. One set of block ids serves target and drafter; how far a block's drafter KV reaches is
tracked here, so that a prefix hit knows what the drafter still misses.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from paceline.arrays import Int32Array, Int64Array
from paceline.core.block_pool import BlockPool
from paceline.core.rows import RowTable
from paceline.core.swap import SwapSpace
from paceline.request import Sequence


@dataclass(slots=True)
class Prefix:
    """KV that a waiting sequence can start from."""

    blocks: list[int]  # to be referenced
    num_tokens: int  # covered, the copied and the restored part included
    copy_source: int | None = None  # block whose first tokens are copied into a new one
    host_slots: list[int] = field(default_factory=list)  # copied into the first new blocks
    num_restored: int = 0  # tokens that come from host memory


class KVCacheManager:
    """Blocks of all rows; owns pool and host slots, changes the row table's block columns.

    num_host_blocks: slots in host memory for preempted sequences, 0 to recompute them.
    """

    def __init__(
        self,
        table: RowTable,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        num_host_blocks: int = 0,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.swap = SwapSpace(num_host_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._table = table

    @property
    def usage(self) -> float:
        """Share of blocks that sequences hold."""
        return 1.0 - self.pool.num_free / self.pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` slots take."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, sequence: Sequence) -> Prefix:
        """The longest computed prefix of a waiting sequence, short of its last token.

        The last token is always computed, since its logits are needed. Prompts whose logprobs were
        asked for are computed whole for the same reason, or go on where they were preempted.
        """
        count = len(sequence.token_ids)
        cached = self._cached_prefix(sequence, count) if self.enable_prefix_caching else []
        best = Prefix(cached, len(cached) * self.block_size)
        others = [self._leader_prefix(sequence, count), self._saved_prefix(sequence, cached)]
        if sequence.num_prompt_logprobs < self._prompt_logprobs_wanted(sequence):
            best, others = Prefix([], 0), others[1:]
        for prefix in others:
            if prefix is not None and prefix.num_tokens > best.num_tokens:
                best = prefix
        return best

    @staticmethod
    def _prompt_logprobs_wanted(sequence: Sequence) -> int:
        request = sequence.request
        wanted = request.sampling.prompt_logprobs is not None and sequence.index == 0
        return request.prompt_len - 1 if wanted else 0

    def _cached_prefix(self, sequence: Sequence, count: int) -> list[int]:
        self._extend_hashes(sequence, sequence.token_ids, (count - 1) // self.block_size)
        blocks = []
        for block_hash in sequence.block_hashes[: (count - 1) // self.block_size]:
            block = self.pool.lookup(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _leader_prefix(self, sequence: Sequence, count: int) -> Prefix | None:
        """Share the first output's prompt: full blocks by reference, the partial one by copy."""
        leader, prompt_len = sequence.leader, sequence.request.prompt_len
        if leader is sequence or leader.row < 0 or count != prompt_len or count < 2:
            return None
        if not self._table.decoding[leader.row]:
            return None
        full, rest = divmod(count - 1, self.block_size)
        blocks = self._table.blocks(leader.row)
        return Prefix(blocks[:full], count - 1, blocks[full] if rest else None)

    def _saved_prefix(self, sequence: Sequence, cached: list[int]) -> Prefix | None:
        """What was computed before a preemption: cached blocks, then those in host memory.

        None if nothing was saved, or if blocks before it are gone from the cache.
        """
        saved = self.swap.saved(sequence)
        if saved is None or len(cached) < saved.first:
            return None
        blocks = cached[: saved.num_tokens // self.block_size]
        slots = saved.slots[len(blocks) - saved.first :]
        restored = saved.num_tokens - len(blocks) * self.block_size
        return Prefix(blocks, saved.num_tokens, host_slots=slots, num_restored=restored)

    def blocks_needed(self, sequence: Sequence, prefix: Prefix) -> int:
        """Free blocks that admitting the sequence takes, cached blocks nobody holds included."""
        total = self.blocks_for(len(sequence.token_ids))
        revived = self.pool.num_free_among(prefix.blocks)
        return total - len(prefix.blocks) + revived

    def admit(self, sequence: Sequence, prefix: Prefix) -> tuple[int, list[tuple[int, int]]]:
        """Give the sequence a row and blocks for all its tokens; the caller has checked the room.

        Returns the row and the block copies to make.
        """
        total = self.blocks_for(len(sequence.token_ids))
        self.pool.reference(prefix.blocks)
        new = self.pool.allocate(total - len(prefix.blocks))
        row = self._table.assign(sequence, prefix.blocks + new, prefix.num_tokens)
        copies = []
        if prefix.copy_source is not None:
            copies.append((prefix.copy_source, new[0]))
            filled = self.pool.drafter_filled
            filled[new[0]] = min(
                int(filled[prefix.copy_source]), prefix.num_tokens % self.block_size
            )
        self.swap.restore(prefix.host_slots, new[: len(prefix.host_slots)])
        self.swap.drop(sequence)
        self._table.num_hashed_blocks[row] = len(prefix.blocks)
        self._table.draft_filled[row] = self._drafter_filled(row, prefix.num_tokens)
        return row, copies

    def _drafter_filled(self, row: int, num_tokens: int) -> int:
        """Leading tokens of a row, up to ``num_tokens``, whose drafter KV lies in its blocks."""
        filled = self.pool.drafter_filled[
            self._table.block_table[row, : self.blocks_for(num_tokens)]
        ]
        partial = np.flatnonzero(filled < self.block_size)
        if not len(partial):
            return num_tokens
        first = int(partial[0])
        return min(num_tokens, first * self.block_size + int(filled[first]))

    def grow(self, rows: Int64Array, counts: Int64Array) -> Int32Array:
        """Append new blocks to rows, counts[i] to rows[i]; the caller has checked the room.

        Returns row, index in its table and id of each new block, [3, sum of counts].
        """
        grown: list[tuple[int, int, int]] = []
        for i in np.flatnonzero(counts).tolist():
            row, count = int(rows[i]), int(counts[i])
            start = int(self._table.num_blocks[row])
            blocks = self.pool.allocate(count)
            self._table.append_blocks(row, blocks)
            grown += [(row, start + j, block) for j, block in enumerate(blocks)]
        return np.array(grown, np.int32).reshape(-1, 3).T

    def release(self, row: int) -> None:
        """Give a row's blocks back to the pool and free the row."""
        self.pool.free(self._table.blocks(row))
        self._table.release(row)

    def preempt(self, row: int) -> None:
        """Release a row whose sequence will run again; nothing of it may be in flight.

        The KV that nobody else keeps goes to host memory if it has the room.
        """
        table, sequence = self._table, self._table.sequence(row)
        if self.swap.num_slots:
            decoding = bool(table.decoding[row])
            computed = int(table.num_tokens[row] - 1 if decoding else table.num_computed[row])
            blocks = table.blocks(row)[: self.blocks_for(computed)]
            first = self._num_kept_by_others(sequence, blocks, int(table.num_hashed_blocks[row]))
            self.swap.save(sequence, first, blocks[first:], computed)
        self.release(row)

    def _num_kept_by_others(self, sequence: Sequence, blocks: list[int], num_hashed: int) -> int:
        """Leading blocks that other rows hold too and that the prefix cache will find again."""
        if not self.enable_prefix_caching:
            return 0
        count = 0
        for block, block_hash in zip(blocks[:num_hashed], sequence.block_hashes, strict=False):
            if not self.pool.is_shared(block) or self.pool.lookup(block_hash) is None:
                break
            count += 1
        return count

    def register_full_blocks(self, row: int, num_computed: int) -> None:
        """Make the row's blocks findable up to ``num_computed`` tokens with KV; never drafts."""
        if not self.enable_prefix_caching:
            return
        table = self._table
        start, end = int(table.num_hashed_blocks[row]), num_computed // self.block_size
        if end <= start:
            return
        sequence = table.sequence(row)
        self._extend_hashes(sequence, table.tokens[row], end)
        for index in range(start, end):
            self.pool.register(int(table.block_table[row, index]), sequence.block_hashes[index])
        table.num_hashed_blocks[row] = end

    def _extend_hashes(self, sequence: Sequence, tokens: Int32Array, count: int) -> None:
        """Chain hashes over the leading ``count`` full blocks: 128 bits, so equal means equal."""
        hashes = sequence.block_hashes
        while len(hashes) < count:
            start = len(hashes) * self.block_size
            parent = hashes[-1] if hashes else b""
            content = tokens[start : start + self.block_size].tobytes()
            hashes.append(hashlib.blake2b(parent + content, digest_size=16).digest())

    def record_drafter_fill(self, rows: Int64Array, starts: Int64Array, ends: Int64Array) -> None:
        """Note that each row's drafter KV, complete up to start, now reaches to end."""
        size = self.block_size
        filled = self.pool.drafter_filled
        index = starts // size
        while True:
            alive = index * size < ends
            if not alive.any():
                return
            rows, ends, index = rows[alive], ends[alive], index[alive]
            blocks = self._table.block_table[rows, index]
            # A shared block may already be filled further by another holder.
            np.maximum.at(filled, blocks, np.minimum(ends - index * size, size).astype(np.int32))
            index = index + 1

    def check_integrity(self) -> None:
        """Raise AssertionError unless pool and row table agree."""
        table = self._table
        held = [table.blocks(row) for row in np.flatnonzero(table.occupied).tolist()]
        self.pool.check_integrity(held)
