"""A non-blocking packet socket in an event loop: ordered sending that never blocks, receiving by callback."""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence

from transport.backends.link.framing import Framing
from transport.backends.link.packets import MAX_PACKET, Packet, pack
from transport.errors import HawkError

log = logging.getLogger(__name__)

_MAX_BURST = 64
"""Packets taken per wake-up, so that one busy writer does not keep the loop from the others."""


class PacketChannel:
    """One connection of the receiver. `on_packet(bytes)` per packet, `on_eof()` once when the peer is gone or its
    stream makes no sense any more."""

    def __init__(
        self,
        sock: socket.socket,
        framing: Framing,
        on_packet: Callable[[bytes], None],
        on_eof: Callable[[], None],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self.framing = framing
        self._loop = asyncio.get_running_loop()
        self._on_packet = on_packet
        self._on_eof = on_eof
        self._queue: deque[tuple[bytes | memoryview, Sequence[int]]] = deque()
        self._writing = False
        self.closed = False
        self._loop.add_reader(sock, self._readable)

    def send(self, packet: Packet, fds: Sequence[int] = ()) -> None:
        """Queue a packet; a stopped peer may hold up the queue, but never the caller."""
        if self.closed:
            return
        self._queue.append((self.framing.wrap(pack(packet)), fds))
        if not self._writing:
            self._flush()

    def finish(self) -> None:
        """Send nothing more; the peer sees the end and closes when its writes are done. Reading goes on."""
        self._queue.clear()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close at once."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()

    def _flush(self) -> None:
        try:
            while self._queue:
                data, fds = self._queue[0]
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                sent = self._sock.sendmsg([data], ancillary)
                self._queue.popleft()
                if sent < len(data):
                    self._queue.appendleft((memoryview(data)[sent:], ()))
        except BlockingIOError:
            if not self._writing:
                self._loop.add_writer(self._sock, self._flush)
                self._writing = True
            return
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):  # out of memory, too many descriptors, timed out
                log.error("data-plane send failed: %s", error)
            self.finish()  # the peer closes in turn, which the reader sees
        if self._writing:
            self._loop.remove_writer(self._sock)
            self._writing = False

    def _readable(self) -> None:
        for _ in range(_MAX_BURST):
            try:
                data = self._sock.recv(MAX_PACKET)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._end()
                return
            self.framing.feed(data)
            try:
                while (packet := self.framing.pop()) is not None:
                    self._on_packet(packet)
                    if self.closed:
                        return
            except HawkError as error:
                log.warning("data-plane connection ended: %s", error)
                self._end()
                return

    def _end(self) -> None:
        self.close()
        self._on_eof()
