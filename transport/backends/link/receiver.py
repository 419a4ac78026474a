"""D's end of a link: admits writers, grants slots, fences, and passes on what writers say once it is true."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Literal, Protocol

from transport.backends.base import ReceiverEvents
from transport.backends.link import packets
from transport.backends.link.connection import Connection, Grant
from transport.backends.link.framing import Framing
from transport.backends.link.slots import Slots
from transport.backends.link.tcp import tune
from transport.errors import Overloaded, ProtocolError, WorkerLost
from transport.messages import Endpoint, Region, Writer

log = logging.getLogger(__name__)

MAX_UNAUTHENTICATED = 64


class Listener(Protocol):
    """A listening socket and how packets travel on the connections that it takes."""

    sock: socket.socket

    def framing(self) -> Framing: ...

    def close(self) -> None: ...


class LinkReceiver(ABC):
    """A `Receiver`; a backend says where it listens and what its slots are.

    `regions`: what a writer may store to, in the order of the pool description.
    `counters`: totals of bytes, grants, announced, landed, acknowledged, fences, aborts, writers, unknown and late
    messages, and failures by cause (`refused_<code>`), for the metrics. `nics`: (device, port) of its RDMA NICs.
    """

    backend: Literal["shm", "verbs", "nixl"]
    nics: Sequence[tuple[str, int]] = ()

    def __init__(
        self,
        name: str,
        generation: str,
        token: str,
        regions: Sequence[Region],
        events: ReceiverEvents,
        *,
        handshake_timeout_s: float = 5.0,
    ) -> None:
        self.name = name
        self.generation = generation
        self.token = token
        self.regions = list(regions)
        self.events = events
        self.counters: Counter[str] = Counter()
        self._handshake_timeout_s = handshake_timeout_s
        self._listener: Listener | None = None
        self._connections: set[Connection] = set()
        self._writers: dict[Writer, Connection] = {}
        self._grants: dict[str, Grant] = {}
        self._epochs = itertools.count(1)

    # ---- what a backend is

    @abstractmethod
    def listen(self) -> Listener:
        """Raises ConfigurationError if the address cannot be had."""

    @abstractmethod
    def make_slots(self, connection: Connection) -> Slots:
        """The slots of a writer that has proved the token."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Where writers reach it, as the backend's `connect` takes it."""

    def shut(self) -> None:
        """Everything is closed: release what the backend holds."""

    # ---- Receiver protocol

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(backend=self.backend, address=self.address)

    async def start(self) -> None:
        """Listen. Raises ConfigurationError if the address cannot be had."""
        self._listener = self.listen()
        asyncio.get_running_loop().add_reader(self._listener.sock, self._accept)

    def ready(self) -> str | None:
        return None

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
        slots = connection.slots
        assert slots is not None
        try:
            slot = slots.take(next(self._epochs))
        except IndexError:
            self.counters["refused_no_slot"] += 1
            raise Overloaded(f"all {slots.count} lease slots of {writer.worker} on {self.name} are taken") from None
        grant = self._grants[lease_id] = connection.grants[lease_id] = Grant(lease_id, slot, connection)
        connection.granted(grant)
        self.counters["grants"] += 1
        return slot

    def drained(self, lease_id: str) -> None:
        grant = self._grants.get(lease_id)
        if grant is not None:
            grant.drained += 1
            grant.connection.drained(grant)

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
            slots = grant.connection.slots
            assert slots is not None
            # First what stops the writer, so that one that has not read the packet yet writes no more either.
            stopped = slots.revoke(grant.slot)
            grant.connection.refuse(grant.lease_id, grant.slot)
            if stopped or grant.landed:  # after Landed, the writer has said already that it will write no more
                self._end(grant)
                return
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
        self.shut()

    # ---- what connections report

    def admit(self, connection: Connection, writer: Writer) -> None:
        """The writer has proved the token and has the regions. A newer connection takes the grants to come."""
        connection.writer = writer
        self._writers[writer] = connection
        self.counters["writers_joined"] += 1
        log.info("%s: writer %s/%s joined", self.name, writer.worker, writer.generation)
        self._tell("writer_joined", writer)

    def said(self, connection: Connection, packet: packets.Announced | packets.Landed) -> None:
        """A writer announces; the owner is told when it is so."""
        grant = self._grant_of(connection, packet.lease_id, packet.slot)
        what = type(packet).__name__.lower()
        if grant is None:
            self.counters[f"unknown_{what}"] += 1
            connection.refuse(packet.lease_id, packet.slot)
        elif grant.fenced is not None:
            self.counters[f"late_{what}"] += 1
            if isinstance(packet, packets.Landed):
                # The writer is done with it: as good as its acknowledgement of the fence, which is on its way.
                self._end(grant)
        elif grant.landed or (grant.said and isinstance(grant.said[-1], packets.Landed)):
            raise ProtocolError(f"lease {packet.lease_id}: {what} after it had landed")
        else:
            grant.said.append(packet)
            self._pass_on(grant)

    def arrived(self, connection: Connection, slot: int) -> None:
        """An immediate came in on a lease's slot: what was written before it is in place."""
        grant = self._grant_in(connection, slot)
        if grant is None or grant.fenced is not None:
            self.counters["late_immediates"] += 1
            return
        grant.arrived += 1
        self._pass_on(grant)

    def broken(self, connection: Connection, slot: int, reason: str) -> None:
        """A lease's slot can carry nothing any more, and nothing of it will land."""
        grant = self._grant_in(connection, slot)
        if grant is None:
            return
        over = grant.landed or grant.fenced is not None
        connection.refuse(grant.lease_id, grant.slot)
        self._end(grant)
        if not over:
            self._tell("push_failed", grant.lease_id, reason)

    def aborted(self, connection: Connection, lease_id: str, slot: int, reason: str) -> None:
        grant = self._grant_of(connection, lease_id, slot)
        if grant is None:
            self.counters["unknown_aborts"] += 1
            return
        self.counters["aborts"] += 1
        over = grant.landed or grant.fenced is not None
        if not grant.landed and connection.slots is not None:
            # What it posted before may still be under way, and overtaken by this packet.
            connection.slots.revoke(grant.slot)
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
        assert self._listener is not None
        if sock.family != socket.AF_UNIX:
            tune(sock)
        connection = Connection(self, sock, self._listener.framing())
        asyncio.get_running_loop().call_later(self._handshake_timeout_s, connection.expect_joined)
        return connection

    def _grant_of(self, connection: Connection, lease_id: str, slot: int) -> Grant | None:
        grant = connection.grants.get(lease_id)
        return grant if grant is not None and grant.slot == slot else None

    def _grant_in(self, connection: Connection, slot: int) -> Grant | None:
        return next((grant for grant in connection.grants.values() if grant.slot == slot), None)

    def _end(self, grant: Grant) -> None:
        """The writer has no right to the lease any more, and no write under way."""
        self._grants.pop(grant.lease_id, None)
        grant.connection.grants.pop(grant.lease_id, None)
        if grant.connection.slots is not None:
            grant.connection.slots.release(grant.slot)
        if grant.fenced is not None and not grant.fenced.done():
            grant.fenced.set_result(None)

    def _pass_on(self, grant: Grant) -> None:
        slots = grant.connection.slots
        while grant.said and (slots is None or not slots.immediates or grant.arrived):
            grant.arrived -= 1
            packet = grant.said.popleft()
            if isinstance(packet, packets.Landed):
                grant.landed = True
                self.counters["landed"] += 1
                self.counters["bytes"] += packet.bytes
                self._tell("landed", grant.lease_id)
            else:
                self.counters["announced"] += 1
                self._tell("announced", grant.lease_id, packets.piece(packet))

    def _tell(self, event: str, *arguments: object) -> None:
        """An owner's failure must not break the data plane."""
        try:
            getattr(self.events, event)(*arguments)
        except Exception:
            log.exception("%s: event %s%r failed", self.name, event, arguments)
