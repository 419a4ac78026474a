"""The writer's half of the handshake: from a connected socket to what the receiver offers."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from transport import auth
from transport.backends.link import packets
from transport.backends.link.framing import Framing, handshake_context
from transport.errors import GeometryMismatch, ProtocolError, PushFailed, from_code
from transport.messages import PoolDescription, Writer

P = TypeVar("P")


class PacketSocket:
    """The writer's end of a link: blocking, with the socket's own time-outs."""

    def __init__(self, sock: socket.socket, framing: Framing) -> None:
        self.sock = sock
        self.framing = framing

    def send(self, packet: packets.Packet) -> None:
        """Raises OSError."""
        self.sock.sendall(self.framing.wrap(packets.pack(packet)))

    def receive(self) -> packets.Packet | None:
        """The next packet, None at the end. Raises OSError, ProtocolError, AuthenticationFailed."""
        while (data := self.framing.pop()) is None:
            received = self.sock.recv(packets.MAX_PACKET)
            if not received:
                return None
            self.framing.feed(received)
        return packets.unpack(data)

    def expect(self, kind: type[P]) -> P:
        """The next packet, which must be a `kind`. Raises what a `Refused` says, ProtocolError, PushFailed."""
        packet = self.receive()
        if packet is None:
            raise PushFailed("the receiver closed the connection during the handshake")
        if isinstance(packet, packets.Refused):
            raise from_code(packet.code, packet.message)
        if not isinstance(packet, kind):
            raise ProtocolError(f"{type(packet).__name__} instead of {kind.__name__} during the handshake")
        return packet


class Memory(Protocol):
    """What a backend makes of an offer; `close` gives it back."""

    def close(self) -> None: ...


M = TypeVar("M", bound=Memory)


@dataclass(frozen=True, slots=True)
class Offer:
    """`slots`: of the connection. `lengths`: bytes of each region. `details`: the backend's own."""

    slots: int
    lengths: list[int]
    details: list[object]


def shake_hands(
    link: PacketSocket,
    pool: PoolDescription,
    writer: Writer,
    token: str,
    take: Callable[[PacketSocket, Offer], M],
) -> M:
    """Both sides prove the token, then `take` makes the receiver's memory reachable.

    Raises AuthenticationFailed, StaleGeneration (the receiver is another process by now), GeometryMismatch
    (its regions are not those of `pool`), ProtocolError, PushFailed (gone or silent).
    """
    opening = packets.Open(
        packets.VERSION,
        pool.endpoint.backend,
        writer.worker,
        writer.generation,
        pool.worker,
        pool.generation,
        auth.nonce(),
    )
    try:
        link.send(opening)
        challenge = link.expect(packets.Challenge)
        context = handshake_context(opening, challenge.nonce)
        link.send(packets.Proof(auth.proof(token, "writer", *context)))
        welcome = link.expect(packets.Welcome)
        offered = packets.offered(welcome.slots, welcome.lengths, welcome.offer)
        auth.check_proof(welcome.proof, token, "receiver", *context, offered)
        link.framing.seal(token, "writer", context)
        expected = [region.length for region in ((pool.staging,) if pool.staging else pool.channels)]
        if welcome.lengths != expected:
            raise GeometryMismatch(
                f"pool {pool.worker} hands out regions of {welcome.lengths} bytes, its description says {expected}"
            )
        return take(link, Offer(welcome.slots, welcome.lengths, welcome.offer))
    except TimeoutError:
        raise PushFailed(f"pool {pool.worker} does not answer on {pool.endpoint.address}") from None
    except OSError as error:
        raise PushFailed(f"connection to pool {pool.worker} broke during the handshake: {error}") from error
