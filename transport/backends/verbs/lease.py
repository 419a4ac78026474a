"""One lease written by RDMA: chains of writes out of staging memory, never more under way than the lane takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from transport.backends.base import Run
from transport.backends.link.lease import LinkLeaseWriter
from transport.backends.link.portions import portions
from transport.backends.verbs.credit import RECEIVES
from transport.backends.verbs.lanes import DEPTH, Held, Lane
from transport.backends.verbs.write_chain import Write
from transport.errors import HawkError, PushFailed

if TYPE_CHECKING:
    from transport.backends.verbs.writer import VerbsPoolWriter

CHAIN = DEPTH // 4
"""Writes per post, the last of them signalled: a lane refills when a quarter of it is through."""
COPY_BYTES = 1024 * 1024
"""Of memory that the NIC cannot read, so much is staged at a time."""
STAGE_WAIT_S = 30.0
STALL_S = 30.0
"""With nothing completed by the NIC, or nothing taken by the receiver, for so long, a push fails."""


class VerbsLeaseWriter(LinkLeaseWriter):
    """A `LeaseWriter` on a lane of its own. Writes are under way when `write` returns; `complete` waits for them."""

    _pool: VerbsPoolWriter

    def __init__(self, pool: VerbsPoolWriter, lease_id: str, token: int, lane: Lane) -> None:
        super().__init__(pool, lease_id, token)
        self._lane = lane
        self._marks = 0
        self._taken = 0
        """Of the marks, so many have been seen by the receiver."""
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
        if offset is not None and self._filling is not None and offset == self._filling[0]:
            self._filling = None
            self._post_all(list(self._writes(offset, runs)), offset)
        else:
            self._store_copies(staging, runs)

    def _store_copies(self, staging: np.ndarray, runs: Sequence[Run]) -> None:
        """Out of memory that the NIC cannot read."""
        for part in portions(runs, min(COPY_BYTES, self._pool.staging.size // 4)):
            buffer, offset = self._take(sum(run.length for run in part))
            moved, position = [], 0
            for run in part:
                buffer[position : position + run.length] = staging[run.local_offset : run.local_offset + run.length]
                moved.append(Run(run.region, position, run.remote_offset, run.length))
                position += run.length
            self._post_all(list(self._writes(offset, moved)), offset)

    def _writes(self, offset: int, runs: Sequence[Run]) -> Iterator[Write]:
        """As work requests; longer runs than the NIC takes in one are cut."""
        lkey, most = self._pool.lkey(self._lane), self._pool.max_message(self._lane)
        start, regions = self._pool.staging.address + offset, self._lane.regions
        for run in runs:
            address, rkey = regions[run.region]
            address += run.remote_offset
            at, length = start + run.local_offset, run.length
            while length > most:
                yield at, lkey, most, address, rkey
                at, address, length = at + most, address + most, length - most
            yield at, lkey, length, address, rkey

    def _post_all(self, writes: Sequence[Write], staged: int) -> None:
        """Post them as room comes; the staging memory goes back with the last one's completion."""
        held = Held(staged)
        for first in range(0, len(writes), CHAIN):
            chain = writes[first : first + CHAIN]
            self._post(chain, held, last=first + CHAIN >= len(writes))
            self.bytes += sum(write[2] for write in chain)

    def _mark(self) -> None:
        """The immediate that tells of this lease: the low 32 bits of its epoch."""
        with self._pool.changed:
            self.check_writable()
            self._hold(lambda: self._marks - self._taken < RECEIVES, "receiver has taken no announcement")
            self._marks += 1
        self._post((), None, immediate=self.epoch & 0xFFFFFFFF)

    def taken(self, count: int) -> None:
        """The receiver has seen `count` marks; under the pool's lock."""
        self._taken = count
        self._pool.changed.notify_all()

    def _hold(self, ready: Callable[[], bool], stalled: str) -> None:
        """Wait, under the pool's lock, while the lease may be written. Raises LeaseRevoked, PushFailed."""
        deadline = time.monotonic() + STALL_S
        while not ready():
            left = deadline - time.monotonic()
            if left <= 0:
                self._pool.counters["failed_stalled"] += 1
                raise PushFailed(f"the push of lease {self.lease_id} stalled: the {stalled} for {STALL_S:g} s")
            self._pool.changed.wait(left)
            self.check_writable()

    def _post(
        self, writes: Sequence[Write], held: Held | None, *, last: bool = True, immediate: int | None = None
    ) -> None:
        pool, lane = self._pool, self._lane
        need = len(writes) + (immediate is not None)
        with pool.changed:
            try:
                self.check_writable()
                self._hold(lambda: lane.pair.room >= need, "NIC has completed no write")
            except BaseException:
                if held is not None and not held.posted:
                    pool.staging.give(held.offset)
                raise
            pair = lane.pair
            lane.posts += 1
            wr_id = lane.posts
            if held is not None:
                held.last = wr_id if last else None
                if not held.posted:
                    held.posted = True
                    lane.held.append(held)
        try:
            pair.post(writes, wr_id=wr_id, immediate=immediate)  # not under the lock: it may take its time
        except HawkError as error:
            with pool.changed:
                self.break_off(error.message)
                self._refuse()

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
