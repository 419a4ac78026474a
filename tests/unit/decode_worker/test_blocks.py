"""The block pool: reference counts, prefix sharing, eviction."""

from __future__ import annotations

import pytest

from decode_worker.blocks import BlockPool, OutOfBlocks

A, B, C, D = (bytes([i]) * 16 for i in range(4))


def pool_with_chain(total: int = 8) -> tuple[BlockPool, list[int]]:
    """Blocks that hold the chain A, B, C; nobody holds them."""
    pool = BlockPool(total)
    blocks = pool.allocate(3)
    for block, digest in zip(blocks, (A, B, C), strict=True):
        pool.register(block, digest)
    pool.release(blocks)
    return pool, blocks


def test_a_released_registered_block_stays_findable_and_counts_as_available() -> None:
    pool, blocks = pool_with_chain()
    assert (pool.free, pool.cached, pool.available, pool.held) == (5, 3, 8, 0)
    assert pool.find([A, B, D]) == blocks[:2]
    assert pool.find([D, A]) == []


def test_shared_prefix_is_freed_by_its_last_holder() -> None:
    pool, blocks = pool_with_chain()
    first = pool.allocate(1, pool.find([A, B]))
    second = pool.allocate(1, pool.find([A, B]))
    assert first[:2] == second[:2] == blocks[:2]
    pool.release(first)
    assert pool.held == 3
    pool.release(second)
    assert pool.held == 0
    with pytest.raises(ValueError, match="not held"):
        pool.release([second[2]])


def test_eviction_takes_the_end_of_the_least_recently_used_chain() -> None:
    pool, blocks = pool_with_chain(4)
    held = pool.allocate(2)
    assert pool.find([A, B, C]) == blocks[:2]
    assert blocks[2] in held
    assert pool.take_changes() == ([A, B], [])  # C came and went in between


def test_a_held_prefix_is_never_evicted() -> None:
    pool, _ = pool_with_chain(4)
    prefix = pool.find([A, B, C])
    assert pool.needed(prefix, 1) == 4
    pool.allocate(1, prefix)
    with pytest.raises(OutOfBlocks, match="1 blocks asked for, 0 of 4"):
        pool.allocate(1)
    assert pool.find([A, B, C]) == prefix


def test_failed_allocation_holds_nothing() -> None:
    pool, _ = pool_with_chain(4)
    with pytest.raises(OutOfBlocks):
        pool.allocate(3, pool.find([A, B]))
    assert (pool.held, pool.cached) == (0, 3)


def test_the_same_content_twice_keeps_the_first_block() -> None:
    pool, blocks = pool_with_chain()
    other = pool.allocate(1)
    pool.register(other[0], A)
    pool.release(other)
    assert pool.find([A]) == blocks[:1]
    assert pool.cached == 3


def test_only_a_held_block_can_be_registered() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="not held"):
        pool.register(0, A)


def test_changes_are_told_once() -> None:
    pool, _ = pool_with_chain(3)
    assert pool.take_changes() == ([A, B, C], [])
    assert pool.take_changes() == ([], [])
    pool.allocate(2)
    assert pool.take_changes() == ([], [C, B])
    assert pool.resident() == [A]
