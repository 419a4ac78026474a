"""What waits to be written to one client."""

from __future__ import annotations

import asyncio


class Outbox:
    """Filled from the frame loop, drained by the response: bounded by the request, which ends at `max_tokens`."""

    __slots__ = ("_chunks", "_closed", "_wake", "error")

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._closed = False
        self._wake: asyncio.Future[None] | None = None
        self.error: Exception | None = None

    def put(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._notify()

    def close(self, error: Exception | None = None) -> None:
        """Nothing more will come; `error` says why, where the end is not a good one."""
        self._closed = True
        self.error = error
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None:
            if not self._wake.done():
                self._wake.set_result(None)
            self._wake = None

    async def get(self) -> bytes:
        """All that waits, at least one chunk; empty when closed and drained."""
        while not self._chunks:
            if self._closed:
                return b""
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        chunks, self._chunks = self._chunks, []
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)
