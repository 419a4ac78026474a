"""Memory that a backend sends from: one area per process, filled by pushing threads, given back once it is sent."""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from transport.errors import ConfigurationError, PushFailed
from transport.kernels.source import LINE, address

_WIPEONFORK = 18
"""Linux's MADV_WIPEONFORK, without a name in `mmap`. A child shares no page that a NIC reads, and yet has no hole
there: the end of its copy of the mapping would otherwise unmap whatever it had put in that place meanwhile."""
POLL_S = 0.1
"""How often a thread that waits for room looks whether its lease is still worth waiting for."""


class StagingMemory:
    """`size` bytes of this process, empty in its children, dealt out first fit on cache lines. Thread-safe.

    Raises ConfigurationError if the memory cannot be had.
    """

    def __init__(self, size: int) -> None:
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            memory = mmap.mmap(-1, self.size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"no {size} bytes of staging memory to be had: {error}") from error
        for advice in (_WIPEONFORK, mmap.MADV_HUGEPAGE):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(advice)
        self.array = np.frombuffer(memory, np.uint8)
        self.address = address(self.array)
        self._changed = threading.Condition()
        self._free: list[tuple[int, int]] = [(0, self.size)]  # (start, stop), sorted, never adjacent
        self._taken: dict[int, int] = {}

    def take(self, length: int, timeout_s: float, check: Callable[[], None] = lambda: None) -> np.ndarray:
        """uint8 [length], which must be given back; waits for room while `check()` does not raise.

        Raises PushFailed if there is none in time, or can never be.
        """
        room = max(LINE, -(-length // LINE) * LINE)
        if room > self.size:
            raise PushFailed(
                f"{length} bytes cannot be staged in {self.size} bytes: raise staging_bytes, or lower push_chunk_bytes"
            )
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (start := self._find(room)) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PushFailed(
                        f"no {length} bytes of {self.size} bytes of staging became free in {timeout_s:g} s"
                    )
                self._changed.wait(min(left, POLL_S))
                check()
            self._taken[start] = room
        return self.array[start : start + length]

    def locate(self, array: np.ndarray) -> int | None:
        """Offset of an array that `take` returned, None for any other memory."""
        if not array.size:
            return None
        offset = address(array) - self.address
        return offset if offset in self._taken and array.nbytes <= self._taken[offset] else None

    def give(self, offset: int) -> None:
        """Take back what starts at `offset`. Raises ValueError if nothing was taken there."""
        with self._changed:
            length = self._taken.pop(offset, None)
            if length is None:
                raise ValueError(f"nothing is staged at {offset}")
            start, stop = offset, offset + length
            at = bisect_left(self._free, (start, stop))
            if at < len(self._free) and self._free[at][0] == stop:
                stop = self._free.pop(at)[1]
            if at and self._free[at - 1][1] == start:
                start = self._free.pop(at - 1)[0]
                at -= 1
            self._free.insert(at, (start, stop))
            self._changed.notify_all()

    @property
    def free(self) -> int:
        """Bytes that are free now."""
        with self._changed:
            return sum(stop - start for start, stop in self._free)

    def _find(self, room: int) -> int | None:
        for at, (start, stop) in enumerate(self._free):
            if stop - start >= room:
                rest = (start + room, stop)
                self._free[at : at + 1] = [rest] if rest[0] < stop else []
                return start
        return None
