"""D's end of the shared-memory data plane: admits writers, grants slots, fences."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import logging
import socket
from collections import Counter
from collections.abc import Sequence

from transport.backends.base import ReceiverEvents
from transport.backends.shm.connection import Connection, Grant
from transport.backends.shm.control import seal
from transport.backends.shm.listener import Listener
from transport.errors import Overloaded, ProtocolError, WorkerLost
from transport.messages import Region, Writer

log = logging.getLogger(__name__)

DEFAULT_SLOTS = 1024
MAX_UNAUTHENTICATED = 64


class ShmReceiver:
    """A `Receiver` whose writers map its regions and store into them.

    `regions`: what a writer may store to, in the order of the pool description: (region, descriptor, byte in
    the descriptor where the region starts). The descriptors stay the caller's and must stay open.
    `counters`: totals of bytes, grants, landed, acknowledged, fences, aborts, writers, unknown and late
    messages, and failures by cause (`refused_<code>`), for the metrics.
    """

    def __init__(
        self,
        name: str,
        generation: str,
        token: str,
        regions: Sequence[tuple[Region, int, int]],
        events: ReceiverEvents,
        socket_path: str,
        *,
        slots: int = DEFAULT_SLOTS,
        handshake_timeout_s: float = 5.0,
    ) -> None:
        self.name = name
        self.generation = generation
        self.token = token
        self.regions = list(regions)
        self.events = events
        self.slots = slots
        self.counters: Counter[str] = Counter()
        self._socket_path = socket_path
        self._handshake_timeout_s = handshake_timeout_s
        self._listener: Listener | None = None
        self._connections: set[Connection] = set()
        self._writers: dict[Writer, Connection] = {}
        self._grants: dict[str, Grant] = {}
        self._epochs = itertools.count(1)
        for _, fd, _ in self.regions:
            # A writer that shortened the memory would make this process fault.
            seal(fd, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)

    # ---- Receiver protocol

    async def start(self) -> None:
        """Listen. Raises ConfigurationError if the socket path cannot be had."""
        self._listener = Listener(self._socket_path)
        asyncio.get_running_loop().add_reader(self._listener.sock, self._accept)

    @property
    def writers(self) -> list[Writer]:
        """The connected writers."""
        return list(self._writers)

    def grant(self, lease_id: str, writer: Writer) -> int:
        connection = self._writers.get(writer)
        if connection is None or connection.finished:
            self.counters["refused_not_connected"] += 1
            others = (known.generation for known in self._writers if known.worker == writer.worker and known != writer)
            other = next(others, None)
            state = f"connected as generation {other}" if other else "not connected"
            raise WorkerLost(
                f"prefill worker {writer.worker} (generation {writer.generation}) is {state} on the data plane "
                f"of {self.name}"
            )
        if lease_id in self._grants:
            raise ValueError(f"lease {lease_id} is granted already")
        try:
            slot = connection.page.grant(next(self._epochs))
        except IndexError:
            self.counters["refused_no_slot"] += 1
            raise Overloaded(f"all {self.slots} lease slots of {writer.worker} on {self.name} are taken") from None
        self._grants[lease_id] = connection.grants[lease_id] = Grant(lease_id, slot, connection)
        self.counters["grants"] += 1
        return slot

    def acknowledge(self, lease_id: str) -> None:
        grant = self._grants.get(lease_id)
        if grant is None:  # its writer was lost after landing
            return
        if not grant.landed:
            raise ValueError(f"lease {lease_id} has not landed")
        self.counters["acknowledged"] += 1
        grant.connection.acknowledge(grant)
        self._end(grant)

    async def fence(self, lease_id: str) -> None:
        grant = self._grants.get(lease_id)
        if grant is None:
            return
        if grant.fenced is None:
            self.counters["fences"] += 1
            grant.fenced = asyncio.get_running_loop().create_future()
            grant.connection.revoke(grant)
            if grant.landed:  # the writer has said already that it will write no more
                self._end(grant)
        # Shielded: one waiter that is cancelled must not cancel the fence for the others.
        await asyncio.shield(grant.fenced)

    async def close(self) -> None:
        """Stop listening, tell the writers, wait up to a second for them to let go."""
        if self._listener is None:
            return
        asyncio.get_running_loop().remove_reader(self._listener.sock)
        self._listener.close()
        self._listener = None
        connections = list(self._connections)
        for connection in connections:
            connection.finish()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(connection.gone for connection in connections)), 1.0)
        for connection in connections:
            connection.close()

    # ---- what connections report

    def admit(self, connection: Connection, writer: Writer) -> None:
        """The writer has proved the token and has the regions. A newer connection takes the grants to come."""
        connection.writer = writer
        self._writers[writer] = connection
        self.counters["writers_joined"] += 1
        log.info("%s: writer %s/%s joined", self.name, writer.worker, writer.generation)
        self._tell("writer_joined", writer)

    def landed(self, connection: Connection, lease_id: str, slot: int, count: int) -> None:
        grant = self._grant_of(connection, lease_id, slot)
        if grant is None or grant.fenced is not None:
            self.counters["late_landed" if grant else "unknown_landed"] += 1
            if grant is None:
                connection.refuse(lease_id, slot)
            else:  # the writer is done with it: as good as the acknowledgement of the fence, which is on its way
                self._end(grant)
            return
        if grant.landed:
            raise ProtocolError(f"lease {lease_id} landed twice")
        grant.landed = True
        self.counters["landed"] += 1
        self.counters["bytes"] += count
        self._tell("landed", lease_id)

    def aborted(self, connection: Connection, lease_id: str, slot: int, reason: str) -> None:
        grant = self._grant_of(connection, lease_id, slot)
        if grant is None:
            self.counters["unknown_aborts"] += 1
            return
        self.counters["aborts"] += 1
        over = grant.landed or grant.fenced is not None
        self._end(grant)
        if not over:  # after Landed only the acknowledgement came too late: the bytes are in place
            self._tell("push_failed", lease_id, reason)

    def revoke_acknowledged(self, connection: Connection, lease_id: str, slot: int) -> None:
        grant = self._grant_of(connection, lease_id, slot)
        if grant is None or grant.fenced is None:
            self.counters["unknown_acks"] += 1
            return
        self.counters["fence_acks"] += 1
        self._end(grant)

    def lost(self, connection: Connection) -> None:
        """The connection is over: none of its leases can be written any more."""
        self._connections.discard(connection)
        open_leases = [grant.lease_id for grant in connection.grants.values() if grant.fenced is None]
        for grant in list(connection.grants.values()):
            self._end(grant)
        writer = connection.writer
        if writer is None:
            return
        if self._writers.get(writer) is connection:
            del self._writers[writer]
            self.counters["writers_lost"] += 1
            log.info("%s: writer %s/%s lost", self.name, writer.worker, writer.generation)
            self._tell("writer_lost", writer)
        else:  # it has another connection, so only these leases are lost
            for lease_id in open_leases:
                self._tell("push_failed", lease_id, "the writer's connection broke and was replaced")

    # ---- inside

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.sock.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # out of descriptors: the writer will try again
            log.error("%s: cannot accept a writer: %s", self.name, error)
            return
        if sum(connection.writer is None for connection in self._connections) >= MAX_UNAUTHENTICATED:
            self.counters["refused_too_many"] += 1
            sock.close()
            return
        self._connections.add(self._connect(sock))

    def _connect(self, sock: socket.socket) -> Connection:
        connection = Connection(self, sock)
        asyncio.get_running_loop().call_later(self._handshake_timeout_s, connection.expect_joined)
        return connection

    def _grant_of(self, connection: Connection, lease_id: str, slot: int) -> Grant | None:
        grant = connection.grants.get(lease_id)
        return grant if grant is not None and grant.slot == slot else None

    def _end(self, grant: Grant) -> None:
        """The writer has no right to the lease any more, and no write under way."""
        self._grants.pop(grant.lease_id, None)
        grant.connection.grants.pop(grant.lease_id, None)
        grant.connection.page.release(grant.slot)
        if grant.fenced is not None and not grant.fenced.done():
            grant.fenced.set_result(None)

    def _tell(self, event: str, *arguments: object) -> None:
        """An owner's failure must not break the data plane."""
        try:
            getattr(self.events, event)(*arguments)
        except Exception:
            log.exception("%s: event %s%r failed", self.name, event, arguments)
