"""Which blocks a sequence gets: prefix hits, growth, sharing among a request's outputs, release.

Sits between the scheduler, which thinks in sequences, and the ``BlockPool``, which thinks in
blocks. One set of block ids serves target and drafter; how far a block's drafter KV reaches is
tracked here, so that a prefix hit knows what the drafter still misses.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from paceline.arrays import Int32Array, Int64Array
from paceline.core.block_pool import BlockPool
from paceline.core.rows import RowTable
from paceline.request import Sequence


@dataclass(slots=True)
class Prefix:
    """KV that a waiting sequence can start from."""

    blocks: list[int]  # to be referenced
    num_tokens: int  # covered, the copied part included
    copy_source: int | None = None  # block whose first tokens are copied into a new one


class KVCacheManager:
    """Blocks of all rows; owns the pool, changes the row table's block columns."""

    def __init__(
        self, table: RowTable, num_blocks: int, block_size: int, *, enable_prefix_caching: bool
    ) -> None:
        self.pool = BlockPool(num_blocks)
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
        asked for are computed whole for the same reason.
        """
        count = len(sequence.token_ids)
        if sequence.num_prompt_logprobs < self._prompt_logprobs_wanted(sequence):
            return Prefix([], 0)
        shared = self._leader_prefix(sequence, count)
        cached = self._cached_prefix(sequence, count) if self.enable_prefix_caching else []
        if shared is not None and shared.num_tokens > len(cached) * self.block_size:
            return shared
        return Prefix(cached, len(cached) * self.block_size)

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

    def grow(self, row: int, count: int) -> list[int]:
        """Append ``count`` new blocks to a row; the caller has checked the room."""
        blocks = self.pool.allocate(count)
        self._table.append_blocks(row, blocks)
        return blocks

    def release(self, row: int) -> None:
        """Give a row's blocks back to the pool and free the row."""
        self.pool.free(self._table.blocks(row))
        self._table.release(row)

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
