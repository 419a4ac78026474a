"""One lease written through NIXL: chunks of writes out of staging memory, each in place before the next begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from transport.backends.base import Run
from transport.backends.link.portions import portions
from transport.backends.link.staged import StagedLeaseWriter
from transport.errors import PushFailed

if TYPE_CHECKING:
    from transport.backends.nixl.writer import NixlPoolWriter

CHUNK_BYTES = 4 * 1024 * 1024
"""Two milliseconds over TCP on one host: how long a fence has to wait for a running writer."""


class NixlLeaseWriter(StagedLeaseWriter):
    """A `LeaseWriter` whose writes are in place when `write` returns."""

    _pool: NixlPoolWriter

    def __init__(self, pool: NixlPoolWriter, lease_id: str, token: int) -> None:
        super().__init__(pool, pool.staging, lease_id, token, copy_bytes=CHUNK_BYTES)

    def _send(self, offset: int, runs: Sequence[Run]) -> None:
        try:
            for part in portions(runs, CHUNK_BYTES):
                self._send_chunk(offset, part)
        finally:
            self._staging.give(offset)

    def _send_chunk(self, offset: int, runs: Sequence[Run]) -> None:
        start, there = self._staging.address + offset, self._pool.addresses
        writes = [(start + run.local_offset, there[run.region] + run.remote_offset, run.length) for run in runs]
        try:
            with self.chunk():
                self._pool.send_writes(writes)
        except PushFailed:
            with self._pool.changed:
                self.check_writable()  # says it better where the lease was fenced, or aborted
            raise
        self.bytes += sum(length for _, _, length in writes)
