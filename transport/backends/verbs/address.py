"""A queue pair's address, as it travels to the peer."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from transport.errors import ProtocolError

_MTUS = (256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class Address:
    """What a peer must know to connect: queue pair number, first packet number, GID or LID, path MTU in bytes."""

    qp_num: int
    psn: int
    gid: str
    lid: int
    mtu: int

    def to_list(self) -> list[int | str]:
        """Plain values, for msgpack."""
        return [self.qp_num, self.psn, self.gid, self.lid, self.mtu]

    @classmethod
    def from_list(cls, values: object) -> Address:
        """Raises ProtocolError if a peer sent anything else than an address."""
        match values:
            case [int(qp_num), int(psn), str(gid), int(lid), int(mtu)]:
                pass
            case _:
                raise ProtocolError(f"{values!r} is no queue pair address")
        try:
            ipaddress.IPv6Address(gid)
        except ValueError as error:
            raise ProtocolError(f"{gid!r} is no GID") from error
        if not (0 <= qp_num < 1 << 24 and 0 <= psn < 1 << 24 and 0 <= lid < 1 << 16 and mtu in _MTUS):
            raise ProtocolError(f"{values!r} is no queue pair address: a number is out of range")
        return cls(qp_num, psn, gid, lid, mtu)
