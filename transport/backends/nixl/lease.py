"""One lease written through NIXL: chunks of writes out of staging memory, each in place before the next begins."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from transport.backends.base import Run
from transport.backends.link.lease import LinkLeaseWriter
from transport.backends.link.portions import portions
from transport.errors import PushFailed
from transport.kernels.source import address

if TYPE_CHECKING:
    from transport.backends.nixl.writer import NixlPoolWriter

CHUNK_BYTES = 4 * 1024 * 1024
"""Two milliseconds over TCP on one host: how long a fence has to wait for a running writer."""
STAGE_WAIT_S = 30.0


class NixlLeaseWriter(LinkLeaseWriter):
    """A `LeaseWriter` whose writes are in place when `write` returns."""

    _pool: NixlPoolWriter

    def __init__(self, pool: NixlPoolWriter, lease_id: str, token: int) -> None:
        super().__init__(pool, lease_id, token)
        self._filling: tuple[int, int] | None = None
        """(offset, thread) of the buffer that was staged last and not written yet."""

    def stage(self, num_bytes: int) -> np.ndarray:
        self._give_back()
        buffer, offset = self._take(num_bytes)
        self._filling = offset, threading.get_ident()
        return buffer

    def abort(self, reason: str) -> None:
        super().abort(reason)
        self._give_back()

    def _store(self, staging: np.ndarray, runs: Sequence[Run]) -> None:
        offset = self._pool.staging.locate(staging)
        if offset is None or self._filling is None or offset != self._filling[0]:
            self._store_copies(staging, runs)
            return
        self._filling = None
        try:
            for part in portions(runs, CHUNK_BYTES):
                self._send(staging, part)
        finally:
            self._pool.staging.give(offset)

    def _store_copies(self, staging: np.ndarray, runs: Sequence[Run]) -> None:
        """Out of memory that is not registered."""
        for part in portions(runs, min(CHUNK_BYTES, self._pool.staging.size // 4)):
            buffer, offset = self._take(sum(run.length for run in part))
            try:
                moved, position = [], 0
                for run in part:
                    buffer[position : position + run.length] = staging[run.local_offset : run.local_offset + run.length]
                    moved.append(Run(run.region, position, run.remote_offset, run.length))
                    position += run.length
                self._send(buffer, moved)
            finally:
                self._pool.staging.give(offset)

    def _send(self, buffer: np.ndarray, runs: Sequence[Run]) -> None:
        start, there = address(buffer), self._pool.addresses
        writes = [(start + run.local_offset, there[run.region] + run.remote_offset, run.length) for run in runs]
        try:
            with self.chunk():
                self._pool.send_writes(writes)
        except PushFailed:
            with self._pool.changed:
                self.check_writable()  # says it better where the lease was fenced, or aborted
            raise
        self.bytes += sum(length for _, _, length in writes)

    def _take(self, num_bytes: int) -> tuple[np.ndarray, int]:
        def check() -> None:
            with self._pool.changed:
                self.check_writable()

        check()
        buffer = self._pool.staging.take(num_bytes, STAGE_WAIT_S, check)
        offset = self._pool.staging.locate(buffer)
        assert offset is not None
        return buffer, offset

    def _give_back(self) -> None:
        """A buffer that was staged and then not written; only by the thread that may be filling it."""
        if self._filling is not None and self._filling[1] == threading.get_ident():
            self._pool.staging.give(self._filling[0])
            self._filling = None
