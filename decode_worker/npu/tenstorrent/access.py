"""Reading and writing a chip's DRAM banks past ttnn, over the NOC by tt-umd."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from decode_worker.npu.base import NpuMemoryError
from transport.errors import ConfigurationError

STEP = 1 << 20
"""Bytes of one call; a thread waits no longer than one of them for its turn."""

FLUSH_S = 1.0
"""Longest time until a word that was written can be read."""

Port = tuple[int, int]
"""(x, y) of a NOC node, translated coordinates."""


class BankAccess(Protocol):
    """DRAM banks of one chip, from any thread. Raises NpuMemoryError where the chip does not answer."""

    def read(self, bank: int, address: int, length: int) -> np.ndarray: ...

    def write(self, bank: int, address: int, data: np.ndarray) -> None: ...

    def flush(self, address: int, ports: Sequence[Port] | None = None) -> None:
        """Return when what was written to any bank before is in its memory: a word written to `address` of each bank
        has come back. `ports[b]`: those by which the others wrote, if not the ones in use."""

    def close(self) -> None: ...


class NocAccess:
    """`device` is a tt-umd TTDevice of the chip (or of its simulation), `ports[b]` the NOC node of bank b in use."""

    def __init__(self, device: Any, ports: Sequence[Port], *, connection: Any = None) -> None:
        self._device, self._ports = device, list(ports)
        self._connection = connection  # kept alive for the device's sake
        self._lock = threading.Lock()
        self._flushes = itertools.count(1)

    def read(self, bank: int, address: int, length: int) -> np.ndarray:
        out = np.empty(length, np.uint8)
        for at in range(0, length, STEP):
            part = memoryview(out[at : at + STEP])
            self._call(
                "read", bank, address + at, len(part), lambda x, y, a, p=part: self._device.noc_read(0, x, y, a, p)
            )
        return out

    def write(self, bank: int, address: int, data: np.ndarray) -> None:
        raw = memoryview(data).cast("B")
        for at in range(0, len(raw), STEP):
            part = raw[at : at + STEP]
            self._call(
                "write", bank, address + at, len(part), lambda x, y, a, p=part: self._device.noc_write(x, y, a, p)
            )

    def flush(self, address: int, ports: Sequence[Port] | None = None) -> None:
        word = (next(self._flushes) & 0xFFFFFFFF).to_bytes(4, "little")
        found = bytearray(4)
        for bank in range(len(self._ports)):
            port = self._ports[bank] if ports is None else ports[bank]
            self._call("flush", bank, address, 4, lambda x, y, a: self._device.noc_write(x, y, a, word), port)
            deadline = time.monotonic() + FLUSH_S
            while True:
                self._call("flush", bank, address, 4, lambda x, y, a: self._device.noc_read(0, x, y, a, found), port)
                if found == word:
                    break
                if time.monotonic() > deadline:
                    raise NpuMemoryError(
                        f"bank {bank} does not show within {FLUSH_S} s what was written to {address:#x}"
                    )

    def close(self) -> None:
        """Let go of the device; idempotent."""
        with self._lock:
            self._device = self._connection = None

    def _call(
        self, what: str, bank: int, address: int, length: int, call: Callable[..., None], port: Port | None = None
    ) -> None:
        with self._lock:
            if self._device is None:
                raise NpuMemoryError(f"cannot {what} bank {bank}: the device is closed")
            try:
                call(*(port or self._ports[bank]), address)
            except Exception as error:
                raise NpuMemoryError(
                    f"cannot {what} {length} bytes at {address:#x} of bank {bank}: {first_line(error)}"
                ) from error


class NoAccess:
    """A mock device: it has addresses, but no memory behind them."""

    def read(self, bank: int, address: int, length: int) -> np.ndarray:
        raise NpuMemoryError("a mock device has no memory to read")

    def write(self, bank: int, address: int, data: np.ndarray) -> None:
        raise NpuMemoryError("a mock device has no memory to write")

    def flush(self, address: int, ports: Sequence[Port] | None = None) -> None: ...

    def close(self) -> None: ...


def simulated_chips() -> tuple[Any, dict[int, Any]]:
    """(connection, TTDevice by chip) of the simulator that ttnn has opened in this process.

    It serves a socket, of which we are a client like any other. Raises ConfigurationError where there is none.
    """
    import tt_umd

    ours = _sockets_of_this_process()
    for server in tt_umd.SimulationConnector.list_servers():
        if any(str(path) in ours for path in server.sockets.values()):
            options = tt_umd.SimulationConnectorOptions()
            options.simulator_directory = server.directory
            connection, devices, _ = tt_umd.SimulationConnector.discover(options)
            return connection, devices
    raise ConfigurationError(
        "the simulator of this process serves no socket: set TT_METAL_SIMULATOR_SERVE_OVER_SOCKETS=1 before the "
        "device is opened"
    )


def card(pci_device: int) -> Any:
    """The TTDevice of /dev/tenstorrent/`pci_device`. Raises ConfigurationError where it cannot be had."""
    import tt_umd

    try:
        device = tt_umd.TTDevice.create(pci_device)
        device.init_tt_device()
    except Exception as error:
        raise ConfigurationError(f"tt-umd cannot open /dev/tenstorrent/{pci_device}: {first_line(error)}") from error
    return device


def first_line(error: Exception) -> str:
    """What went wrong, without the backtrace that Tenstorrent's libraries put below it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 2 and lines[1] == "info:":
        return lines[2]
    return lines[0] if lines else type(error).__name__


def _sockets_of_this_process() -> set[str]:
    """Paths of the Unix sockets that this process has open."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    found = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[6] in inodes:
            found.add(fields[7])
    return found
