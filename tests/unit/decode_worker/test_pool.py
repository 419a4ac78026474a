"""The pool's memory as writers get to know it, and configurations that cannot work."""

from __future__ import annotations

import pytest

from decode_worker.npu.base import Buffer, DmaMapping
from decode_worker.npu.emulated import EmulatedNpu
from decode_worker.pool import KVPool
from transport.errors import ConfigurationError
from transport.geometry import KVGeometry
from transport.messages import Endpoint, ModelInfo, PoolDescription

GEOMETRY = KVGeometry(2, 2, 64, 32, 16, 4, "bfloat16")
ROW = 32 * 2 * 64 * 2
"""Bytes of a tile row of one tensor, staged in bf16."""


class Unreachable(EmulatedNpu):
    """An NPU whose memory neither peers nor the host can address."""

    def map_buffer_dma(self, buffer: Buffer) -> list[DmaMapping]:
        raise NotImplementedError("no peer-to-peer on this device")

    def host_channels(self) -> None:  # type: ignore[override]
        return None


class Windowed(EmulatedNpu):
    """An NPU that shows bank b from address `windows[b]` on, as a dma-buf of a window does."""

    windows = (0, 4096, 0, 8192)

    def map_buffer_dma(self, buffer: Buffer) -> list[DmaMapping]:
        whole = super().map_buffer_dma(buffer)
        return [DmaMapping(m.bank, 100 + m.bank, m.offset - self.windows[m.bank], m.length) for m in whole]


def pool_on(device: EmulatedNpu, **options: object) -> KVPool:
    return KVPool(device, GEOMETRY, **options)  # type: ignore[arg-type]


def description(pool: KVPool) -> PoolDescription:
    model = ModelInfo(name="m", fingerprint="f", max_model_len=512, vocab_size=10)
    return pool.description("d0", "g", Endpoint(backend="shm", address="/nowhere"), model)


def test_a_device_without_peer_to_peer_has_the_host_path() -> None:
    device = Unreachable(4, 1 << 20)
    pool = pool_on(device, kv_path="host", staging_size=1 << 20, slot_bytes=ROW)
    described = description(pool)
    assert described.channels == ()
    assert described.staging is not None
    assert [region for region, _, _ in pool.handed_out()] == [described.staging]
    pool.close()
    assert all(bank.used == 0 for bank in device.memory_view())
    with pytest.raises(ConfigurationError, match="contiguous: the host cannot address"):
        pool_on(Unreachable(4, 1 << 20), kv_path="contiguous", staging_size=1 << 12)


def test_each_banks_region_starts_where_its_dma_buf_has_the_pool() -> None:
    """A writer adds the same offsets to every region, wherever the windows begin."""
    device = Windowed(4, 1 << 20)
    device.allocate(4, 8256)  # so that the pool does not start on a page
    pool = pool_on(device)
    described = description(pool)
    assert described.bases[0] == 8256 - 8192
    assert described.bases[1] - described.bases[0] == GEOMETRY.bank_bytes
    assert [(fd, offset) for _, fd, offset in pool.handed_out()] == [(100, 8192), (101, 4096), (102, 8192), (103, 0)]
    assert {region.length for region, _, _ in pool.handed_out()} == {described.bases[-1] + GEOMETRY.bank_bytes}


def test_a_bank_in_several_pieces_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Windowed(4, 1 << 20)
    real = device.map_buffer_dma
    fds = iter(range(100, 1000))

    def apart(buffer: Buffer) -> list[DmaMapping]:
        return [DmaMapping(m.bank, next(fds), m.offset, m.length) for m in real(buffer)]

    monkeypatch.setattr(device, "map_buffer_dma", apart)
    device.allocate(4, 8256)
    with pytest.raises(ConfigurationError, match=r"shows bank 0 in several pieces.*--kv-path relay"):
        pool_on(device)


def test_the_description_asks_for_checksums_where_the_pool_does() -> None:
    assert not description(pool_on(EmulatedNpu(4, 1 << 20))).checksum
    assert description(pool_on(EmulatedNpu(4, 1 << 20), checksum=True)).checksum


def test_slots_are_whole_tile_rows_and_no_larger_than_the_prompt_needs() -> None:
    options = {"kv_path": "host", "staging_size": 1 << 20, "slots": 4, "slot_bytes": 5 * ROW + 1}
    pool = pool_on(EmulatedNpu(4, 1 << 20), **options)
    assert pool.staging_room(512, 0) == (4, 5 * ROW)
    assert pool.staging_room(32, 0) == (4, 4 * ROW)  # one row of each of four tensors
    assert pool.staging_room(512, 480) == (4, 4 * ROW)
    assert pool.staging_room(64, 64) == (4, 4 * ROW)  # nothing will come, but a lease has a place


def test_slots_that_cannot_work_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=f"staging_slot_bytes must be at least {ROW}"):
        pool_on(EmulatedNpu(4, 1 << 20), kv_path="host", staging_size=1 << 20, slot_bytes=ROW - 1)
    with pytest.raises(ConfigurationError, match=r"3 staging slots of 32768 bytes.*do not fit into 65536 bytes"):
        pool_on(EmulatedNpu(4, 1 << 20), kv_path="host", staging_size=1 << 16, slot_bytes=4 * ROW)
