"""P's end of the NIXL data plane: an agent per pool, all of them sending from one staging memory."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from transport import auth
from transport.backends.base import OnLost, WriterOptions
from transport.backends.link import packets
from transport.backends.link.handshake import Offer, PacketSocket, shake_hands
from transport.backends.link.staging import StagingMemory
from transport.backends.link.tcp import connect_tcp
from transport.backends.link.writer import LinkPoolWriter
from transport.backends.nixl.agent import Agent, Write
from transport.backends.nixl.lease import NixlLeaseWriter
from transport.errors import ProtocolError, PushFailed
from transport.kernels.source import address
from transport.messages import PoolDescription, Writer

_STALL_S = 30.0
"""How long one chunk may take: a receiver that is stopped, or a network that is gone."""

_numbers = itertools.count()
_staging_lock = threading.Lock()
_staging: dict[int, StagingMemory] = {}


def connect(
    pool: PoolDescription,
    writer: Writer,
    token: str,
    *,
    on_lost: OnLost | None = None,
    options: WriterOptions | None = None,
    timeout_s: float = 5.0,
) -> NixlPoolWriter:
    """Connect to a pool's receiver. `on_lost(reason)` is called once, in the listening thread, if it goes away.

    Raises AuthenticationFailed, StaleGeneration, GeometryMismatch, ProtocolError, PushFailed (cannot connect),
    ConfigurationError (no NIXL, or UCX refuses).
    """
    staging = staging_of(options or WriterOptions())
    link = connect_tcp(pool, timeout_s)
    try:
        name = f"{writer.worker}/{writer.generation}/{os.getpid()}/{next(_numbers)}"

        def take(link: PacketSocket, offer: Offer) -> Target:
            agent = Agent(name, link.sock.getsockname()[0])
            try:
                return _join(agent, staging, link, offer, timeout_s)
            except BaseException:
                agent.close()
                raise

        return NixlPoolWriter(link, pool, shake_hands(link, pool, writer, token, take), staging, on_lost)
    except BaseException:
        link.sock.close()
        raise


def staging_of(options: WriterOptions) -> StagingMemory:
    """The process's staging memory of that size; its pages are taken when they are first written."""
    with _staging_lock:
        if options.staging_bytes not in _staging:
            _staging[options.staging_bytes] = StagingMemory(options.staging_bytes)
        return _staging[options.staging_bytes]


@dataclass(frozen=True, slots=True)
class Target:
    """The receiver's `peer` agent as `agent` reaches it; region i has `lengths[i]` bytes at `addresses[i]` there."""

    agent: Agent
    peer: str
    slots: int
    addresses: list[int]
    lengths: list[int]

    def close(self) -> None:
        self.agent.close()


class NixlPoolWriter(LinkPoolWriter):
    """Every write is in place at the receiver when it returns."""

    def __init__(
        self, link: PacketSocket, pool: PoolDescription, target: Target, staging: StagingMemory, on_lost: OnLost | None
    ) -> None:
        super().__init__(link, pool, target.slots, target.lengths, on_lost)
        self.staging = staging
        self.addresses = target.addresses
        self._target = target
        self.listen()

    def send_writes(self, writes: Sequence[Write]) -> None:
        """Returns when they are in place; a failure ends the connection. Called in a chunk. Raises PushFailed."""
        try:
            self._target.agent.write(self._target.peer, writes, _STALL_S, lambda: self.alive)
        except PushFailed as error:
            self._end(error.message)
            raise

    def _make_lease(self, lease_id: str, token: int) -> NixlLeaseWriter:
        return NixlLeaseWriter(self, lease_id, token)

    def _release(self) -> None:
        self._target.close()


def _join(agent: Agent, staging: StagingMemory, link: PacketSocket, offer: Offer, timeout_s: float) -> Target:
    """Reach the receiver's agent, and have it confirm that a trial write has arrived."""
    try:
        metadata, addresses, probe = offer.details
    except ValueError:
        raise ProtocolError(f"an offer of {len(offer.details)} parts instead of 3") from None
    if (
        not isinstance(metadata, bytes)
        or not isinstance(probe, int)
        or not isinstance(addresses, list)
        or not all(isinstance(where, int) for where in addresses)
        or len(addresses) != len(offer.lengths)
    ):
        raise ProtocolError("the offer is not metadata, an address per region, and one for a trial")
    agent.register([staging.array])
    peer = agent.join(metadata)
    word = auth.nonce()
    buffer = staging.take(len(word), timeout_s)
    try:
        buffer[:] = memoryview(word)
        agent.write(peer, [(address(buffer), probe, len(word))], timeout_s, lambda: True)
    except PushFailed as error:
        raise PushFailed(f"a trial write did not get through to the receiver: {error.message}") from error
    finally:
        offset = staging.locate(buffer)
        assert offset is not None
        staging.give(offset)
    link.send(packets.Setup([word]))
    link.expect(packets.Ready)
    return Target(agent, peer, offer.slots, addresses, offer.lengths)


def _forget_in_child() -> None:
    """The memory is not inherited."""
    _staging.clear()


os.register_at_fork(after_in_child=_forget_in_child)
