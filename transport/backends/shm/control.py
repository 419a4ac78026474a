"""The control page: one revocation word per slot, written by the receiver, read by the writer.

A word holds the epoch of the lease that may be written through its slot, or 0 for none.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections import deque

import numpy as np

from transport.backends.link.slots import MAX_SLOTS, slot_token, split_token

SLOT_BYTES = 64
"""One cache line per slot, so that a fence does not disturb the writers of other leases."""
_F_SEAL_FUTURE_WRITE = 0x10


def seal(fd: int, seals: int) -> None:
    """Seal a memfd as far as the kernel and its creator allow it; other descriptors are left as they are."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


class ControlPage:
    """The receiver's side: owns the memory and the free slots of one connection. Idempotent `close`."""

    def __init__(self, slots: int) -> None:
        if not 0 < slots <= MAX_SLOTS:
            raise ValueError(f"slots must be between 1 and {MAX_SLOTS}, got {slots}")
        self.fd = os.memfd_create("hawk-control", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, slots * SLOT_BYTES)
            self._words = words(mmap.mmap(self.fd, slots * SLOT_BYTES))
        except BaseException:
            os.close(self.fd)
            raise
        # From here on nobody else can resize the page or map it writable.
        seal(self.fd, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        seal(self.fd, _F_SEAL_FUTURE_WRITE)
        self._free: deque[int] = deque(range(slots))

    def take(self, epoch: int) -> int:
        """Take a slot for `epoch` → its token. Raises IndexError when none is free."""
        slot = self._free.popleft()
        self._words[slot] = epoch
        return slot_token(slot, epoch)

    def revoke(self, token: int) -> None:
        """The next look of the writer at the word refuses; the slot stays taken until `release`."""
        self._words[split_token(token)[0]] = 0

    def release(self, token: int) -> None:
        """The writer is known to be done with the slot."""
        slot = split_token(token)[0]
        self._words[slot] = 0
        self._free.append(slot)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def words(page: mmap.mmap) -> np.ndarray:
    """uint64 [slots] view of the revocation words."""
    return np.frombuffer(page, np.uint64)[:: SLOT_BYTES // 8]
