"""One lease written by RDMA: chains of writes out of staging memory, never more under way than the lane takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from transport.backends.base import Run
from transport.backends.link.staged import StagedLeaseWriter
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
STALL_S = 30.0
"""With nothing completed by the NIC, or nothing taken by the receiver, for so long, a push fails."""


class VerbsLeaseWriter(StagedLeaseWriter):
    """A `LeaseWriter` on a lane of its own. Writes are under way when `write` returns; `complete` waits for them."""

    _pool: VerbsPoolWriter

    def __init__(self, pool: VerbsPoolWriter, lease_id: str, token: int, lane: Lane) -> None:
        super().__init__(pool, pool.staging, lease_id, token, copy_bytes=COPY_BYTES)
        self._lane = lane
        self._marks = 0
        self._taken = 0
        """Of the marks, so many have been seen by the receiver."""

    def _send(self, offset: int, runs: Sequence[Run]) -> None:
        """Post them as room comes; the staging memory goes back with the last one's completion."""
        held, writes = Held(offset), list(self._writes(offset, runs))
        for first in range(0, len(writes), CHAIN):
            chain = writes[first : first + CHAIN]
            self._post(chain, held, last=first + CHAIN >= len(writes))
            self.bytes += sum(write[2] for write in chain)

    def _writes(self, offset: int, runs: Sequence[Run]) -> Iterator[Write]:
        """As work requests; longer runs than the NIC takes in one are cut."""
        lkey, most = self._pool.lkey(self._lane), self._pool.max_message(self._lane)
        start, regions = self._staging.address + offset, self._lane.regions
        for run in runs:
            address, rkey = regions[run.region]
            address += run.remote_offset
            at, length = start + run.local_offset, run.length
            while length > most:
                yield at, lkey, most, address, rkey
                at, address, length = at + most, address + most, length - most
            yield at, lkey, length, address, rkey

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
                    self._staging.give(held.offset)
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
