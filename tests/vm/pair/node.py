"""What the programs of two nodes share: a channel between them for addresses, and to wait for each other."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

NODE = os.environ["HAWK_NODE"]
"""A or B."""
ADDRESS = os.environ["HAWK_ADDRESS"]
PEER = os.environ["HAWK_PEER"]
PORT = 18515
LIMIT_S = 60.0


class Channel:
    """JSON values between the two nodes, in order. Everything fails with a time-out rather than wait for ever."""

    def __init__(self, port: int = PORT) -> None:
        """Node A listens, node B connects; which of them comes first does not matter."""
        self._port = port
        self._socket = self._listen() if NODE == "A" else self._connect()
        self._socket.settimeout(LIMIT_S)
        self._file = self._socket.makefile("rb")

    def _listen(self) -> socket.socket:
        with socket.create_server((ADDRESS, self._port)) as listener:
            listener.settimeout(LIMIT_S)
            return listener.accept()[0]

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                return socket.create_connection((PEER, self._port), timeout=5)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def send(self, value: Any) -> None:
        self._socket.sendall(json.dumps(value).encode() + b"\n")

    def receive(self) -> Any:
        line = self._file.readline()
        if not line.endswith(b"\n"):
            raise EOFError(f"node {NODE}: the other node has left")
        return json.loads(line)

    def exchange(self, value: Any) -> Any:
        """Give the other node a value, take its; neither goes on before both have come here."""
        self.send(value)
        return self.receive()
