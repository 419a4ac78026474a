"""Room in the receive buffer of kv_path host and contiguous: one range per lease until it is re-laid-out."""

from __future__ import annotations

from decode_worker.npu.allocator import BankAllocator
from decode_worker.npu.base import OutOfDeviceMemory
from transport.errors import Overloaded


class StagingArea:
    """First fit over `size` bytes; ranges are 64-byte aligned."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._allocator = BankAllocator(1, size)

    def take(self, length: int) -> int:
        """Offset of `length` free bytes. Raises Overloaded if there are none now."""
        try:
            return self._allocator.lockstep(length)
        except OutOfDeviceMemory:
            raise Overloaded(
                f"staging buffer full: {length} bytes asked for, {self.free} of {self.size} free"
            ) from None

    def give(self, offset: int, length: int) -> None:
        self._allocator.release(offset, length, None)

    @property
    def free(self) -> int:
        usage = self._allocator.usage()[0]
        return usage.total - usage.used
