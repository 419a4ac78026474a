"""One writer's connection, seen from the receiver: the handshake, then packets to and fro."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transport import auth
from transport.backends.link import packets
from transport.backends.link.channel import PacketChannel
from transport.backends.link.framing import Framing, handshake_context
from transport.backends.link.slots import Slots
from transport.errors import HawkError, ProtocolError, StaleGeneration
from transport.messages import Writer

if TYPE_CHECKING:
    from transport.backends.link.receiver import LinkReceiver

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Grant:
    """A lease that its writer may write. `slot`: the token in `Lease.slot`.

    `said`: what the writer has announced and the receiver not yet passed on. `arrived`: immediates of the slot that
    belong to none of it yet. `drained`: pieces that have left their staging.
    """

    lease_id: str
    slot: int
    connection: Connection
    said: deque[packets.Announced | packets.Landed] = field(default_factory=deque)
    arrived: int = 0
    drained: int = 0
    landed: bool = False
    fenced: asyncio.Future[None] | None = None


class Connection:
    """`writer` is None until the handshake is complete; `gone` is done when nothing of it can land any more."""

    def __init__(self, receiver: LinkReceiver, sock: socket.socket, framing: Framing) -> None:
        self.writer: Writer | None = None
        self.grants: dict[str, Grant] = {}
        self.slots: Slots | None = None
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.finished = False
        self.local_host = str(sock.getsockname()[0]) if sock.family != socket.AF_UNIX else ""
        self._receiver = receiver
        self._open: packets.Open | None = None
        self._nonce = auth.nonce()
        self._channel = PacketChannel(sock, framing, self._packet, self._eof)

    # ---- what the receiver asks for

    def granted(self, grant: Grant) -> None:
        assert self.slots is not None
        if not self.slots.shared:
            self._channel.send(packets.Granted(grant.lease_id, grant.slot))

    def refuse(self, lease_id: str, slot: int) -> None:
        """The lease is not the writer's any more."""
        self._channel.send(packets.Revoke(lease_id, slot))

    def drained(self, grant: Grant) -> None:
        self._channel.send(packets.Drained(grant.lease_id, grant.slot, grant.drained))

    def acknowledge(self, grant: Grant) -> None:
        self._channel.send(packets.Acknowledged(grant.lease_id, grant.slot))

    def tell(self, packet: packets.Renewed | packets.Taken) -> None:
        """A lane was rebuilt at this end, or has room again."""
        self._channel.send(packet)

    def finish(self) -> None:
        """Ask the writer to go; `gone` tells when it has no write under way any more."""
        if self.finished:
            return
        self.finished = True
        if self.slots is None or self.slots.strict:
            self.close()
            return
        for grant in self.grants.values():
            self.slots.revoke(grant.slot)
        self._channel.finish()

    def expect_joined(self) -> None:
        """The time for the handshake is over."""
        if self.writer is None and not self._channel.closed:
            self._receiver.counters["refused_handshake_timeout"] += 1
            self.close()

    def close(self) -> None:
        """Drop the connection now: only for a peer that has no regions or is stopped by it, or with the receiver."""
        if not self._channel.closed:
            self._channel.close()
            self._eof()

    # ---- what comes from the writer

    def _eof(self) -> None:
        if self.slots is not None:
            self.slots.close()
        self._receiver.lost(self)
        if not self.gone.done():
            self.gone.set_result(None)

    def _packet(self, data: bytes) -> None:
        if self.finished:
            # Nothing that it says counts any more; it is gone when it closes.
            return
        try:
            packet = packets.unpack(data)
            if self.writer is None:
                self._handshake(packet)
            else:
                self._message(packet)
        except HawkError as error:
            self._receiver.counters[f"refused_{error.code}"] += 1
            log.warning("%s: data-plane connection refused: %s", self._receiver.name, error)
            if self.writer is None:
                self._channel.send(packets.Refused(error.code, error.message))
                self.close()
            else:
                # It has the regions mapped: only its own end of the connection shows that it stopped writing.
                self.finish()

    def _handshake(self, packet: packets.Packet) -> None:
        if self.slots is not None:
            if not isinstance(packet, packets.Setup):
                raise ProtocolError(f"{type(packet).__name__} during the handshake")
            if not self.slots.setup(packet.answer):
                raise ProtocolError("the writer's answer to the offer is incomplete")
            self._channel.send(packets.Ready())
            self._admit()
        elif isinstance(packet, packets.Open) and self._open is None:
            if packet.version != packets.VERSION:
                raise ProtocolError(
                    f"data-plane version mismatch: writer speaks {packet.version}, receiver {packets.VERSION}"
                )
            if packet.backend != self._receiver.backend:
                raise ProtocolError(f"the writer wants backend {packet.backend!r}, this is {self._receiver.backend!r}")
            self._open = packet
            self._channel.send(packets.Challenge(self._nonce))
        elif isinstance(packet, packets.Proof) and self._open is not None:
            self._welcome(packet, self._open)
        else:
            raise ProtocolError(f"{type(packet).__name__} during the handshake")

    def _welcome(self, packet: packets.Proof, opening: packets.Open) -> None:
        receiver = self._receiver
        context = handshake_context(opening, self._nonce)
        auth.check_proof(packet.proof, receiver.token, "writer", *context)
        if (opening.pool, opening.pool_generation) != (receiver.name, receiver.generation):
            raise StaleGeneration(
                f"this is pool {receiver.name}, generation {receiver.generation}; "
                f"the writer wants {opening.pool}, generation {opening.pool_generation}"
            )
        self.slots = receiver.make_slots(self)
        offer, fds = self.slots.offer()
        lengths = [region.length for region in receiver.regions]
        proof = auth.proof(receiver.token, "receiver", *context, packets.offered(self.slots.count, lengths, offer))
        self._channel.send(packets.Welcome(proof, self.slots.count, lengths, offer))
        self._channel.framing.seal(receiver.token, "receiver", context)
        for start in range(0, len(fds), packets.FDS_PER_PACKET):
            part = fds[start : start + packets.FDS_PER_PACKET]
            self._channel.send(packets.Descriptors(len(part)), part)
        if self.slots.setup(None):
            self._admit()

    def _admit(self) -> None:
        assert self._open is not None
        self._receiver.admit(self, Writer(worker=self._open.worker, generation=self._open.generation))

    def _message(self, packet: packets.Packet) -> None:
        if isinstance(packet, packets.Landed | packets.Announced):
            self._receiver.said(self, packet)
        elif isinstance(packet, packets.Aborted):
            self._receiver.aborted(self, packet.lease_id, packet.slot, packet.reason)
        elif isinstance(packet, packets.RevokeAck):
            self._receiver.revoke_acknowledged(self, packet.lease_id, packet.slot)
        elif isinstance(packet, packets.Renewed) and self.slots is not None:
            self.slots.renewed(packet)
        else:
            raise ProtocolError(f"{type(packet).__name__} from a writer")
