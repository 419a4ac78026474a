"""Packets on a socket: as they are where the socket keeps their boundaries, in authenticated frames on a stream."""

from __future__ import annotations

import hashlib
import hmac
from collections import deque
from typing import Protocol

from transport import auth
from transport.backends.link.packets import MAX_PACKET, Open
from transport.errors import AuthenticationFailed, ProtocolError

_LENGTH_BYTES = 4
_MAC_BYTES = 16


class Framing(Protocol):
    """One socket's packets. `pop` is called again and again after each `feed`, until it returns None."""

    def wrap(self, packet: bytes) -> bytes:
        """What to send for a packet."""

    def feed(self, data: bytes) -> None:
        """Take what was received."""

    def pop(self) -> bytes | None:
        """The next whole packet, or None. Raises ProtocolError, AuthenticationFailed."""

    def seal(self, token: str, side: str, context: tuple[bytes, ...]) -> None:
        """From now on both directions are authenticated, where the medium needs it. `side`: writer or receiver."""


class Datagrams:
    """A socket that keeps packets apart and that nobody else can write to (a Unix socket)."""

    def __init__(self) -> None:
        self._packets: deque[bytes] = deque()

    def wrap(self, packet: bytes) -> bytes:
        return packet

    def feed(self, data: bytes) -> None:
        self._packets.append(data)

    def pop(self) -> bytes | None:
        return self._packets.popleft() if self._packets else None

    def seal(self, token: str, side: str, context: tuple[bytes, ...]) -> None:
        pass


class Frames:
    """A TCP stream: length, then (once sealed) a MAC over the packet and its number, then the packet.

    The keys come from the token and both ends' nonces, one per direction: frames can be neither forged, nor
    replayed, nor left out.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._send_key = self._receive_key = b""
        self._sent = self._received = 0

    def wrap(self, packet: bytes) -> bytes:
        mac = b""
        if self._send_key:
            mac = _mac(self._send_key, self._sent, packet)
            self._sent += 1
        return len(packet).to_bytes(_LENGTH_BYTES, "big") + mac + packet

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def pop(self) -> bytes | None:
        head = _LENGTH_BYTES + (_MAC_BYTES if self._receive_key else 0)
        if len(self._buffer) < head:
            return None
        length = int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
        if length > MAX_PACKET:
            raise ProtocolError(f"a packet of {length} bytes on the data plane, {MAX_PACKET} are allowed")
        if len(self._buffer) < head + length:
            return None
        packet = bytes(self._buffer[head : head + length])
        if self._receive_key:
            given = bytes(self._buffer[_LENGTH_BYTES:head])
            if not hmac.compare_digest(given, _mac(self._receive_key, self._received, packet)):
                raise AuthenticationFailed("a packet on the data plane was not sent by the peer, or was changed")
            self._received += 1
        del self._buffer[: head + length]
        return packet

    def seal(self, token: str, side: str, context: tuple[bytes, ...]) -> None:
        keys = {end: auth.proof(token, f"frames of the {end}", *context) for end in ("writer", "receiver")}
        self._send_key = keys.pop(side)
        (self._receive_key,) = keys.values()


def handshake_context(opening: Open, nonce: bytes) -> tuple[bytes, ...]:
    """All that both proofs vouch for."""
    names = (opening.backend, opening.worker, opening.generation, opening.pool, opening.pool_generation)
    return (opening.nonce, nonce, *(name.encode() for name in names))


def _mac(key: bytes, number: int, packet: bytes) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "big") + packet, key=key, digest_size=_MAC_BYTES).digest()
