"""The engine's end of the control socket: a thread that reads; any thread may send."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable

from prefill_worker.control.frames import HEADER_BYTES, body_length, decode, encode
from prefill_worker.control.messages import Joined
from transport.messages import Message

log = logging.getLogger(__name__)

EXIT_ORPHANED = 3


def die_with_service() -> None:
    """The service is gone: nobody will take what this process computes, and nobody else would end it."""
    log.error("the prefill service is gone: ending the engine")
    os._exit(EXIT_ORPHANED)


class EngineEnd:
    """Connects at once and introduces itself; calls `on_message` in its thread, `on_gone` when the service ends."""

    def __init__(
        self,
        path: str,
        joined: Joined,
        on_message: Callable[[Message], None],
        on_gone: Callable[[], None] = die_with_service,
    ) -> None:
        self._on_message = on_message
        self._on_gone = on_gone
        self._closed = False
        self._sending = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self.send(joined)
        self._thread = threading.Thread(target=self._read, name=f"control-{joined.part}", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Blocks while the service's buffer is full; what cannot be delivered any more is dropped."""
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(encode(message))

    def close(self) -> None:
        """An orderly end: `on_gone` is not called."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self) -> None:
        try:
            while True:
                self._on_message(decode(self._exactly(body_length(self._exactly(HEADER_BYTES)))))
        except (EOFError, OSError):
            pass
        except Exception:
            log.exception("control channel broken")
        if not self._closed:
            self._on_gone()

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return bytes(data)
