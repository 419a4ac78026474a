"""The transfer plan: every byte of the range once, nothing else, in as few writes as possible."""

from __future__ import annotations

import numpy as np
import pytest
from geometry_cases import POISON, Case, build, cases, poison, splits
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.backends.base import Run
from transport.geometry import KVGeometry
from transport.geometry.pages import PageLayout
from transport.geometry.plan import plan
from transport.geometry.staging import (
    contiguous_bytes,
    execute,
    linear_bytes,
    linear_row_bytes,
    plan_contiguous,
    scatter,
)
from transport.geometry.units import units_in_range
from transport.kernels import reference


def owned(case: Case, start: int, stop: int) -> list[np.ndarray]:
    """bool per byte of every channel: bytes of the tiles of tokens [start, stop), one page index at a time."""
    pool = case.geometry
    masks = [np.zeros(case.region_bytes, bool) for _ in range(pool.num_channels)]
    for token in range(start, stop, 32):
        block, row = case.dst_blocks[token // pool.block_size], token % pool.block_size
        for head in range(pool.num_kv_heads):
            if pool.layout == "gpu":
                width = pool.page_bytes // 32 * (pool.head_dim // 32)
                begin = ((block * pool.num_kv_heads + head) * pool.block_size + row) * width
                spots = [(0, begin, 32 * width)]
            else:
                pages = [pool.page_index(block, head, row, dim) for dim in range(0, pool.head_dim, 32)]
                spots = [(*pool.locate(page), pool.page_bytes) for page in pages]
            for channel, offset, length in spots:
                for base in case.bases:
                    assert not masks[channel][base + offset : base + offset + length].any()
                    masks[channel][base + offset : base + offset + length] = True
    return masks


def coverage(case: Case, runs: list[Run]) -> list[np.ndarray]:
    counts = [np.zeros(case.region_bytes, np.int32) for _ in range(case.geometry.num_channels)]
    for run in runs:
        assert run.remote_offset >= 0
        assert run.remote_offset + run.length <= case.region_bytes
        counts[run.region][run.remote_offset : run.remote_offset + run.length] += 1
    return counts


@settings(deadline=None, max_examples=50)
@given(cases(), st.data())
def test_plan_writes_every_byte_of_the_range_once_and_nothing_else(case: Case, data: st.DataObject) -> None:
    start, stop = data.draw(st.sampled_from(data.draw(splits(case.tokens))))
    counts = coverage(case, plan(case.geometry, case.bases, case.dst_blocks, start, stop))
    for count, mask in zip(counts, owned(case, start, stop), strict=True):
        assert np.array_equal(count, mask.astype(np.int32))


@settings(deadline=None, max_examples=50)
@given(cases())
def test_plan_on_poisoned_memory_gives_the_tensor_and_leaves_the_rest(case: Case) -> None:
    channels = case.poisoned()
    staging = reference.transform(*case.arguments(0, case.tokens))
    execute(channels, staging, plan(case.geometry, case.bases, case.dst_blocks, 0, case.tokens))
    for memory, mask in zip(channels, owned(case, 0, case.tokens), strict=True):
        assert (memory[~mask] == POISON).all()
    direct = case.poisoned()
    reference.transform_into(direct, case.bases, *case.arguments(0, case.tokens))
    for got, expected in zip(channels, direct, strict=True):
        assert np.array_equal(got, expected)


@settings(deadline=None, max_examples=50)
@given(cases())
def test_runs_consume_the_staging_buffer_in_order_and_whole(case: Case) -> None:
    runs = plan(case.geometry, case.bases, case.dst_blocks, 0, case.tokens)
    ends = np.cumsum([run.length for run in runs]).tolist()
    assert [run.local_offset for run in runs] == [0, *ends[:-1]]
    assert ends[-1] == reference.transform(*case.arguments(0, case.tokens)).size
    assert [run.region for run in runs] == sorted(run.region for run in runs)


@settings(deadline=None, max_examples=50)
@given(cases())
def test_no_fewer_runs_are_possible(case: Case) -> None:
    """A run per maximal stretch of owned bytes: where `bases` ascend, neighbours in memory share a run."""
    runs = plan(case.geometry, case.bases, case.dst_blocks, 0, case.tokens)
    stretches = 0
    for mask in owned(case, 0, case.tokens):
        stretches += int(np.diff(np.concatenate(([0], mask.astype(np.int8)))).clip(0).sum())
    assert len(runs) == stretches


@settings(deadline=None, max_examples=50)
@given(cases(layouts=("npu",), adjacent=True))
def test_adjacent_blocks_are_one_run_per_channel_and_tensor(case: Case) -> None:
    pool = case.geometry
    tokens = len(case.dst_blocks) * pool.block_size
    runs = plan(pool, case.bases, case.dst_blocks, 0, tokens, tensors=[0])
    pages = len(case.dst_blocks) * pool.pages_per_block
    assert len(runs) == min(pool.num_channels, pages)


def test_llama_70b_on_eight_channels_needs_one_run_per_channel() -> None:
    pool = KVGeometry(1, 2, 128, 64, 16, 8, "bfp8_b")
    runs = plan(pool, [0, pool.bank_bytes], [4, 5, 6, 7], 0, 256, tensors=[1])
    assert [(run.region, run.remote_offset, run.length) for run in runs] == [
        (channel, pool.bank_bytes + 4 * 2176, 4 * 2176) for channel in range(8)
    ]


def test_blocks_out_of_order_still_merge() -> None:
    pool = KVGeometry(1, 2, 128, 64, 16, 8, "bfp8_b")
    assert len(plan(pool, [0, pool.bank_bytes], [6, 4, 5, 7], 0, 256, tensors=[0])) == 8


@pytest.mark.parametrize(
    ("start", "stop", "message"),
    [(16, 64, "multiple of 32"), (32, 32, "non-empty"), (0, 129, "past"), (-32, 32, "multiple")],
)
def test_ranges_outside_the_lease_are_refused(start: int, stop: int, message: str) -> None:
    pool = KVGeometry(1, 1, 32, 32, 8, 2)
    with pytest.raises(ValueError, match=message):
        plan(pool, [0, pool.bank_bytes], [0, 1, 2, 3], start, stop)


def test_blocks_and_tensors_that_do_not_exist_are_refused() -> None:
    pool = KVGeometry(1, 1, 32, 32, 8, 2)
    bases = [0, pool.bank_bytes]
    with pytest.raises(ValueError, match="outside the pool's 8 blocks"):
        plan(pool, bases, [0, 8], 0, 64)
    with pytest.raises(ValueError, match="outside the pool"):
        plan(pool, bases, [-1], 0, 32)
    with pytest.raises(ValueError, match="tensors"):
        plan(pool, bases, [0], 0, 32, tensors=[2])
    with pytest.raises(ValueError, match="bases"):
        plan(pool, [0], [0], 0, 32)


@settings(deadline=None, max_examples=50)
@given(cases(layouts=("npu",)), st.data())
def test_contiguous_staging_filled_chunk_by_chunk_is_the_whole_lease(case: Case, data: st.DataObject) -> None:
    pool = case.geometry
    blocks = data.draw(st.integers(0, (case.tokens - 1) // pool.block_size))
    resident = blocks * pool.block_size
    length = contiguous_bytes(pool, case.tokens)
    receive = poison(length + 64)
    for start, stop in data.draw(splits(case.tokens - resident)):
        for tensors in ([0], list(range(1, pool.num_tensors))):
            where = (start + resident, stop + resident, tensors)
            chunk = reference.transform(pool, case.dst_blocks, case.source, case.src_blocks, *where)
            runs = plan_contiguous(pool, 0, case.dst_blocks, case.tokens, resident, *where)
            execute([receive], chunk, runs)
    whole = reference.transform(*case.arguments(resident, case.tokens))
    assert np.array_equal(receive[: whole.size], whole)
    assert (receive[whole.size :] == POISON).all()
    channels, expected = case.poisoned(), case.poisoned()
    scatter(channels, case.bases, pool, case.dst_blocks, receive, case.tokens, resident)
    reference.transform_into(expected, case.bases, *case.arguments(resident, case.tokens))
    for got, want in zip(channels, expected, strict=True):
        assert np.array_equal(got, want)


def test_staging_sizes() -> None:
    pool = KVGeometry(2, 3, 64, 32, 8, 7, "bfp8_b")
    assert linear_row_bytes(pool, "bfloat16") == 32 * 3 * 64 * 2
    assert linear_bytes(pool, "bfloat16", 32, 100, 4) == 4 * 96 * 3 * 64 * 2
    assert contiguous_bytes(pool, 100) == 4 * 4 * 3 * 2 * 1088


def test_the_plan_for_staging_refuses_tokens_outside_the_lease() -> None:
    case = build(KVGeometry(1, 1, 32, 32, 8, 2), PageLayout(1, 32, 32, dtype="float32"), 96)
    with pytest.raises(ValueError, match="outside the lease"):
        plan_contiguous(case.geometry, 0, case.dst_blocks, 96, 32, 0, 64)


def test_execute_refuses_to_leave_a_region() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        execute([np.zeros(64, np.uint8)], np.zeros(64, np.uint8), [Run(0, 0, 32, 64)])


def test_units_are_shared_and_cannot_be_spoilt() -> None:
    pool = KVGeometry(1, 1, 32, 32, 8, 2)
    units = units_in_range(pool, [3], 0, 32)
    assert units_in_range(pool, [3, 4], 0, 32) is units
    with pytest.raises(ValueError, match="read-only"):
        units.slots[0] = 1
