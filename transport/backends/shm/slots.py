"""What one writer of the shared-memory receiver holds: the control page, and descriptors of the regions."""

from __future__ import annotations

from collections.abc import Sequence

from transport.backends.link.packets import Renewed
from transport.backends.shm.control import ControlPage
from transport.errors import ProtocolError


class ShmSlots:
    """`Slots` in shared memory: a writer has the regions mapped, so only it can tell that it has stopped.

    `regions`: (descriptor, byte in it where the region starts).
    """

    shared = True
    strict = False
    immediates = False

    def __init__(self, count: int, regions: Sequence[tuple[int, int]]) -> None:
        self.count = count
        self._page = ControlPage(count)
        self._regions = regions

    def offer(self) -> tuple[list[object], Sequence[int]]:
        """The control page's descriptor comes first."""
        return [offset for _, offset in self._regions], [self._page.fd, *(fd for fd, _ in self._regions)]

    def setup(self, answer: list[object] | None) -> bool:
        if answer is not None:
            raise ProtocolError("the shared-memory backend takes no answer to its offer")
        return True

    def take(self, epoch: int) -> int:
        return self._page.take(epoch)

    def revoke(self, token: int) -> bool:
        self._page.revoke(token)
        return False

    def release(self, token: int) -> None:
        self._page.release(token)

    def renewed(self, packet: Renewed) -> None:
        raise ProtocolError("the shared-memory backend has no lanes")

    def close(self) -> None:
        self._page.close()
