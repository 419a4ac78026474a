"""D's end of the RDMA data plane: regions registered once, a link per writer, lanes on the NICs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from transport.backends.base import ReceiverEvents
from transport.backends.link.connection import Connection
from transport.backends.link.receiver import LinkReceiver
from transport.backends.link.tcp import TcpListener
from transport.backends.verbs.devices import choose
from transport.backends.verbs.nic import OpenNic
from transport.backends.verbs.queue_pair import Options
from transport.backends.verbs.regions import RegisteredRegions
from transport.backends.verbs.slots import VerbsSlots
from transport.errors import ConfigurationError, HawkError
from transport.messages import Region

log = logging.getLogger(__name__)

DEFAULT_LANES = 16


class VerbsReceiver(LinkReceiver):
    """A `Receiver` whose NICs let writers store into its regions.

    `regions`: (region, descriptor, byte in the descriptor where the region starts), in the order of the pool
    description; host memory, or a device's by dma-buf. They stay the caller's until `close` has returned.
    `host`: where the link listens, by default the first NIC's own address. `devices`: `device[:port[:gid index]]`.
    `slots`: lanes per writer, and so the most leases of one that may be reserved or written at the same time.
    Registering takes about 0.1 s per GiB. Raises ConfigurationError: no RDMA, no such device, memory refused.
    """

    backend = "verbs"

    def __init__(
        self,
        name: str,
        generation: str,
        token: str,
        regions: Sequence[tuple[Region, int, int]],
        events: ReceiverEvents,
        host: str | None = None,
        port: int = 0,
        *,
        devices: Sequence[str] = (),
        slots: int = DEFAULT_LANES,
        options: Options | None = None,
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
        self._options = options or Options()
        self._gone: str | None = None
        self._nics: list[OpenNic] = []
        self._registered: RegisteredRegions | None = None
        try:
            for nic in choose(devices):
                self._nics.append(OpenNic(nic))
            self.nics = [(opened.nic.device, opened.nic.port) for opened in self._nics]
            self._registered = RegisteredRegions(self._nics, regions)
            self._tcp = TcpListener(host or _own_address(self._nics[0]), port)
        except BaseException:
            self.shut()
            raise

    @property
    def address(self) -> str:
        """`host:port` of the link, for the pool's endpoint."""
        return self._tcp.address

    async def start(self) -> None:
        await super().start()
        loop = asyncio.get_running_loop()
        for nic in self._nics:
            loop.add_reader(nic.event_fd, self._on_event, nic)

    def ready(self) -> str | None:
        if self._gone is not None:
            return self._gone
        down = next((nic.nic for nic in self._nics if not nic.port_active), None)
        return None if down is None else f"port {down.port} of NIC {down.device} is down"

    def listen(self) -> TcpListener:
        return self._tcp

    def make_slots(self, connection: Connection) -> VerbsSlots:
        assert self._registered is not None
        return VerbsSlots(
            self._nics,
            self._registered.keys,
            self._slots,
            self._options,
            arrived=lambda token: self.arrived(connection, token),
            broken=lambda token, reason: self._broken(connection, token, reason),
            tell=connection.tell,
        )

    def shut(self) -> None:
        with contextlib.suppress(RuntimeError):  # no loop runs where the constructor fails
            loop = asyncio.get_running_loop()
            for nic in self._nics:
                loop.remove_reader(nic.event_fd)
        if self._registered is not None:
            self._registered.close()
        for nic in self._nics:
            nic.close()

    def _broken(self, connection: Connection, token: int, reason: str) -> None:
        self.counters["failed_lane"] += 1
        self.broken(connection, token, reason)

    def _on_event(self, nic: OpenNic) -> None:
        """Port changes only show in `ready`: what is under way is retried, and fails by itself if that was in vain."""
        try:
            event = nic.take_event()
        except HawkError as error:
            log.error("%s: NIC %s: %s", self.name, nic.nic.device, error)
            asyncio.get_running_loop().remove_reader(nic.event_fd)
            return
        if event is None:
            return
        self.counters[f"nic_{event.kind}"] += 1
        log.log(
            logging.ERROR if event.fatal else logging.WARNING, "%s: NIC %s: %s", self.name, nic.nic.device, event.kind
        )
        if event.kind == "device_fatal":
            self._gone = f"NIC {nic.nic.device} was removed or has failed: restart the worker once it is back"
            asyncio.get_running_loop().remove_reader(nic.event_fd)
            for connection in list(self._connections):
                connection.close()


def _own_address(nic: OpenNic) -> str:
    """Where a writer that reaches the NIC reaches this host too."""
    if nic.nic.ip is None:
        raise ConfigurationError(
            f"NIC {nic.nic.device} has no IPv4 address of its own: set data_host to an address of this host that "
            "prefill workers reach"
        )
    return nic.nic.ip
