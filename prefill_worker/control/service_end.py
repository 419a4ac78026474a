"""The service's end of the control socket: listens in a private directory, serves both halves of the connector."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

from prefill_worker.control.frames import HEADER_BYTES, body_length, decode, encode
from prefill_worker.control.messages import Joined, LocalKV, Start
from transport.errors import EngineFailed, ProtocolError
from transport.messages import Message

log = logging.getLogger(__name__)

_PARTS = 2
"""The connector's scheduler side and one worker rank."""


class ServiceEnd:
    """Made before the engine starts (it connects during its start), served once the event loop runs.

    `on_message` gets what the engine says, `on_lost` is called once when a part that had joined is gone.
    """

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="hawk-prefill-"))  # mode 0700
        self.path = str(self._directory / "control")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        self._server: asyncio.Server | None = None
        self._workers: dict[int, asyncio.StreamWriter] = {}
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._joined: asyncio.Queue[Joined] = asyncio.Queue()
        self._closing = False

    def close_inherited(self) -> None:
        """In a forked engine: its copy of the listener would keep a dead service's queue open."""
        self._listener.close()

    async def serve(
        self, start: Start, on_message: Callable[[Message], None], on_lost: Callable[[str], None], timeout_s: float
    ) -> LocalKV:
        """Accept the engine's parts and give them `start` → the engine's KV cache.

        Raises EngineFailed when they do not come in time.
        """
        self._start, self._on_message, self._on_lost = start, on_message, on_lost
        self._server = await asyncio.start_unix_server(self._serve, sock=self._listener)
        kv: LocalKV | None = None
        try:
            for _ in range(_PARTS):
                joined = await asyncio.wait_for(self._joined.get(), timeout_s)
                log.info("engine %s joined, pid %d", joined.part, joined.pid)
                kv = joined.kv or kv
        except TimeoutError:
            raise EngineFailed(f"the engine's connector did not report within {timeout_s:g} s") from None
        if kv is None:
            raise EngineFailed("the engine's connector did not describe its KV cache")
        return kv

    def send(self, message: Message) -> None:
        """To every worker rank; dropped when the engine is gone (then `on_lost` says so)."""
        for writer in self._workers.values():
            if not writer.is_closing():
                writer.write(encode(message))

    def stop_watching(self) -> None:
        """The engine is about to be shut down: its end is no loss."""
        self._closing = True

    async def wait_closed(self, timeout_s: float = 2.0) -> None:
        """End the connections, once the engine is down."""
        if self._server is not None:
            self._server.close()
        for writer in self._connections.values():
            writer.close()
        if self._connections:
            await asyncio.wait(self._connections, timeout=timeout_s)

    def close(self) -> None:
        """Leave nothing in the file system."""
        self._listener.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        joined: Joined | None = None
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        try:
            _check_owner(writer.get_extra_info("socket"))
            first = await _receive(reader)
            if not isinstance(first, Joined):
                raise ProtocolError(f"expected Joined, got {type(first).__name__}")
            joined = first
            if joined.part == "worker":
                self._workers[joined.rank] = writer
            writer.write(encode(self._start))
            self._joined.put_nowait(joined)
            while True:
                self._on_message(await _receive(reader))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception:
            log.exception("control channel broken")
        finally:
            self._connections.pop(task, None)
            with contextlib.suppress(ConnectionError):
                writer.close()
            if joined is not None and not self._closing:
                self._on_lost(f"engine {joined.part} (pid {joined.pid}) is gone")


async def _receive(reader: asyncio.StreamReader) -> Message:
    return decode(await reader.readexactly(body_length(await reader.readexactly(HEADER_BYTES))))


def _check_owner(sock: socket.socket) -> None:
    """Raises ProtocolError unless the peer runs as the same user."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid != os.getuid():
        raise ProtocolError(f"process {pid} of user {uid} is not our engine")
