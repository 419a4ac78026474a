"""Memory behind a descriptor, mapped into this process alone."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np


def map_shared(fd: int, offset: int, length: int) -> np.ndarray:
    """uint8 [length] from byte `offset` of `fd`, mapped until the last view of it goes. Raises OSError, ValueError."""
    start = offset % mmap.ALLOCATIONGRANULARITY
    memory = mmap.mmap(fd, start + length, mmap.MAP_SHARED, offset=offset - start)
    with contextlib.suppress(OSError):
        # A forked child must not keep the right to write after its parent's connection has ended.
        memory.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(memory, np.uint8, length, start)
