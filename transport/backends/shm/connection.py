"""One writer's connection, seen from the receiver: the handshake, then packets to and fro."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transport import auth
from transport.backends.shm import wire
from transport.backends.shm.channel import PacketChannel
from transport.backends.shm.control import ControlPage
from transport.errors import HawkError, ProtocolError, StaleGeneration
from transport.messages import Writer

if TYPE_CHECKING:
    from transport.backends.shm.receiver import ShmReceiver

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Grant:
    """A lease that its writer may write. `slot`: the token in `Lease.slot`."""

    lease_id: str
    slot: int
    connection: Connection
    landed: bool = False
    fenced: asyncio.Future[None] | None = None


class Connection:
    """`writer` is None until the handshake is complete; `gone` is done when the peer has closed."""

    def __init__(self, receiver: ShmReceiver, sock: socket.socket) -> None:
        self.writer: Writer | None = None
        self.page = ControlPage(receiver.slots)
        self.grants: dict[str, Grant] = {}
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._receiver = receiver
        self._open: wire.Open | None = None
        self._nonce = auth.nonce()
        self.finished = False
        self._channel = PacketChannel(sock, self._packet, self._eof)

    # ---- what the receiver asks for

    def revoke(self, grant: Grant) -> None:
        """The word first, so that a writer that has not read the packet yet starts no further chunk."""
        self.page.revoke(grant.slot)
        self._channel.send(wire.Revoke(grant.lease_id, grant.slot))

    def refuse(self, lease_id: str, slot: int) -> None:
        """The lease is not the writer's any more."""
        self._channel.send(wire.Revoke(lease_id, slot))

    def acknowledge(self, grant: Grant) -> None:
        self._channel.send(wire.Acknowledged(grant.lease_id, grant.slot))

    def finish(self) -> None:
        """Ask the writer to go; `gone` tells when it has no write under way any more."""
        self.finished = True
        for grant in self.grants.values():
            self.page.revoke(grant.slot)
        self._channel.finish()

    def expect_joined(self) -> None:
        """The time for the handshake is over."""
        if self.writer is None and not self._channel.closed:
            self._receiver.counters["refused_handshake_timeout"] += 1
            self.close()

    def close(self) -> None:
        """Drop the connection now: only for a peer that has no regions, or with the whole receiver."""
        if not self._channel.closed:
            self._channel.close()
            self._eof()

    # ---- what comes from the writer

    def _eof(self) -> None:
        self._receiver.lost(self)
        self.page.close()
        if not self.gone.done():
            self.gone.set_result(None)

    def _packet(self, data: bytes) -> None:
        if self.finished:
            # Nothing that it says counts any more; it is gone when it closes.
            return
        try:
            packet = wire.unpack(data)
            if self.writer is None:
                self._handshake(packet)
            else:
                self._message(packet)
        except HawkError as error:
            self._receiver.counters[f"refused_{error.code}"] += 1
            log.warning("%s: data-plane connection refused: %s", self._receiver.name, error)
            if self.writer is None:
                self._channel.send(wire.Refused(error.code, error.message))
                self.close()
            else:
                # It has the regions mapped: only its own end of the connection shows that it stopped writing.
                self.finish()

    def _handshake(self, packet: wire.Packet) -> None:
        receiver = self._receiver
        if isinstance(packet, wire.Open) and self._open is None:
            if packet.version != wire.VERSION:
                raise ProtocolError(
                    f"data-plane version mismatch: writer speaks {packet.version}, receiver {wire.VERSION}"
                )
            self._open = packet
            self._channel.send(wire.Challenge(self._nonce))
            return
        if not isinstance(packet, wire.Proof) or self._open is None:
            raise ProtocolError(f"{type(packet).__name__} during the handshake")
        context = handshake_context(self._open, self._nonce)
        auth.check_proof(packet.proof, receiver.token, "writer", *context)
        if (self._open.pool, self._open.pool_generation) != (receiver.name, receiver.generation):
            raise StaleGeneration(
                f"this is pool {receiver.name}, generation {receiver.generation}; "
                f"the writer wants {self._open.pool}, generation {self._open.pool_generation}"
            )
        writer = Writer(worker=self._open.worker, generation=self._open.generation)
        self._channel.send(
            wire.Welcome(
                auth.proof(receiver.token, "receiver", *context),
                receiver.slots,
                [region.length for region, _, _ in receiver.regions],
                [offset for _, _, offset in receiver.regions],
            )
        )
        fds = [self.page.fd, *(fd for _, fd, _ in receiver.regions)]
        for start in range(0, len(fds), wire.FDS_PER_PACKET):
            part = fds[start : start + wire.FDS_PER_PACKET]
            self._channel.send(wire.Descriptors(len(part)), part)
        receiver.admit(self, writer)

    def _message(self, packet: wire.Packet) -> None:
        if isinstance(packet, wire.Landed):
            self._receiver.landed(self, packet.lease_id, packet.slot, packet.bytes)
        elif isinstance(packet, wire.Aborted):
            self._receiver.aborted(self, packet.lease_id, packet.slot, packet.reason)
        elif isinstance(packet, wire.RevokeAck):
            self._receiver.revoke_acknowledged(self, packet.lease_id, packet.slot)
        else:
            raise ProtocolError(f"{type(packet).__name__} from a writer that has joined")


def handshake_context(opening: wire.Open, nonce: bytes) -> tuple[bytes, ...]:
    """All that both proofs vouch for."""
    names = (opening.worker, opening.generation, opening.pool, opening.pool_generation)
    return (opening.nonce, nonce, *(name.encode() for name in names))
