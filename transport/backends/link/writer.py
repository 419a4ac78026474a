"""P's end of a link: a connection to one pool, and the thread that listens on it.

Plain threads, no event loop: it may run inside an engine's worker process. The pushing threads write inside
chunks; a revocation is acknowledged when no chunk of the lease is open, by the listening thread or by whoever
closes the chunk, and every later chunk is refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import struct
import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

from transport.backends.base import OnLost
from transport.backends.link import packets
from transport.backends.link.handshake import PacketSocket
from transport.backends.link.lease import LinkLeaseWriter
from transport.backends.link.slots import split_token
from transport.errors import LeaseRevoked, PushFailed, StaleGeneration
from transport.messages import Lease, PoolDescription

log = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 5
GRANT_WAIT_S = 2.0
"""A lease may reach the writer by way of the router before its grant has come over the link."""
_CLOSED_HERE = "closed by this process"


class LinkPoolWriter(ABC):
    """A `PoolWriter`. `counters`: totals of bytes, writes, completions, revoked, aborts, failures by cause.

    `lengths`: bytes of each region. `watched`: descriptors that the listening thread also waits for, with
    `_on_watched` to call. `nics`: (device, port) of the RDMA NICs that it sends by.
    """

    nics: Sequence[tuple[str, int]] = ()

    def __init__(
        self,
        link: PacketSocket,
        pool: PoolDescription,
        slots: int,
        lengths: list[int],
        on_lost: OnLost | None,
        watched: list[int] | None = None,
    ) -> None:
        self.pool = pool
        self.counters: Counter[str] = Counter()
        self.lengths = lengths
        # One lock for all leases: it is held for microseconds, at the edges of chunks of milliseconds.
        self.changed = threading.Condition()
        self.open_chunks = 0
        self._slots = slots
        self._lost: str | None = None
        self._on_lost = on_lost
        self._link = link
        self._granted: dict[str, int] = {}
        self._leases: dict[str, LinkLeaseWriter] = {}
        link.sock.settimeout(None)
        # A receiver that does not read must not hold up the pushing threads for ever.
        link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT_S, 0))
        self._selector = selectors.DefaultSelector()
        self._selector.register(link.sock, selectors.EVENT_READ)
        for fd in watched or ():
            self._selector.register(fd, selectors.EVENT_READ)
        self._listener = threading.Thread(target=self._listen, name=f"link-{pool.worker}", daemon=True)
        _connections.add(self)

    def listen(self) -> None:
        """Start the listening thread; the end of the backend's own constructor."""
        self._listener.start()

    # ---- PoolWriter protocol

    @property
    def alive(self) -> bool:
        return self._lost is None

    def open(self, lease: Lease) -> LinkLeaseWriter:
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
            if slot >= self._slots or epoch == 0 or not self._may_write(lease):
                self.check_alive()
                self.counters["revoked"] += 1
                raise LeaseRevoked(f"lease {lease.id} is unknown to {lease.worker}, or was fenced")
            opened = self._leases[lease.id] = self._make_lease(lease.id, lease.slot)
            return opened

    def close(self) -> None:
        self._end(_CLOSED_HERE)
        if threading.current_thread() is not self._listener:
            self._listener.join()

    # ---- what a backend does

    @abstractmethod
    def _make_lease(self, lease_id: str, token: int) -> LinkLeaseWriter: ...

    def _may_write(self, lease: Lease) -> bool:
        """Whether the receiver has granted the lease; waits for its word. Under the lock."""
        self.changed.wait_for(lambda: self._granted.get(lease.id) == lease.slot or not self.alive, GRANT_WAIT_S)
        return self._granted.pop(lease.id, None) == lease.slot and self.alive

    def _on_watched(self, fd: int) -> None:
        """A watched descriptor is readable; in the listening thread, without the lock."""

    def _on_packet(self, packet: packets.Packet) -> bool:
        """A packet of the backend's own, under the lock; False if it is none."""
        return False

    def _release(self) -> None:
        """The connection is over and no chunk is open: give the receiver's memory back."""

    def _forget_in_child(self) -> None:
        """After a fork, in the child: what must not be done twice, or kept open."""

    # ---- for the leases, under the lock

    def check_alive(self) -> None:
        """Raises PushFailed when the receiver is gone."""
        if self._lost is not None:
            raise PushFailed(f"the connection to pool {self.pool.worker} is over: {self._lost}")

    def send(self, packet: packets.Packet) -> None:
        """Raises PushFailed when the receiver is gone or does not read."""
        self.try_send(packet)
        self.check_alive()

    def try_send(self, packet: packets.Packet) -> None:
        """As `send`, but a failure only ends the connection."""
        try:
            self._link.send(packet)
        except OSError as error:
            self._end(f"it does not take messages ({error})")

    def forget(self, lease: LinkLeaseWriter) -> None:
        """Nothing of the lease will be written any more."""
        if self._leases.get(lease.lease_id) is lease:
            del self._leases[lease.lease_id]

    # ---- the listening thread

    def _listen(self) -> None:
        reason = "the decode worker closed it, or died"
        try:
            while self._serve():
                pass
        except OSError as error:
            reason = str(error)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            log.exception("data plane to pool %s failed", self.pool.worker)
        self._end(reason)
        with self.changed:
            # Closing tells the receiver that nothing is written any more: the last chunk comes first.
            self.changed.wait_for(lambda: self.open_chunks == 0)
            try:
                self._release()
            except Exception:
                log.exception("memory of pool %s was not given back", self.pool.worker)
            self._selector.close()
            self._link.sock.close()
        _connections.discard(self)
        if self._lost != _CLOSED_HERE and self._on_lost is not None:
            try:
                self._on_lost(self._lost or reason)
            except Exception:
                log.exception("on_lost of pool %s failed", self.pool.worker)

    def _serve(self) -> bool:
        """Wait for something and deal with it; False when the connection is at its end."""
        while (packet := self._link.framing.pop()) is not None:  # the handshake may have left some
            self._packet(packets.unpack(packet))
        for key, _ in self._selector.select():
            if key.fileobj is not self._link.sock:
                self._on_watched(key.fd)
            elif data := self._link.sock.recv(packets.MAX_PACKET):
                self._link.framing.feed(data)
            else:
                return False
        return True

    def _packet(self, packet: packets.Packet) -> None:
        with self.changed:
            if isinstance(packet, packets.Granted):
                self._granted[packet.lease_id] = packet.slot
                self.changed.notify_all()
                return
            if self._on_packet(packet):
                return
            lease = self._leases.get(getattr(packet, "lease_id", ""))
            if lease is not None and lease.token != getattr(packet, "slot", None):
                lease = None
            if isinstance(packet, packets.Revoke) and lease is not None:
                lease.revoke()
            elif isinstance(packet, packets.Revoke):  # never opened here, or over: nothing of it can be written
                self._granted.pop(packet.lease_id, None)
                self.try_send(packets.RevokeAck(packet.lease_id, packet.slot))
            elif isinstance(packet, packets.Acknowledged) and lease is not None:
                lease.acknowledge()
            elif isinstance(packet, packets.Drained) and lease is not None:
                lease.drained(packet.count)
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
                self._link.sock.shutdown(socket.SHUT_RD)

    def _close_in_child(self) -> None:
        self._lost = "it belongs to the parent process"
        self._link.sock.close()
        self._forget_in_child()


_connections: weakref.WeakSet[LinkPoolWriter] = weakref.WeakSet()


def _after_fork() -> None:
    """A forked child must not keep its parent's connections alive: their end is what tells of the parent's death."""
    for connection in list(_connections):
        connection._close_in_child()


os.register_at_fork(after_in_child=_after_fork)
