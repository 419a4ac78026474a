"""One lease on the writer's side: when it may be written, and who says that writing has ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from transport.backends.base import Run
from transport.backends.shm import wire
from transport.backends.shm.control import split_token
from transport.errors import LeaseRevoked, PushFailed

if TYPE_CHECKING:
    from transport.backends.shm.writer import ShmPoolWriter

CHUNK_BYTES = 4 * 1024 * 1024
"""About a millisecond of copying: how long a fence may have to wait for a running writer."""
_SMALL_RUN = 32 * 1024


class ShmLeaseWriter:
    """A `LeaseWriter`; `abort` may be called from any thread.

    writing → landed → acknowledged, or → revoked (by the receiver) or aborted (here). A chunk that is open
    when the lease is revoked or aborted runs to its end, and its end sends the packet that says so.
    """

    def __init__(self, pool: ShmPoolWriter, lease_id: str, token: int) -> None:
        self.lease_id = lease_id
        self.token = token
        self.bytes = 0
        self._pool = pool
        self._slot, self._epoch = split_token(token)
        self._state: str = "writing"
        self._reason = ""
        self._in_chunk = False
        self._due: wire.Packet | None = None

    @property
    def mapped(self) -> Sequence[np.ndarray]:
        return self._pool.regions

    def chunk(self) -> Chunk:
        return Chunk(self)

    def count(self, num_bytes: int) -> None:
        self.bytes += num_bytes

    def write(self, staging: np.ndarray, runs: Sequence[Run]) -> None:
        self._check_bounds(len(staging), runs)
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
        with self._pool.changed:
            self._pool.counters["writes"] += len(runs)

    def complete(self, timeout_s: float) -> None:
        pool = self._pool
        with pool.changed:
            self._check_writable()
            self._state = "landed"
            pool.send(wire.Landed(self.lease_id, self.token, self.bytes))
            deadline = time.monotonic() + timeout_s
            while self._state == "landed" and pool.alive and (left := deadline - time.monotonic()) > 0:
                pool.changed.wait(left)
            if self._state == "acknowledged":
                pool.counters["completions"] += 1
                pool.counters["bytes"] += self.bytes
                return
            if self._state == "landed" and pool.alive:
                pool.counters["failed_timeout"] += 1
                raise PushFailed(
                    f"pool {pool.pool.worker} did not acknowledge lease {self.lease_id} within {timeout_s:g} s"
                )
            self._refuse()

    def abort(self, reason: str) -> None:
        pool = self._pool
        with pool.changed:
            if self._state not in ("writing", "landed"):
                return
            self._state, self._reason = "aborted", reason[: wire.MAX_REASON_CHARS]
            pool.counters["aborts"] += 1
            self._finish(wire.Aborted(self.lease_id, self.token, self._reason))
            pool.changed.notify_all()

    # ---- what the receiver says; called under the pool's lock

    def revoke(self) -> None:
        """No later chunk may start; acknowledged now, or when the open chunk ends."""
        if self._state == "landed":  # the receiver knows from Landed that nothing is written any more
            self._state = "revoked"
            self._pool.forget(self)
        elif self._state in ("writing", "revoked"):
            self._state = "revoked"
            self._finish(wire.RevokeAck(self.lease_id, self.token))
        self._pool.changed.notify_all()

    def acknowledge(self) -> None:
        if self._state == "landed":
            self._state = "acknowledged"
            self._pool.forget(self)
            self._pool.changed.notify_all()

    # ---- chunks

    def enter(self) -> None:
        with self._pool.changed:
            self._check_writable()
            if self._in_chunk:
                raise RuntimeError(f"lease {self.lease_id} has an open chunk: one thread writes a lease")
            self._in_chunk = True
            self._pool.open_chunks += 1

    def exit(self) -> None:
        with self._pool.changed:
            self._in_chunk = False
            self._pool.open_chunks -= 1
            if self._due is not None:
                self._finish(self._due)
            self._pool.changed.notify_all()

    # ---- inside, under the pool's lock

    def _finish(self, packet: wire.Packet) -> None:
        """Tell the receiver that writing has ended, once that is so."""
        if self._in_chunk:
            self._due = packet
            return
        self._pool.forget(self)
        if self._pool.alive:
            self._pool.try_send(packet)

    def _check_writable(self) -> None:
        """Raises unless the lease may be written now."""
        if self._state == "writing" and self._pool.alive and self._pool.words[self._slot] != self._epoch:
            self._state = "revoked"  # the packet that asks for the acknowledgement is on its way
        if self._state != "writing" or not self._pool.alive:
            self._refuse()

    def _refuse(self) -> None:
        if self._state == "revoked":
            self._pool.counters["revoked"] += 1
            raise LeaseRevoked(f"lease {self.lease_id} was fenced by {self._pool.pool.worker}")
        if self._state == "aborted":
            raise PushFailed(f"the push of lease {self.lease_id} was aborted: {self._reason}")
        self._pool.check_alive()
        raise PushFailed(f"lease {self.lease_id} was completed: it cannot be written any more")

    def _check_bounds(self, local: int, runs: Sequence[Run]) -> None:
        lengths = [len(region) for region in self._pool.regions]
        for index, run in enumerate(runs):
            if not (
                0 <= run.region < len(lengths)
                and run.length > 0
                and 0 <= run.remote_offset <= lengths[run.region] - run.length
                and 0 <= run.local_offset <= local - run.length
            ):
                with self._pool.changed:
                    self._pool.counters["failed_out_of_bounds"] += 1
                raise PushFailed(
                    f"run {index} of lease {self.lease_id} is out of bounds: {run}; region {run.region} has "
                    f"{lengths[run.region] if 0 <= run.region < len(lengths) else 'no'} bytes, staging {local}"
                )


class Chunk:
    """An open chunk, as a context manager: cheaper than a generator, at a few microseconds each."""

    __slots__ = ("_lease",)

    def __init__(self, lease: ShmLeaseWriter) -> None:
        self._lease = lease

    def __enter__(self) -> None:
        self._lease.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lease.exit()
