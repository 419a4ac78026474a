"""What goes over the Unix socket between a writer and a receiver: one packet per message, file descriptors aside.

writer                                   receiver
Open(who, pool generation, nonce)   →
                                    ←    Challenge(nonce)
Proof(HMAC over both nonces)        →
                                    ←    Welcome(HMAC, regions) with fds, or Refused
Landed | Aborted | RevokeAck        →    Acknowledged | Revoke
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass

import msgpack  # type: ignore[import-untyped]

from transport.errors import ProtocolError

VERSION = 1
MAX_PACKET = 64 * 1024
MAX_REASON_CHARS = 500
FDS_PER_PACKET = 200
"""The kernel passes at most 253 descriptors with one packet."""


@dataclass(frozen=True, slots=True)
class Open:
    """`pool` and `pool_generation`: the receiver that the writer means to reach."""

    version: int
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
    """Descriptors follow in `Descriptors` packets: the control page first, then one per region.

    `lengths`, `offsets`: bytes of each region, and where it starts in its descriptor.
    """

    proof: bytes
    slots: int
    lengths: list[int]
    offsets: list[int]


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Carries `count` descriptors."""

    count: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A HawkError: the connection is not accepted."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Landed:
    """Every byte of the lease is in place, and the writer will write no more of it."""

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
class Acknowledged:
    """The push has landed at the receiver's owner."""

    lease_id: str
    slot: int


@dataclass(frozen=True, slots=True)
class Revoke:
    """Stop writing, and say so with `RevokeAck` (not needed after Landed or Aborted)."""

    lease_id: str
    slot: int


Packet = (
    Open | Challenge | Proof | Welcome | Descriptors | Refused | Landed | Aborted | RevokeAck | Acknowledged | Revoke
)

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
