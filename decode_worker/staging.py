"""Room in the staging region of kv_path host and contiguous: some slots per lease, until its KV is in its blocks."""

from __future__ import annotations

from dataclasses import dataclass

from decode_worker.npu.allocator import BankAllocator
from decode_worker.npu.base import OutOfDeviceMemory
from transport.errors import Overloaded


@dataclass(frozen=True, slots=True)
class Slots:
    """`count` slots of `slot_bytes` each, one behind the other from `offset` of the staging region on."""

    offset: int
    count: int
    slot_bytes: int

    @property
    def length(self) -> int:
        return self.count * self.slot_bytes

    def of(self, piece: int) -> int:
        """Offset of the slot of the n-th announced piece."""
        return self.offset + piece % self.count * self.slot_bytes


class StagingArea:
    """First fit over `size` bytes; ranges are 64-byte aligned."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._allocator = BankAllocator(1, size)

    def take(self, count: int, slot_bytes: int) -> Slots:
        """Raises Overloaded if there is no room for so many slots now."""
        length = count * slot_bytes
        try:
            return Slots(self._allocator.lockstep(length), count, slot_bytes)
        except OutOfDeviceMemory:
            raise Overloaded(
                f"staging buffer full: {length} bytes asked for, {self.free} of {self.size} free"
            ) from None

    def give(self, slots: Slots) -> None:
        self._allocator.release(slots.offset, slots.length, None)

    @property
    def free(self) -> int:
        usage = self._allocator.usage()[0]
        return usage.total - usage.used
