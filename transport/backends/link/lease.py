"""One lease on the writer's side: when it may be written, and who says that writing has ended."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from transport.backends.base import Piece, Run
from transport.backends.link import packets
from transport.backends.link.slots import split_token
from transport.errors import LeaseRevoked, PushFailed

if TYPE_CHECKING:
    from transport.backends.link.writer import LinkPoolWriter

REVOKE_WAIT_S = 1.0
"""Between a write that the receiver's NIC refused and the packet that says why."""


class LinkLeaseWriter(ABC):
    """A `LeaseWriter`; `abort` may be called from any thread.

    writing → landed → acknowledged, or → revoked (by the receiver), aborted (here), broken (the backend cannot write
    any more, perhaps because of a fence) or failed (the same, for a reason of its own). A chunk that is open when the
    lease is revoked or aborted runs to its end, and its end sends the packet that says so. All states change under
    the pool's lock.
    """

    def __init__(self, pool: LinkPoolWriter, lease_id: str, token: int) -> None:
        self.lease_id = lease_id
        self.token = token
        self.slot, self.epoch = split_token(token)
        self.bytes = 0
        self._pool = pool
        self._state: str = "writing"
        self._reason = ""
        self._drained = 0
        self._in_chunk = False
        self._due: packets.Packet | None = None

    # ---- LeaseWriter protocol

    @property
    def mapped(self) -> Sequence[np.ndarray] | None:
        return None

    def chunk(self) -> Chunk:
        return Chunk(self)

    def count(self, num_bytes: int) -> None:
        self.bytes += num_bytes

    @abstractmethod
    def stage(self, num_bytes: int) -> np.ndarray: ...

    def write(self, staging: np.ndarray, runs: Sequence[Run]) -> None:
        self._check_bounds(len(staging), runs)
        self._store(staging, runs)
        with self._pool.changed:
            self._pool.counters["writes"] += len(runs)

    def announce(self, piece: Piece) -> None:
        self._mark()
        with self._pool.changed:
            self.check_writable()
            self._pool.send(packets.announcement(self.lease_id, self.token, piece))

    def wait_drained(self, count: int, timeout_s: float) -> None:
        with self._pool.changed:
            self._wait(lambda: self._drained >= count, "writing", timeout_s, f"empty piece {count} of lease")

    def complete(self, timeout_s: float) -> None:
        pool = self._pool
        self._mark()
        with pool.changed:
            self.check_writable()
            self._state = "landed"
            pool.send(packets.Landed(self.lease_id, self.token, self.bytes))
            self._wait(lambda: self._state == "acknowledged", "landed", timeout_s, "acknowledge lease")
            pool.counters["completions"] += 1
            pool.counters["bytes"] += self.bytes

    def abort(self, reason: str) -> None:
        pool = self._pool
        with pool.changed:
            if self._state not in ("writing", "landed", "broken", "failed"):
                return
            self._state, self._reason = "aborted", reason[: packets.MAX_REASON_CHARS]
            pool.counters["aborts"] += 1
            self._finish(packets.Aborted(self.lease_id, self.token, self._reason))
            pool.changed.notify_all()

    # ---- what a backend does

    @abstractmethod
    def _store(self, staging: np.ndarray, runs: Sequence[Run]) -> None:
        """Write runs that are within bounds."""

    def _mark(self) -> None:
        """Let the receiver's side see, behind all that was written, that it is there: an immediate, where there is one.

        Raises as `write`.
        """

    # ---- what the receiver says, and the backend finds; called under the pool's lock

    def revoke(self) -> None:
        """No later chunk may start; acknowledged now, or when the open chunk ends."""
        if self._state == "landed":  # the receiver knows from Landed that nothing is written any more
            self._state = "revoked"
            self._pool.forget(self)
        elif self._state in ("writing", "revoked", "broken", "failed"):
            if self._state != "failed":
                self._state = "revoked"
            self._finish(packets.RevokeAck(self.lease_id, self.token))
        self._pool.changed.notify_all()

    def drained(self, count: int) -> None:
        self._drained = count
        self._pool.changed.notify_all()

    def acknowledge(self) -> None:
        if self._state == "landed":
            self._state = "acknowledged"
            self._pool.forget(self)
            self._pool.changed.notify_all()

    def break_off(self, reason: str, *, fenced: bool = True) -> None:
        """The backend cannot write the lease any more; its writer finds out, and aborts.

        `fenced`: that may be because the receiver has fenced it.
        """
        if self._state in ("writing", "landed"):
            self._state, self._reason = "broken" if fenced else "failed", reason
            self._pool.changed.notify_all()

    # ---- chunks

    def enter(self) -> None:
        with self._pool.changed:
            self.check_writable()
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

    # ---- under the pool's lock

    def check_writable(self) -> None:
        """Raises unless the lease may be written now."""
        if self._state == "writing" and self._pool.alive and self._withdrawn():
            self._state = "revoked"  # the packet that asks for the acknowledgement is on its way
        if self._state != "writing" or not self._pool.alive:
            self._refuse()

    def _withdrawn(self) -> bool:
        """Whether the backend sees already that the receiver has revoked the lease."""
        return False

    def _finish(self, packet: packets.Packet) -> None:
        """Tell the receiver that writing has ended, once that is so."""
        if self._in_chunk:
            self._due = packet
            return
        self._pool.forget(self)
        if self._pool.alive:
            self._pool.try_send(packet)

    def _wait(self, done: Callable[[], bool], state: str, timeout_s: float, what: str) -> None:
        """Until `done`, while the lease is in `state`. Raises LeaseRevoked, PushFailed."""
        pool = self._pool
        deadline = time.monotonic() + timeout_s
        while not done() and self._state == state and pool.alive and (left := deadline - time.monotonic()) > 0:
            pool.changed.wait(left)
        if done():
            return
        if self._state == state and pool.alive:
            pool.counters["failed_timeout"] += 1
            raise PushFailed(f"pool {pool.pool.worker} did not {what} {self.lease_id} within {timeout_s:g} s")
        self._refuse()

    def _refuse(self) -> NoReturn:
        if self._state == "broken":  # often because the receiver has fenced the lease: its word is on its way then
            self._pool.changed.wait_for(lambda: self._state != "broken" or not self._pool.alive, REVOKE_WAIT_S)
        if self._state == "revoked":
            self._pool.counters["revoked"] += 1
            raise LeaseRevoked(f"lease {self.lease_id} was fenced by {self._pool.pool.worker}")
        if self._state == "aborted":
            raise PushFailed(f"the push of lease {self.lease_id} was aborted: {self._reason}")
        self._pool.check_alive()
        if self._state in ("broken", "failed"):
            raise PushFailed(f"the push of lease {self.lease_id} failed: {self._reason}")
        raise PushFailed(f"lease {self.lease_id} was completed: it cannot be written any more")

    def _check_bounds(self, local: int, runs: Sequence[Run]) -> None:
        lengths = self._pool.lengths
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

    def __init__(self, lease: LinkLeaseWriter) -> None:
        self._lease = lease

    def __enter__(self) -> None:
        self._lease.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lease.exit()
