"""BlockPool: nothing lost, nothing handed out twice, least recently used first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.block_pool import BlockPool


def test_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(5)) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0


def test_freed_cached_block_is_found_until_reused() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"a")
    pool.free([first])
    assert pool.lookup(b"a") == first
    pool.reference([first])
    assert pool.num_free == 0
    pool.free([first])
    pool.free([second])
    # The block without a hash goes first, the cached one only when nothing else is left.
    assert pool.allocate(1) == [second]
    assert pool.lookup(b"a") == first
    assert pool.allocate(1) == [first]
    assert pool.lookup(b"a") is None


def test_beginning_of_a_prefix_outlives_its_end() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for i, block in enumerate(blocks):
        pool.register(block, bytes([i]))
    pool.free(blocks)
    assert pool.allocate(1) == [blocks[2]]


def test_equal_content_keeps_the_first_block() -> None:
    pool = BlockPool(2)
    a, b = pool.allocate(2)
    pool.register(a, b"same")
    pool.register(b, b"same")
    assert pool.lookup(b"same") == a
    pool.check_integrity([[a], [b]])


def test_reuse_forgets_drafter_fill() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.drafter_filled[block] = 7
    pool.free([block])
    assert pool.drafter_filled[pool.allocate(1)[0]] == 0


def test_integrity_check_notices_a_lost_reference() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match="holders"):
        pool.check_integrity([blocks[:1]])


@given(st.lists(st.tuples(st.sampled_from("afrls"), st.integers(0, 30)), max_size=80))
def test_blocks_are_conserved(operations: list[tuple[str, int]]) -> None:
    pool = BlockPool(12)
    tables: list[list[int]] = []
    for operation, number in operations:
        if operation == "a" and number % 5 <= pool.num_free:
            tables.append(pool.allocate(number % 5))
        elif operation == "f" and tables:
            pool.free(tables.pop(number % len(tables)))
        elif operation == "r" and tables and tables[number % len(tables)]:
            pool.register(tables[number % len(tables)][0], bytes([number % 7]))
        elif operation == "l":
            block = pool.lookup(bytes([number % 7]))
            if block is not None:
                pool.reference([block])
                tables.append([block])
        elif operation == "s" and tables:
            shared = tables[number % len(tables)]
            pool.reference(shared)
            tables.append(list(shared))
        pool.check_integrity(tables)
        assert pool.num_free + len({b for table in tables for b in table}) == 12
