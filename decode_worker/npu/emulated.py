"""An NPU made of host memory: one memfd per DRAM channel, the same addresses a real device would give."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field

import numpy as np

from decode_worker.npu.allocator import ALIGNMENT, BankAllocator
from decode_worker.npu.base import BankUsage, Buffer, DmaMapping, TensorShape, tiles_of
from transport.geometry.kv import KVDtype

P150A_BANKS = 8
P150A_BANK_BYTES = 4_277_141_376
"""Allocatable bytes of one p150a DRAM bank (4 GiB less what the firmware keeps)."""


@dataclass(slots=True)
class _Allocation:
    buffer: Buffer
    size: int
    """Bytes per occupied bank."""
    maps: int = field(default=0)


class EmulatedNpu:
    """`NpuDevice` over memfds. Pages that nobody touched cost no memory. Not thread-safe, but `read`,
    `write`, `barrier` and the host mappings may be used from any thread.

    `barriers` counts `barrier()` calls: host memory is coherent, so that is all the call does here.
    """

    def __init__(
        self, num_banks: int = P150A_BANKS, bank_bytes: int = P150A_BANK_BYTES, *, name: str = "emulated"
    ) -> None:
        self.name = name
        self.barriers = 0
        self._bank_bytes = bank_bytes
        self._allocator = BankAllocator(num_banks, bank_bytes)
        self._allocations: dict[int, _Allocation] = {}
        self._next_id = 1
        self._fds: list[int] = []
        self._channels: list[np.ndarray] = []
        for bank in range(num_banks):
            fd = os.memfd_create(f"{name}-dram{bank}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._fds.append(fd)
            os.ftruncate(fd, bank_bytes)
            self._channels.append(np.frombuffer(mmap.mmap(fd, bank_bytes), dtype=np.uint8))

    # ---- HAWK's five calls

    def map_buffer_dma(self, buffer: Buffer) -> list[DmaMapping]:
        allocation = self._allocation(buffer)
        allocation.maps += 1
        banks = range(len(self._fds)) if buffer.bank is None else [buffer.bank]
        return [DmaMapping(b, self._fds[b], buffer.address, allocation.size) for b in banks]

    def unmap_buffer_dma(self, buffer: Buffer) -> None:
        allocation = self._allocation(buffer)
        if not allocation.maps:
            raise ValueError(f"buffer {buffer.id} is not mapped")
        allocation.maps -= 1

    def get_device_num_bank(self) -> int:
        return len(self._fds)

    def get_buffer_address_bank(self, buffer: Buffer, bank: int) -> int:
        self._size_in(buffer, bank)
        return buffer.address

    def get_buffer_size_bank(self, buffer: Buffer, bank: int) -> int:
        return self._size_in(buffer, bank)

    # ---- memory

    def allocate_tensor(self, shape: TensorShape, dtype: KVDtype) -> Buffer:
        return self.allocate(*tiles_of(shape, dtype))

    def allocate(self, num_pages: int, page_bytes: int) -> Buffer:
        """Pages of any aligned size, interleaved over all banks in lockstep."""
        if num_pages <= 0 or page_bytes <= 0:
            raise ValueError(f"num_pages and page_bytes must be positive, got {num_pages} and {page_bytes}")
        if page_bytes % ALIGNMENT:
            raise ValueError(f"page_bytes must be a multiple of {ALIGNMENT}, got {page_bytes}")
        size = -(-num_pages // len(self._fds)) * page_bytes
        return self._record(self._allocator.lockstep(size), num_pages, page_bytes, size, None)

    def allocate_contiguous(self, num_bytes: int) -> Buffer:
        bank, address = self._allocator.single(num_bytes)
        return self._record(address, 1, num_bytes, num_bytes, bank)

    def free(self, buffer: Buffer) -> None:
        allocation = self._allocation(buffer)
        if allocation.maps:
            raise ValueError(f"buffer {buffer.id} is still mapped for DMA")
        del self._allocations[buffer.id]
        self._allocator.release(buffer.address, allocation.size, buffer.bank)

    def read(self, bank: int, address: int, length: int) -> np.ndarray:
        return self._range(bank, address, length).copy()

    def write(self, bank: int, address: int, data: np.ndarray) -> None:
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self._range(bank, address, raw.nbytes)[:] = raw

    def barrier(self) -> None:
        self.barriers += 1

    def memory_view(self) -> list[BankUsage]:
        return self._allocator.usage()

    def host_channels(self) -> list[np.ndarray]:
        return list(self._channels)

    def close(self) -> None:
        """Drop the memory; views handed out by `host_channels` keep theirs. Idempotent."""
        for fd in self._fds:
            os.close(fd)
        self._fds, self._channels = [], []
        self._allocations.clear()

    # ---- helpers

    def _record(self, address: int, num_pages: int, page_bytes: int, size: int, bank: int | None) -> Buffer:
        buffer = Buffer(self._next_id, address, num_pages, page_bytes, bank)
        self._next_id += 1
        self._allocations[buffer.id] = _Allocation(buffer, size)
        return buffer

    def _allocation(self, buffer: Buffer) -> _Allocation:
        found = self._allocations.get(buffer.id)
        if found is None or found.buffer != buffer:
            raise ValueError(f"buffer {buffer.id} is not allocated on {self.name}")
        return found

    def _size_in(self, buffer: Buffer, bank: int) -> int:
        if not 0 <= bank < len(self._fds):
            raise ValueError(f"bank must be in 0…{len(self._fds) - 1}, got {bank}")
        size = self._allocation(buffer).size
        return size if buffer.bank in (None, bank) else 0

    def _range(self, bank: int, address: int, length: int) -> np.ndarray:
        if not 0 <= bank < len(self._channels):
            raise ValueError(f"bank must be in 0…{len(self._channels) - 1}, got {bank}")
        if address < 0 or length < 0 or address + length > self._bank_bytes:
            raise ValueError(f"[{address}, {address + length}) is outside a bank of {self._bank_bytes} bytes")
        return self._channels[bank][address : address + length]
