"""The emulated NPU: addresses as a p150a gives them, and running out of memory as it would."""

from __future__ import annotations

import mmap
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.npu.base import OutOfDeviceMemory
from decode_worker.npu.emulated import EmulatedNpu
from transport.geometry import KVGeometry
from transport.geometry.kv import TILE_BYTES

KIB = 1024


@pytest.fixture
def npu():
    device = EmulatedNpu(8, 64 * KIB)
    yield device
    device.close()


def test_interleaved_buffer_has_one_address_and_share_in_every_bank(npu: EmulatedNpu) -> None:
    first, second = npu.allocate(9, 1088), npu.allocate(8, 64)
    assert [npu.get_buffer_address_bank(second, b) for b in range(8)] == [2 * 1088] * 8
    assert [npu.get_buffer_size_bank(first, b) for b in range(8)] == [2 * 1088] * 8  # ceil(9 / 8) pages


@pytest.mark.parametrize(
    ("shape", "dtype", "pages"),
    [((5, 3, 32, 64), "bfp8_b", 30), ((2, 1, 64, 32), "bfloat16", 4), ((1, 1, 32, 32), "float32", 1)],
)
def test_a_tensor_is_one_page_per_tile(npu: EmulatedNpu, shape, dtype, pages: int) -> None:
    geometry = KVGeometry(1, shape[1], shape[3], shape[2], shape[0], 8, dtype)
    buffer = npu.allocate_tensor(shape, dtype)
    assert (
        (buffer.num_pages, buffer.page_bytes) == (pages, geometry.page_bytes) == (geometry.num_pages, TILE_BYTES[dtype])
    )
    assert npu.get_buffer_size_bank(buffer, 7) == geometry.bank_bytes
    assert npu.allocate_tensor(shape, dtype).address == geometry.bank_bytes


@pytest.mark.parametrize("banks", [7, 8])
def test_five_calls_reach_the_memory_that_read_and_write_see(banks: int) -> None:
    npu = EmulatedNpu(banks, 64 * KIB)
    buffer = npu.allocate(banks * 3, 2048)
    assert npu.get_device_num_bank() == banks
    mappings = npu.map_buffer_dma(buffer)
    assert [m.bank for m in mappings] == list(range(banks))
    for m in mappings:
        assert m.length == npu.get_buffer_size_bank(buffer, m.bank) == 3 * 2048
        writer = mmap.mmap(m.fd, 64 * KIB)
        writer[m.offset : m.offset + 4] = bytes([m.bank, 1, 2, 3])
        assert npu.read(m.bank, npu.get_buffer_address_bank(buffer, m.bank), 4).tolist() == [m.bank, 1, 2, 3]
    npu.write(2, buffer.address, np.array([1.5], np.float32))
    assert npu.host_channels()[2][:4].view(np.float32)[0] == 1.5
    npu.unmap_buffer_dma(buffer)
    npu.free(buffer)
    npu.close()


def test_a_mapped_buffer_cannot_be_freed(npu: EmulatedNpu) -> None:
    buffer = npu.allocate(8, 64)
    npu.map_buffer_dma(buffer)
    with pytest.raises(ValueError, match="still mapped"):
        npu.free(buffer)
    npu.unmap_buffer_dma(buffer)
    npu.free(buffer)
    with pytest.raises(ValueError, match="not allocated"):
        npu.free(buffer)


def test_contiguous_buffers_fill_banks_unevenly_and_starve_interleaved_ones(npu: EmulatedNpu) -> None:
    """The paper's finding: direct writes into one contiguous buffer run out of memory while there is room."""
    kept = [npu.allocate_contiguous(size * KIB) for size in (60, 4, 4, 4, 4, 4, 4, 4)]
    assert len({b.bank for b in kept}) == 8
    view = npu.memory_view()
    free = sum(bank.total - bank.used for bank in view)
    wanted = 8 * 8 * KIB
    assert free > 6 * wanted
    with pytest.raises(OutOfDeviceMemory, match="no common range"):
        npu.allocate(8, 8 * KIB)
    npu.free(kept[0])
    assert npu.get_buffer_size_bank(npu.allocate(8, 8 * KIB), 0) == 8 * KIB


def test_contiguous_buffer_is_mapped_in_its_bank_alone(npu: EmulatedNpu) -> None:
    npu.allocate_contiguous(KIB)
    buffer = npu.allocate_contiguous(KIB)
    assert buffer.bank == 1  # bank 0 is the more used one
    assert [m.bank for m in npu.map_buffer_dma(buffer)] == [1]
    assert [npu.get_buffer_size_bank(buffer, b) for b in range(3)] == [0, KIB, 0]


def test_bank_memory_costs_nothing_until_touched() -> None:
    npu = EmulatedNpu()  # 8 banks of almost 4 GiB
    npu.allocate(8, 2048 * KIB)
    assert npu.memory_view()[0].total == 4_277_141_376
    npu.close()


def test_barriers_are_counted(npu: EmulatedNpu) -> None:
    npu.barrier()
    npu.barrier()
    assert npu.barriers == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda n: n.allocate(0, 64), "positive"),
        (lambda n: n.allocate(1, 100), "multiple of 64"),
        (lambda n: n.allocate_tensor((1, 1, 16, 32), "bfloat16"), "multiples of 32"),
        (lambda n: n.allocate_tensor((0, 1, 32, 32), "bfloat16"), "positive"),
        (lambda n: n.allocate_tensor((1, 1, 32, 32), "float16"), "dtype must be one of"),
        (lambda n: n.allocate_contiguous(-1), "positive"),
        (lambda n: n.read(8, 0, 1), "bank must be in"),
        (lambda n: n.read(0, 64 * KIB - 1, 2), "outside"),
        (lambda n: n.write(0, -1, np.zeros(1, np.uint8)), "outside"),
        (lambda n: n.get_buffer_size_bank(n.allocate(1, 64), 9), "bank must be in"),
        (lambda n: n.unmap_buffer_dma(n.allocate(1, 64)), "not mapped"),
    ],
)
def test_bad_arguments_are_refused(npu: EmulatedNpu, call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(npu)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["lock", "one", "free"]), st.integers(1, 9), st.integers(0, 30)), max_size=40)
)
def test_live_buffers_never_overlap_and_all_memory_comes_back(steps) -> None:
    npu = EmulatedNpu(3, 4 * KIB)
    live = []
    try:
        for kind, size, pick in steps:
            try:
                if kind == "lock":
                    live.append(npu.allocate(size, 64))
                elif kind == "one":
                    live.append(npu.allocate_contiguous(size * 50))
                elif live:
                    npu.free(live.pop(pick % len(live)))
            except OutOfDeviceMemory:
                pass
            for bank in range(3):
                spans = sorted((b.address, npu.get_buffer_size_bank(b, bank)) for b in live)
                spans = [(a, s) for a, s in spans if s]
                assert all(a + s <= b for (a, s), (b, _) in pairwise(spans))
                assert all(a % 64 == 0 and a + s <= 4 * KIB for a, s in spans)
        for buffer in live:
            npu.free(buffer)
        assert all(u.used == 0 and u.largest_free == u.total for u in npu.memory_view())
    finally:
        npu.close()
