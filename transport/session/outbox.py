"""A session's send queue: never blocks the sender, and gives up on a peer that does not read."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

DEFAULT_MAX_QUEUE_BYTES = 64 * 1024 * 1024


class Outbox:
    """Ordered, bounded by the bytes not yet handed to the socket. Used in one event loop's thread.

    A frame larger than the bound passes when it is alone, so that the bound need not know the frame limit.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_QUEUE_BYTES) -> None:
        self._frames: deque[bytes] = deque()
        self._max_bytes = max_bytes
        self._filled = asyncio.Event()
        self.queued_bytes = 0

    def put(self, frame: bytes) -> bool:
        """False when the bound is reached: the peer reads too slowly and must be dropped."""
        if self.queued_bytes and self.queued_bytes + len(frame) > self._max_bytes:
            return False
        self.queued_bytes += len(frame)
        self._frames.append(frame)
        self._filled.set()
        return True

    async def drain(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Send what comes, in order, until cancelled or until `send` raises."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._frames:
                frame = self._frames.popleft()
                await send(frame)
                self.queued_bytes -= len(frame)
