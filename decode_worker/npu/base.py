"""The NPU device protocol: allocation over DRAM channels, access, and HAWK's five calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from transport.geometry.kv import TILE, TILE_BYTES, KVDtype

TensorShape = tuple[int, int, int, int]
"""(num_blocks, heads, block_size, head_dim) of one K or V tensor."""


class OutOfDeviceMemory(MemoryError):
    """No bank range of the asked-for size is free in the banks that need it."""


class NpuMemoryError(RuntimeError):
    """Device memory could not be read or written."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Device memory as the allocator gives it: `num_pages` pages dealt round-robin over the banks.

    `address` is the same in every bank; `bank` is set for a buffer that lies whole in one bank.
    """

    id: int
    address: int
    num_pages: int
    page_bytes: int
    bank: int | None = None


@dataclass(frozen=True, slots=True)
class DmaMapping:
    """What the NIC (or a same-host writer) needs to reach one bank of a mapped buffer.

    `fd` is a dma-buf or memfd (owned by the mapping), `offset` the byte in it where the bank's share starts.
    """

    bank: int
    fd: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class BankUsage:
    """Bytes of one DRAM bank."""

    total: int
    used: int
    largest_free: int


def tiles_of(shape: TensorShape, dtype: KVDtype) -> tuple[int, int]:
    """(number of pages, bytes of one) of a tensor in tiles. Raises ValueError where `shape` is not made of tiles."""
    blocks, heads, rows, columns = shape
    if min(shape) <= 0 or rows % TILE or columns % TILE:
        raise ValueError(f"shape {shape}: sizes must be positive, the last two multiples of {TILE}")
    if dtype not in TILE_BYTES:
        raise ValueError(f"dtype must be one of {', '.join(TILE_BYTES)}, got {dtype}")
    return blocks * heads * (rows // TILE) * (columns // TILE), TILE_BYTES[dtype]


class NpuDevice(Protocol):
    """One NPU. Raises OutOfDeviceMemory where memory does not suffice, ValueError on a bad argument, NpuMemoryError
    where the device does not answer."""

    name: str

    # ---- HAWK's five calls
    def map_buffer_dma(self, buffer: Buffer) -> list[DmaMapping]:
        """Make the buffer reachable for one-sided writes, one mapping per bank it occupies.

        Raises ConfigurationError, with what to do, where the device cannot.
        """

    def unmap_buffer_dma(self, buffer: Buffer) -> None: ...

    def get_device_num_bank(self) -> int: ...

    def get_buffer_address_bank(self, buffer: Buffer, bank: int) -> int: ...

    def get_buffer_size_bank(self, buffer: Buffer, bank: int) -> int: ...

    # ---- memory
    def allocate_tensor(self, shape: TensorShape, dtype: KVDtype) -> Buffer:
        """A tensor in 32x32 tiles, one page each, interleaved over all banks in lockstep.

        `shape` is (num_blocks, heads, block_size, head_dim), the last two multiples of 32. A dtype that the device
        has no tiles of is a ValueError.
        """

    def allocate_contiguous(self, num_bytes: int) -> Buffer:
        """Whole in one bank: the contiguous receive buffer of the ablation."""

    def free(self, buffer: Buffer) -> None: ...

    def read(self, bank: int, address: int, length: int) -> np.ndarray:
        """uint8 copy of `length` bytes."""

    def write(self, bank: int, address: int, data: np.ndarray) -> None: ...

    def barrier(self) -> None:
        """After it, bytes that the NIC has completed are visible to the device's cores."""

    def memory_view(self) -> list[BankUsage]: ...

    def host_channels(self) -> list[np.ndarray] | None:
        """uint8 mappings of every whole bank where the host can address them, else None."""

    def close(self) -> None: ...
