"""A KV pool on windows of a card that kmd_shim.c plays, with a NIC over it: what kmd_programs.py is to the driver."""

from __future__ import annotations

import mmap
import random
from typing import Any

from kmd_programs import BANKS, CARD, dma_write, main, nonzero, wipe, written

from decode_worker.npu.base import Buffer, DmaMapping
from decode_worker.npu.emulated import EmulatedNpu
from decode_worker.npu.tenstorrent.kmd import abi
from decode_worker.npu.tenstorrent.kmd.driver import TenstorrentDriver
from decode_worker.npu.tenstorrent.kmd.windows import BankWindows
from decode_worker.pool import KVPool
from transport.backends.verbs.regions import RegisteredRegions
from transport.geometry import KVGeometry
from transport.messages import Endpoint, ModelInfo


class Card8(EmulatedNpu):
    """Addresses as the emulator gives them; the memory behind them is the card's, by its windows."""

    def __init__(self, windows: BankWindows) -> None:
        super().__init__(8)
        self.windows = windows
        self.allocate_contiguous(4160)  # the pool starts in the middle of a page of bank 0

    def map_buffer_dma(self, buffer: Buffer) -> list[DmaMapping]:
        size = self.get_buffer_size_bank(buffer, 0)
        return [m for bank in range(8) for m in self.windows.mappings(bank, buffer.address, size)]

    def unmap_buffer_dma(self, buffer: Buffer) -> None:
        pass


class FakeRegistration:
    """A dma-buf's memory region as a NIC has it: its addresses begin at `offset`."""

    def __init__(self, fd: int, offset: int, length: int) -> None:
        assert CARD.kmd_import(fd, 1) == 0
        self.fd, self.address, self.length = fd, offset, length

    def close(self) -> None:
        assert CARD.kmd_import(self.fd, -1) == 0

    def write(self, address: int, data: bytes) -> None:
        """What a peer's RDMA write to `address` does."""
        assert self.address <= address
        assert address + len(data) <= self.address + self.length, "outside the memory region"
        assert dma_write(self.fd, address, data) == 0


class FakeNic:
    def register_dmabuf(self, fd: int, offset: int, length: int, *, remote_write: bool) -> FakeRegistration:
        assert remote_write
        assert offset % mmap.PAGESIZE == 0
        return FakeRegistration(fd, offset, length)


def pool_over_a_nic() -> int:
    """A pool's regions, registered by a NIC as the verbs data plane does it, and written as a peer addresses them.

    Returns how many ranges have arrived where the device has them.
    """
    geometry = KVGeometry(2, 2, 64, 32, 40, 8, "bfp8_b")
    model = ModelInfo(name="m", fingerprint="f", max_model_len=512, vocab_size=10)
    rng = random.Random(1)
    arrived = 0
    with TenstorrentDriver.open() as driver:
        windows = BankWindows(driver, BANKS, [(0, abi.GIB_4)] * 8, single=True)
        device = Card8(windows)
        pool = KVPool(device, geometry)
        described = pool.description("d", "g", Endpoint(backend="verbs", address="d:1"), model)
        nics: list[Any] = [FakeNic(), FakeNic()]
        registered = RegisteredRegions(nics, pool.handed_out())
        size = -(-geometry.num_pages // 8) * geometry.page_bytes
        for keys in registered.keys:
            for base, address in zip(described.bases, pool.bases, strict=True):
                for bank, key in enumerate(keys):
                    at = rng.randrange(size - 100)
                    key.write(key.address + base + at, nonzero(rng, 100)[:100])  # type: ignore[attr-defined]
                    assert written(bank) == [(address + at, address + at + 100)]
                    wipe(bank)
                    arrived += 1
        registered.close()
        pool.close()
        windows.close()
        device.close()
    return arrived


if __name__ == "__main__":
    main(globals())
