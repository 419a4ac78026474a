"""P's end of the shared-memory data plane: the receiver's regions, mapped."""

from __future__ import annotations

import socket

from transport.backends.base import OnLost
from transport.backends.link.framing import Datagrams
from transport.backends.link.handshake import PacketSocket, shake_hands
from transport.backends.link.slots import split_token
from transport.backends.link.writer import LinkPoolWriter
from transport.backends.shm.lease import ShmLeaseWriter
from transport.backends.shm.mapping import Mapped, take
from transport.errors import PushFailed
from transport.messages import Lease, PoolDescription, Writer


def connect(
    pool: PoolDescription, writer: Writer, token: str, *, on_lost: OnLost | None = None, timeout_s: float = 5.0
) -> ShmPoolWriter:
    """Connect to a pool's receiver. `on_lost(reason)` is called once, in the listening thread, if it goes away.

    Raises AuthenticationFailed, StaleGeneration, GeometryMismatch, ProtocolError, PushFailed (cannot connect).
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout_s)
        try:
            sock.connect(pool.endpoint.address)
        except OSError as error:
            raise PushFailed(
                f"cannot connect to pool {pool.worker} at {pool.endpoint.address}: {error.strerror or error}"
            ) from error
        link = PacketSocket(sock, Datagrams())
        return ShmPoolWriter(link, pool, shake_hands(link, pool, writer, token, take), on_lost)
    except BaseException:
        sock.close()
        raise


class ShmPoolWriter(LinkPoolWriter):
    """`regions`: uint8 views of the receiver's regions; `words`: the revocation words of this connection's slots."""

    def __init__(self, link: PacketSocket, pool: PoolDescription, mapped: Mapped, on_lost: OnLost | None) -> None:
        super().__init__(link, pool, mapped.slots, [len(region) for region in mapped.regions], on_lost)
        self.regions = mapped.regions
        self.views = [region.data for region in mapped.regions]
        self.words = mapped.words
        self.listen()

    def _make_lease(self, lease_id: str, token: int) -> ShmLeaseWriter:
        return ShmLeaseWriter(self, lease_id, token)

    def _may_write(self, lease: Lease) -> bool:
        slot, epoch = split_token(lease.slot)
        return bool(self.words[slot] == epoch)
