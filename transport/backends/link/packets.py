"""What goes over the link between a writer and a receiver: one packet per message, file descriptors aside.

writer                                   receiver
Open(who, pool generation, nonce)   →
                                    ←    Challenge(nonce)
Proof(HMAC over both nonces)        →
                                    ←    Welcome(HMAC, offer), with Descriptors, or Refused
Setup(answer)                       →    where the backend's memory needs an answer
                                    ←    Ready
                                    ←    Granted, where no shared word tells which leases may be written
Announced | Landed | Aborted        →    Drained | Acknowledged | Revoke
RevokeAck                           →
Renewed                             ↔    a lane of the backend, rebuilt after it was fenced
                                    ←    Taken, where announcements use up something at the receiver
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass

import msgpack  # type: ignore[import-untyped]

from transport.backends.base import Piece
from transport.errors import ProtocolError

VERSION = 3
MAX_PACKET = 64 * 1024
MAX_REASON_CHARS = 500
FDS_PER_PACKET = 200
"""The kernel passes at most 253 descriptors with one packet."""


@dataclass(frozen=True, slots=True)
class Open:
    """`pool` and `pool_generation`: the receiver that the writer means to reach by `backend`."""

    version: int
    backend: str
    worker: str
    generation: str
    pool: str
    pool_generation: str
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Challenge:
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Proof:
    proof: bytes


@dataclass(frozen=True, slots=True)
class Welcome:
    """`lengths`: bytes of each region. `offer`: what else a writer needs to reach them, the backend's own."""

    proof: bytes
    slots: int
    lengths: list[int]
    offer: list[object]


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Carries `count` descriptors."""

    count: int


@dataclass(frozen=True, slots=True)
class Setup:
    """The writer's answer to the offer."""

    answer: list[object]


@dataclass(frozen=True, slots=True)
class Ready:
    """The answer was taken: leases may be granted."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A HawkError: the connection is not accepted."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Granted:
    """The lease may be written through its slot until it is acknowledged or revoked."""

    lease_id: str
    slot: int


@dataclass(frozen=True, slots=True)
class Announced:
    """A `base.Piece` of the lease, and all that came before it, was written."""

    lease_id: str
    slot: int
    piece: list[object]


@dataclass(frozen=True, slots=True)
class Landed:
    """Every byte of the lease was written, and the writer will write no more of it."""

    lease_id: str
    slot: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Aborted:
    """The writer gave up, and will write no more of the lease."""

    lease_id: str
    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class RevokeAck:
    """No write of the lease is under way and none will be: also sent for leases the writer does not know."""

    lease_id: str
    slot: int


@dataclass(frozen=True, slots=True)
class Drained:
    """`count` announced pieces have left their staging so far."""

    lease_id: str
    slot: int
    count: int


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The push has landed at the receiver's owner."""

    lease_id: str
    slot: int


@dataclass(frozen=True, slots=True)
class Revoke:
    """Stop writing, and say so with `RevokeAck` (not needed after Landed or Aborted)."""

    lease_id: str
    slot: int


@dataclass(frozen=True, slots=True)
class Taken:
    """`count` immediates of the slot's lease were seen so far, and there is room again for as many."""

    slot: int
    count: int


@dataclass(frozen=True, slots=True)
class Renewed:
    """A fenced lane was rebuilt at this end; `turn` counts how often, `address` is where the other end reaches it."""

    lane: int
    turn: int
    address: list[object]


Packet = (
    Open
    | Challenge
    | Proof
    | Welcome
    | Descriptors
    | Setup
    | Ready
    | Refused
    | Granted
    | Announced
    | Landed
    | Aborted
    | RevokeAck
    | Drained
    | Acknowledged
    | Revoke
    | Taken
    | Renewed
)


def announcement(lease_id: str, slot: int, piece: Piece) -> Announced:
    spans: list[object] = [piece.start, piece.stop, piece.first_tensor, piece.last_tensor]
    return Announced(lease_id, slot, [*spans, list(piece.digests)])


def piece(packet: Announced) -> Piece:
    """What was announced. Raises ProtocolError."""
    try:
        *spans, digests = packet.piece
        start, stop, first, last = (_natural(value) for value in spans)
        if not isinstance(digests, list):
            raise ValueError("digests are no list")
        return Piece(start, stop, first, last, tuple(_natural(digest) for digest in digests))
    except ValueError as error:
        raise ProtocolError(f"lease {packet.lease_id}: bad announcement {packet.piece}: {error}") from error


def _natural(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a natural number")
    return value


def offered(slots: int, lengths: list[int], offer: list[object]) -> bytes:
    """What of a `Welcome` its proof vouches for."""
    packed: bytes = msgpack.packb([slots, lengths, offer])
    return packed


_TYPES: dict[str, type] = {cls.__name__: cls for cls in typing.get_args(Packet)}
_FIELDS: dict[type, list[type]] = {
    cls: [typing.get_origin(hint) or hint for hint in typing.get_type_hints(cls).values()] for cls in _TYPES.values()
}


def pack(packet: Packet) -> bytes:
    """The bytes of one packet."""
    fields = (getattr(packet, field.name) for field in dataclasses.fields(packet))
    packed: bytes = msgpack.packb([type(packet).__name__, *fields])
    return packed


def unpack(data: bytes) -> Packet:
    """Raises ProtocolError for anything that `pack` would not have made."""
    try:
        tag, *fields = msgpack.unpackb(data, max_ext_len=0)
        cls = _TYPES[tag]
        kinds = _FIELDS[cls]
        if len(fields) != len(kinds) or any(type(value) is not kind for value, kind in zip(fields, kinds, strict=True)):
            raise ValueError(f"wrong fields in {tag}")
        packet: Packet = cls(*fields)
    except Exception as error:
        raise ProtocolError(f"bad packet of {len(data)} bytes on the data plane: {error}") from error
    return packet
