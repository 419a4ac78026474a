"""The front gate: so many requests at the same time, so many waiting, and the rest is told to come back."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from transport.errors import Overloaded


class Gate:
    """First come, first served."""

    def __init__(self, max_concurrent: int, max_queued: int, queue_timeout_s: float) -> None:
        self._free = max_concurrent
        self._max_queued = max_queued
        self._timeout_s = queue_timeout_s
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.inside = 0

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def admit(self) -> AsyncIterator[None]:
        """Hold a place while inside. Raises Overloaded when the queue is full, or after waiting too long."""
        if self._free > 0:
            self._free -= 1
        else:
            await self._wait()
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
            self._pass_on()

    async def _wait(self) -> None:
        if len(self._waiting) >= self._max_queued:
            raise Overloaded(f"the router is full: {self.inside} requests run and {self.queued} wait")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await asyncio.wait_for(asyncio.shield(turn), self._timeout_s)
        except asyncio.TimeoutError:
            self._leave(turn)
            raise Overloaded(f"no place within {self._timeout_s:g} s: {self.inside} requests run") from None
        except asyncio.CancelledError:
            self._leave(turn)
            raise

    def _leave(self, turn: asyncio.Future[None]) -> None:
        """Not waiting any more; a place given in the same moment goes to the next."""
        if turn.done():
            self._pass_on()
        else:
            turn.cancel()
            self._waiting.remove(turn)

    def _pass_on(self) -> None:
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self._free += 1
