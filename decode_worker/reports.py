"""What all routers are told unasked: load, and which prefix blocks came and went."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from decode_worker.blocks import BlockPool
from decode_worker.lease import Owner
from transport.messages import Message, ResidentBlocks, Status


class Reports:
    """Sends what changed to every attached router, at most once per `interval_s`."""

    def __init__(self, blocks: BlockPool, status: Callable[[], Status], interval_s: float) -> None:
        self._blocks, self._status, self._interval_s = blocks, status, interval_s
        self._sessions: set[Owner] = set()
        self._due = asyncio.Event()
        self._last: Status | None = None

    def join(self, session: Owner) -> None:
        """A new router first learns all that is resident."""
        self._sessions.add(session)
        session.send(ResidentBlocks(added=tuple(self._blocks.resident()), reset=True))

    def leave(self, session: Owner) -> None:
        self._sessions.discard(session)

    def due(self) -> None:
        """Something changed."""
        self._due.set()

    def send_status(self) -> None:
        """Say it now, if it is news."""
        status = self._status()
        if status != self._last:
            self._last = status
            self._broadcast(status)

    async def run(self) -> None:
        """Report for ever."""
        while True:
            await self._due.wait()
            self._due.clear()
            self.send_status()
            added, removed = self._blocks.take_changes()
            if added or removed:
                self._broadcast(ResidentBlocks(added=tuple(added), removed=tuple(removed)))
            await asyncio.sleep(self._interval_s)

    def _broadcast(self, message: Message) -> None:
        for session in self._sessions:
            session.send(message)
