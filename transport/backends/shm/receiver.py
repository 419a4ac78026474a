"""D's end of the shared-memory data plane."""

from __future__ import annotations

import fcntl
from collections.abc import Sequence

from transport.backends.base import ReceiverEvents
from transport.backends.link.connection import Connection
from transport.backends.link.receiver import LinkReceiver
from transport.backends.shm.control import seal
from transport.backends.shm.listener import Listener
from transport.backends.shm.slots import ShmSlots
from transport.messages import Region

DEFAULT_SLOTS = 1024


class ShmReceiver(LinkReceiver):
    """A `Receiver` whose writers map its regions and store into them.

    `regions`: (region, descriptor, byte in the descriptor where the region starts), in the order of the pool
    description. The descriptors stay the caller's and must stay open.
    """

    backend = "shm"

    def __init__(
        self,
        name: str,
        generation: str,
        token: str,
        regions: Sequence[tuple[Region, int, int]],
        events: ReceiverEvents,
        socket_path: str,
        *,
        slots: int = DEFAULT_SLOTS,
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
        self._places = [(fd, offset) for _, fd, offset in regions]
        self._socket_path = socket_path
        self._slots = slots
        for fd, _ in self._places:
            # A writer that shortened the memory would make this process fault.
            seal(fd, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)

    @property
    def address(self) -> str:
        """The path of the socket."""
        return self._socket_path

    def listen(self) -> Listener:
        return Listener(self._socket_path)

    def make_slots(self, connection: Connection) -> ShmSlots:
        return ShmSlots(self._slots, self._places)
