"""When is a silent peer dead? One rule for both ends of a session."""

from __future__ import annotations

import asyncio
import time


class Liveness:
    """Counts the peer as alive for `dead_after_s` after each frame it sent.

    Time in which this process itself did not run (a stopped process, a blocked event loop) does not count
    against the peer: its frames may be waiting in the socket unread.
    """

    def __init__(self, dead_after_s: float) -> None:
        self._dead_after = dead_after_s
        self._last = time.monotonic()

    def heard(self) -> None:
        """A frame came."""
        self._last = time.monotonic()

    @property
    def silence_s(self) -> float:
        return time.monotonic() - self._last

    async def wait_until_dead(self) -> float:
        """Returns the length of the silence, in seconds, once it is too long."""
        tick = self._dead_after / 8
        while True:
            due = time.monotonic() + tick
            await asyncio.sleep(tick)
            late = time.monotonic() - due
            if late > tick:
                self._last += late
            if self.silence_s >= self._dead_after:
                return self.silence_s
