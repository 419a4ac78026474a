"""A lease written out of the process's staging memory, by backends that cannot read just any memory."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from transport.backends.base import Run
from transport.backends.link.lease import LinkLeaseWriter
from transport.backends.link.portions import portions

if TYPE_CHECKING:
    from transport.backends.link.staging import StagingMemory
    from transport.backends.link.writer import LinkPoolWriter

STAGE_WAIT_S = 30.0
"""For so long all staging memory may be under way before a push fails."""


class StagedLeaseWriter(LinkLeaseWriter):
    """What `stage` gave is sent as it is; of any other memory, `copy_bytes` at a time are copied first."""

    def __init__(
        self, pool: LinkPoolWriter, staging: StagingMemory, lease_id: str, token: int, *, copy_bytes: int
    ) -> None:
        super().__init__(pool, lease_id, token)
        self._staging = staging
        self._copy_bytes = min(copy_bytes, staging.size // 4)
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
        offset = self._staging.locate(staging)
        if offset is not None and self._filling is not None and offset == self._filling[0]:
            self._filling = None
            self._send(offset, runs)
            return
        for offset, moved in self._copied(staging, runs):
            self._send(offset, moved)

    @abstractmethod
    def _send(self, offset: int, runs: Sequence[Run]) -> None:
        """Write the runs out of the staging memory at `offset`, and have it given back. Raises as `write`."""

    def _copied(self, source: np.ndarray, runs: Sequence[Run]) -> Iterator[tuple[int, list[Run]]]:
        for part in portions(runs, self._copy_bytes):
            buffer, offset = self._take(sum(run.length for run in part))
            moved, position = [], 0
            for run in part:
                buffer[position : position + run.length] = source[run.local_offset : run.local_offset + run.length]
                moved.append(Run(run.region, position, run.remote_offset, run.length))
                position += run.length
            yield offset, moved

    def _take(self, num_bytes: int) -> tuple[np.ndarray, int]:
        def check() -> None:
            with self._pool.changed:
                self.check_writable()

        check()
        buffer = self._staging.take(num_bytes, STAGE_WAIT_S, check)
        offset = self._staging.locate(buffer)
        assert offset is not None
        return buffer, offset

    def _give_back(self) -> None:
        """A buffer that was staged and then not written; only by the thread that may be filling it."""
        if self._filling is not None and self._filling[1] == threading.get_ident():
            self._staging.give(self._filling[0])
            self._filling = None
