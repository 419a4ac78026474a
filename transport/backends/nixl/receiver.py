"""D's end of the NIXL data plane: regions mapped once, a link and an agent per writer."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

from transport.backends.base import ReceiverEvents
from transport.backends.link.connection import Connection
from transport.backends.link.mapping import map_shared
from transport.backends.link.packets import MAX_PACKET
from transport.backends.link.receiver import LinkReceiver
from transport.backends.link.tcp import TcpListener
from transport.backends.nixl import ucx
from transport.backends.nixl.agent import Agent
from transport.backends.nixl.slots import NixlSlots
from transport.errors import ConfigurationError
from transport.messages import Region

log = logging.getLogger(__name__)

DEFAULT_SLOTS = 1024
_MAX_METADATA = MAX_PACKET * 3 // 4


class NixlReceiver(LinkReceiver):
    """A `Receiver` whose writers store into its regions by way of UCX.

    `regions`: (region, descriptor, byte in the descriptor where the region starts), in the order of the pool
    description. The descriptors stay the caller's. `host`: where the link listens, and on whose interface UCX does;
    UCX asks nobody for a token, so that only hosts that may write the pool's memory should reach it there.
    `fence_wait_s`: how long a fenced writer may be silent before it is cut off (where UCX's transports allow that).
    Raises ConfigurationError: no NIXL, an address that cannot be had, regions that cannot be mapped or registered.
    """

    backend = "nixl"

    def __init__(
        self,
        name: str,
        generation: str,
        token: str,
        regions: Sequence[tuple[Region, int, int]],
        events: ReceiverEvents,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        slots: int = DEFAULT_SLOTS,
        fence_wait_s: float = 5.0,
        handshake_timeout_s: float = 5.0,
    ) -> None:
        super().__init__(
            name,
            generation,
            token,
            [region for region, _, _ in regions],
            events,
            handshake_timeout_s=handshake_timeout_s,
        )
        self._slots = slots
        self._fence_wait_s = fence_wait_s
        self._agents = itertools.count()
        try:
            self._memory = [map_shared(fd, offset, region.length) for region, fd, offset in regions]
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"cannot map the regions of {name}: {error}") from error
        self._try(host)
        self._tcp = TcpListener(host, port)

    @property
    def address(self) -> str:
        """`host:port` of the link."""
        return self._tcp.address

    def listen(self) -> TcpListener:
        return self._tcp

    def make_slots(self, connection: Connection) -> NixlSlots:
        agent = self._agent(connection.local_host)

        def drop() -> None:
            self.counters["writers_cut_off"] += 1
            log.warning("%s: a writer is silent about a fence: it is cut off", self.name)
            connection.finish()

        return NixlSlots(self._slots, agent, self._memory, self._fence_wait_s, drop)

    def shut(self) -> None:
        self._memory.clear()

    def _agent(self, host: str) -> Agent:
        """Names are never used twice, so that nobody takes an agent for an earlier one."""
        return Agent(f"{self.name}/{self.generation}/{next(self._agents)}", host)

    def _try(self, host: str) -> None:
        """Loading NIXL takes half a second, an agent after that some 20 ms: better now than in the event loop."""
        agent = self._agent(host)
        try:
            agent.register(self._memory)
            size = len(agent.metadata())
        finally:
            agent.close()
        if size > _MAX_METADATA:
            raise ConfigurationError(
                f"{len(self._memory)} regions make {size} bytes of NIXL metadata, {_MAX_METADATA} are possible"
            )
        if not ucx.strict():
            log.info(
                "%s: by UCX_TLS=%s writers store by themselves: fences wait for them",
                self.name,
                ",".join(ucx.transports()),
            )
