"""DRAM of a Tenstorrent device as ttnn's allocator deals it out: tensors, single-bank buffers, what is used."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from decode_worker.npu.base import BankUsage, Buffer, OutOfDeviceMemory, TensorShape, tiles_of
from transport.geometry.kv import KVDtype

DTYPES: dict[KVDtype, str] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "bfp8_b": "bfloat8_b",
    "bfp4_b": "bfloat4_b",
}
"""ttnn's names."""

WORD = 4
"""Bytes of an element of a single-bank buffer, a ttnn tensor of uint32."""


@dataclass(slots=True)
class _Allocation:
    buffer: Buffer
    size: int
    """Bytes per bank that it occupies."""
    tensor: Any
    maps: int = 0


class DeviceMemory:
    """Allocates on `device`, an open ttnn MeshDevice: on each of its chips the same, at the same addresses.

    Not thread-safe, as ttnn's allocator is not.
    """

    def __init__(self, device: Any) -> None:
        import ttnn

        self._ttnn = ttnn
        self._device = device
        self._allocations: dict[int, _Allocation] = {}
        self._next_id = 1
        self._words: Any = None
        self.num_banks = int(device.dram_grid_size().x)
        self.base = int(ttnn._ttnn.device.GetAllocatorBaseAddress(device, ttnn.BufferType.DRAM))
        """The lowest address that tensors get."""

    def allocate_tensor(self, shape: TensorShape, dtype: KVDtype) -> Buffer:
        """Interleaved DRAM in tiles; `shape` is what each chip has. Raises OutOfDeviceMemory, ValueError."""
        ttnn = self._ttnn
        num_pages, page_bytes = tiles_of(shape, dtype)
        with _out_of_memory():
            tensor = ttnn.allocate_tensor_on_device(
                ttnn.Shape(shape), getattr(ttnn, DTYPES[dtype]), ttnn.TILE_LAYOUT, self._device, ttnn.DRAM_MEMORY_CONFIG
            )
        found = (tensor.buffer_num_pages(), tensor.buffer_aligned_page_size())
        if found != (num_pages, page_bytes):
            raise ValueError(
                f"ttnn has (pages, bytes of a page) {found} for a {dtype} {shape}, not {num_pages, page_bytes}"
            )
        return self._record(tensor, num_pages, page_bytes, -(-num_pages // self.num_banks) * page_bytes, None)

    def allocate_contiguous(self, num_bytes: int) -> Buffer:
        """Whole in one bank: a tensor of one page, sharded to one DRAM core. Rounded up to ttnn's alignment.

        ttnn's allocator keeps one book for all banks: the same range of the other banks is taken too, unused.
        """
        ttnn = self._ttnn
        if num_bytes <= 0:
            raise ValueError(f"num_bytes must be positive, got {num_bytes}")
        bank = min(range(self.num_banks), key=self._contiguous_in)
        core = ttnn.CoreCoord(bank, 0)
        words = -(-num_bytes // WORD)
        shard = ttnn.ShardSpec(
            ttnn.CoreRangeSet([ttnn.CoreRange(core, core)]), [1, words], ttnn.ShardOrientation.ROW_MAJOR
        )
        config = ttnn.MemoryConfig(ttnn.TensorMemoryLayout.HEIGHT_SHARDED, ttnn.BufferType.DRAM, shard)
        with _out_of_memory():
            tensor = ttnn.allocate_tensor_on_device(
                ttnn.Shape((1, 1, 1, words)), ttnn.uint32, ttnn.ROW_MAJOR_LAYOUT, self._device, config
            )
        return self._record(tensor, 1, num_bytes, tensor.buffer_aligned_page_size(), bank)

    def allocate_words(self) -> int:
        """Address of 64 bytes in every bank that nobody else has; they stay until `close`."""
        ttnn = self._ttnn
        with _out_of_memory():
            self._words = ttnn.allocate_tensor_on_device(
                ttnn.Shape((1, 1, self.num_banks, 64 // WORD)),
                ttnn.uint32,
                ttnn.ROW_MAJOR_LAYOUT,
                self._device,
                ttnn.DRAM_MEMORY_CONFIG,
            )
        return int(self._words.buffer_address())

    def free(self, buffer: Buffer) -> None:
        allocation = self.of(buffer)
        if allocation.maps:
            raise ValueError(f"buffer {buffer.id} is still mapped for DMA")
        del self._allocations[buffer.id]
        allocation.tensor.deallocate()

    def of(self, buffer: Buffer) -> _Allocation:
        found = self._allocations.get(buffer.id)
        if found is None or found.buffer != buffer:
            raise ValueError(f"buffer {buffer.id} is not allocated here")
        return found

    def span(self) -> tuple[int, int]:
        """(lowest address, first address behind) of all that is allocated; it is the same in every bank."""
        live = self._allocations.values()
        return min(a.buffer.address for a in live), max(a.buffer.address + a.size for a in live)

    def usage(self) -> list[BankUsage]:
        """ttnn's own answer: the same for every bank."""
        view = self._ttnn._ttnn.device.GetMemoryView(self._device, self._ttnn.BufferType.DRAM)
        usage = BankUsage(
            view.total_bytes_per_bank,
            view.total_bytes_allocated_per_bank,
            view.largest_contiguous_bytes_free_per_bank,
        )
        return [usage] * self.num_banks

    def close(self) -> None:
        """Free everything; the device stays open."""
        for allocation in self._allocations.values():
            allocation.tensor.deallocate()
        self._allocations.clear()
        if self._words is not None:
            self._words.deallocate()
            self._words = None

    # ---- helpers

    def _record(self, tensor: Any, num_pages: int, page_bytes: int, size: int, bank: int | None) -> Buffer:
        buffer = Buffer(self._next_id, int(tensor.buffer_address()), num_pages, page_bytes, bank)
        self._next_id += 1
        self._allocations[buffer.id] = _Allocation(buffer, size, tensor)
        return buffer

    def _contiguous_in(self, bank: int) -> int:
        return sum(a.size for a in self._allocations.values() if a.buffer.bank == bank)


@contextmanager
def _out_of_memory() -> Iterator[None]:
    """ttnn has one exception for everything; its text tells."""
    try:
        yield
    except RuntimeError as error:
        found = re.search(r"Out of Memory: [^\n]*", str(error))
        if found is None:
            raise
        raise OutOfDeviceMemory(found[0]) from None
