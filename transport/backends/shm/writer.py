"""P's end of the shared-memory data plane: a connection to one pool, and the thread that listens on it.

Plain threads, no event loop: it may run inside an engine's worker process. The pushing threads write inside
chunks; a revocation is acknowledged when no chunk of the lease is open, by the listening thread or by whoever
closes the chunk, and every later chunk is refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import weakref
from collections import Counter

from transport.backends.base import OnLost
from transport.backends.shm import wire
from transport.backends.shm.control import split_token
from transport.backends.shm.handshake import Mapped, shake_hands
from transport.backends.shm.lease import ShmLeaseWriter
from transport.errors import LeaseRevoked, PushFailed, StaleGeneration
from transport.messages import Lease, PoolDescription, Writer

log = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 5
_CLOSED_HERE = "closed by this process"


def connect(
    pool: PoolDescription, writer: Writer, token: str, *, on_lost: OnLost | None = None, timeout_s: float = 5.0
) -> ShmPoolWriter:
    """Connect to a pool's receiver. `on_lost(reason)` is called once, in the listening thread, if it goes away.

    Raises AuthenticationFailed, StaleGeneration, GeometryMismatch, ProtocolError, PushFailed (cannot connect).
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout_s)
        try:
            sock.connect(pool.endpoint.address)
        except OSError as error:
            raise PushFailed(
                f"cannot connect to pool {pool.worker} at {pool.endpoint.address}: {error.strerror or error}"
            ) from error
        mapped = shake_hands(sock, pool, writer, token)
        sock.settimeout(None)
        # A receiver that does not read must not hold up the pushing threads for ever.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT_S, 0))
    except BaseException:
        sock.close()
        raise
    return ShmPoolWriter(sock, pool, mapped, on_lost)


class ShmPoolWriter:
    """A `PoolWriter`. `counters`: totals of bytes, writes, completions, revoked, aborts, failures by cause."""

    def __init__(self, sock: socket.socket, pool: PoolDescription, mapped: Mapped, on_lost: OnLost | None) -> None:
        self.pool = pool
        self.counters: Counter[str] = Counter()
        self.regions = mapped.regions
        self.views = [region.data for region in mapped.regions]
        self.words = mapped.words
        # One lock for all leases: it is held for microseconds, at the edges of chunks of milliseconds.
        self.changed = threading.Condition()
        self.open_chunks = 0
        self._lost: str | None = None
        self._on_lost = on_lost
        self._sock = sock
        self._leases: dict[str, ShmLeaseWriter] = {}
        self._listener = threading.Thread(target=self._listen, name=f"shm-{pool.worker}", daemon=True)
        _connections.add(self)
        self._listener.start()

    @property
    def alive(self) -> bool:
        return self._lost is None

    def open(self, lease: Lease) -> ShmLeaseWriter:
        with self.changed:
            self.check_alive()
            if (lease.worker, lease.generation) != (self.pool.worker, self.pool.generation):
                self.counters["failed_stale_generation"] += 1
                raise StaleGeneration(
                    f"lease {lease.id} is of pool {lease.worker}, generation {lease.generation}; this connection "
                    f"is to {self.pool.worker}, generation {self.pool.generation}"
                )
            slot, epoch = split_token(lease.slot)
            if lease.id in self._leases:
                raise LeaseRevoked(f"lease {lease.id} is being written already")
            if slot >= len(self.words) or epoch == 0 or self.words[slot] != epoch:
                self.counters["revoked"] += 1
                raise LeaseRevoked(f"lease {lease.id} is unknown to {lease.worker}, or was fenced")
            opened = self._leases[lease.id] = ShmLeaseWriter(self, lease.id, lease.slot)
            return opened

    def close(self) -> None:
        self._end(_CLOSED_HERE)
        if threading.current_thread() is not self._listener:
            self._listener.join()

    # ---- for the leases, under the lock

    def check_alive(self) -> None:
        """Raises PushFailed when the receiver is gone."""
        if self._lost is not None:
            raise PushFailed(f"the connection to pool {self.pool.worker} is over: {self._lost}")

    def send(self, packet: wire.Packet) -> None:
        """Raises PushFailed when the receiver is gone or does not read."""
        self.try_send(packet)
        self.check_alive()

    def try_send(self, packet: wire.Packet) -> None:
        """As `send`, but a failure only ends the connection."""
        try:
            self._sock.sendall(wire.pack(packet))
        except OSError as error:
            self._end(f"it does not take messages ({error})")

    def forget(self, lease: ShmLeaseWriter) -> None:
        """Nothing of the lease will be written any more."""
        if self._leases.get(lease.lease_id) is lease:
            del self._leases[lease.lease_id]

    # ---- the listening thread

    def _listen(self) -> None:
        reason = "the decode worker closed it, or died"
        try:
            while data := self._sock.recv(wire.MAX_PACKET):
                self._packet(wire.unpack(data))
        except OSError as error:
            reason = str(error)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            log.exception("data plane to pool %s failed", self.pool.worker)
        self._end(reason)
        with self.changed:
            # Closing tells the receiver that nothing is written any more: the last chunk comes first.
            self.changed.wait_for(lambda: self.open_chunks == 0)
            self._sock.close()
        _connections.discard(self)
        if self._lost != _CLOSED_HERE and self._on_lost is not None:
            try:
                self._on_lost(self._lost or reason)
            except Exception:
                log.exception("on_lost of pool %s failed", self.pool.worker)

    def _packet(self, packet: wire.Packet) -> None:
        with self.changed:
            lease = self._leases.get(getattr(packet, "lease_id", ""))
            if lease is not None and lease.token != getattr(packet, "slot", None):
                lease = None
            if isinstance(packet, wire.Revoke) and lease is not None:
                lease.revoke()
            elif isinstance(packet, wire.Revoke):  # never opened here, or over: nothing of it can be written
                self.try_send(wire.RevokeAck(packet.lease_id, packet.slot))
            elif isinstance(packet, wire.Acknowledged) and lease is not None:
                lease.acknowledge()
            else:
                self.counters["unknown_packets"] += 1

    def _end(self, reason: str) -> None:
        """Refuse all further chunks, and wake the listening thread, which closes."""
        with self.changed:
            if self._lost is not None:
                return
            self._lost = reason
            if reason != _CLOSED_HERE:
                self.counters["failed_connection_lost"] += 1
                log.warning("the connection to pool %s is over: %s", self.pool.worker, reason)
            self.changed.notify_all()
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RD)

    def _close_in_child(self) -> None:
        self._lost = "it belongs to the parent process"
        self._sock.close()


_connections: weakref.WeakSet[ShmPoolWriter] = weakref.WeakSet()


def _after_fork() -> None:
    """A forked child must not keep its parent's connections alive: their end is what tells of the parent's death."""
    for connection in list(_connections):
        connection._close_in_child()


os.register_at_fork(after_in_child=_after_fork)
