"""One lease written in place: chunks of stores between two looks at its revocation word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from transport.backends.base import Run
from transport.backends.link.lease import LinkLeaseWriter
from transport.kernels.source import aligned_bytes

if TYPE_CHECKING:
    from transport.backends.shm.writer import ShmPoolWriter

CHUNK_BYTES = 4 * 1024 * 1024
"""About a millisecond of copying: how long a fence may have to wait for a running writer."""
_SMALL_RUN = 32 * 1024


class ShmLeaseWriter(LinkLeaseWriter):
    """A `LeaseWriter` by stores into the receiver's mapped memory."""

    _pool: ShmPoolWriter

    @property
    def mapped(self) -> Sequence[np.ndarray]:
        return self._pool.regions

    def stage(self, num_bytes: int) -> np.ndarray:
        return aligned_bytes(num_bytes)

    def _store(self, staging: np.ndarray, runs: Sequence[Run]) -> None:
        source = staging.data
        index = position = 0  # run at hand, and how much of it is written
        while index < len(runs):
            budget = CHUNK_BYTES
            with self.chunk():
                while budget > 0 and index < len(runs):
                    run = runs[index]
                    length = min(run.length - position, budget)
                    to, at = run.remote_offset + position, run.local_offset + position
                    if length < _SMALL_RUN:  # numpy's overhead per call is more than such a copy takes
                        self._pool.views[run.region][to : to + length] = source[at : at + length]
                    else:  # numpy lets other threads run while it copies
                        self._pool.regions[run.region][to : to + length] = staging[at : at + length]
                    budget -= length
                    position += length
                    self.bytes += length
                    if position == run.length:
                        index, position = index + 1, 0

    def _withdrawn(self) -> bool:
        return bool(self._pool.words[self.slot] != self.epoch)
