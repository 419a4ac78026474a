"""A Tenstorrent chip as an `NpuDevice`: memory by ttnn, bytes by tt-umd, dma-bufs by tt-kmd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from decode_worker.npu.base import BankUsage, Buffer, DmaMapping, TensorShape
from decode_worker.npu.tenstorrent.access import BankAccess
from decode_worker.npu.tenstorrent.export import Exports
from decode_worker.npu.tenstorrent.memory import DeviceMemory
from transport.errors import ConfigurationError
from transport.geometry.kv import KVDtype


class TenstorrentNpu:
    """One chip of an open mesh (`TenstorrentMesh` makes it). `read`, `write` and `barrier` may come from any thread;
    everything else is ttnn's and has one at a time.

    Allocating on a chip of a larger mesh allocates on all of its chips, at the same address. `exports` is None where
    there is no card; then `map_buffer_dma` raises ConfigurationError. `word`: address of four bytes in every bank that
    `barrier` may write. `bank_end`: the address behind a bank's last byte.
    """

    def __init__(
        self,
        name: str,
        memory: DeviceMemory,
        access: BankAccess,
        exports: Exports | None,
        *,
        word: int,
        bank_end: int,
        on_close: Callable[[], None],
    ) -> None:
        self.name = name
        self._memory, self._access, self._exports = memory, access, exports
        self._word, self._bank_end = word, bank_end
        self._on_close = on_close

    # ---- HAWK's five calls

    def map_buffer_dma(self, buffer: Buffer) -> list[DmaMapping]:
        allocation = self._memory.of(buffer)
        if self._exports is None:
            raise ConfigurationError(
                f"{self.name} has no memory that a NIC can write to: use --kv-path relay, by way of the host"
            )
        banks = range(self._memory.num_banks) if buffer.bank is None else [buffer.bank]
        mappings = self._exports.map(banks, buffer.address, allocation.size, self._memory.span())
        allocation.maps += 1
        return mappings

    def unmap_buffer_dma(self, buffer: Buffer) -> None:
        allocation = self._memory.of(buffer)
        if not allocation.maps:
            raise ValueError(f"buffer {buffer.id} is not mapped")
        allocation.maps -= 1

    def get_device_num_bank(self) -> int:
        return self._memory.num_banks

    def get_buffer_address_bank(self, buffer: Buffer, bank: int) -> int:
        self.get_buffer_size_bank(buffer, bank)
        return buffer.address

    def get_buffer_size_bank(self, buffer: Buffer, bank: int) -> int:
        self._check_bank(bank)
        size = self._memory.of(buffer).size
        return size if buffer.bank in (None, bank) else 0

    # ---- memory

    def allocate_tensor(self, shape: TensorShape, dtype: KVDtype) -> Buffer:
        return self._memory.allocate_tensor(shape, dtype)

    def allocate_contiguous(self, num_bytes: int) -> Buffer:
        return self._memory.allocate_contiguous(num_bytes)

    def free(self, buffer: Buffer) -> None:
        self._memory.free(buffer)

    def tensor(self, buffer: Buffer) -> Any:
        """The ttnn tensor of a buffer from `allocate_tensor`, for the engine's ops."""
        return self._memory.of(buffer).tensor

    def read(self, bank: int, address: int, length: int) -> np.ndarray:
        self._check_range(bank, address, length)
        return self._access.read(bank, address, length)

    def write(self, bank: int, address: int, data: np.ndarray) -> None:
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self._check_range(bank, address, raw.nbytes)
        self._access.write(bank, address, raw)

    def barrier(self) -> None:
        """Sends a word behind the writes of NIC and host, by the ports that they take, and waits until it is back."""
        self._access.flush(self._word, self._exports.ports if self._exports is not None else None)

    def memory_view(self) -> list[BankUsage]:
        return self._memory.usage()

    def host_channels(self) -> None:
        return None

    def close(self) -> None:
        """Close the mesh that it is a chip of. Idempotent."""
        self._on_close()

    # ---- helpers

    def _check_bank(self, bank: int) -> None:
        if not 0 <= bank < self._memory.num_banks:
            raise ValueError(f"bank must be in 0…{self._memory.num_banks - 1}, got {bank}")

    def _check_range(self, bank: int, address: int, length: int) -> None:
        self._check_bank(bank)
        low, high = self._memory.base, self._bank_end
        if length < 0 or not low <= address <= address + length <= high:
            raise ValueError(f"[{address}, {address + length}) is outside of a bank's [{low}, {high})")
