"""perftest's `ib_write_bw`: what a NIC does for a C program that writes the same bytes over and over."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time

from transport.backends.verbs.devices import Nic
from transport.errors import ConfigurationError

PROGRAM = "ib_write_bw"
TX_DEPTH = 128
"""Writes under way, perftest's own default."""
LIMIT_S = 120.0
CONNECT_S = 30.0
_GBIT = 1e9 / 8


def ib_write_bw(nic: Nic, size: int, count: int) -> float:
    """Bytes per second of `count` writes of `size` bytes, both ends on this host.

    Raises ConfigurationError where perftest is not installed, RuntimeError where it fails.
    """
    if shutil.which(PROGRAM) is None:
        raise ConfigurationError(f"{PROGRAM} is not installed: it comes with the package perftest")
    command = _command(nic, size, max(count, 5))  # fewer it refuses
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output = _client(command, server)
        server.communicate(timeout=LIMIT_S)
    finally:
        if server.poll() is None:
            server.kill()
            server.communicate()
    return average(output, size)


def average(output: str, size: int) -> float:
    """Bytes per second in the report for `size`, which is in Gbit/s. Raises RuntimeError if there is none."""
    row = re.search(rf"^\s*{size}\s+\d+\s+[\d.]+\s+([\d.]+)\s", output, re.MULTILINE)
    if row is None or float(row[1]) <= 0:
        raise RuntimeError(f"{PROGRAM} reports no bandwidth for {size} bytes:\n{output}")
    return float(row[1]) * _GBIT


def _command(nic: Nic, size: int, count: int) -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    gid = [] if nic.gid_index is None else [f"--gid-index={nic.gid_index}"]
    what = [f"--size={size}", f"--iters={count}", f"--tx-depth={TX_DEPTH}", f"--port={port}"]
    return [PROGRAM, f"--ib-dev={nic.device}", f"--ib-port={nic.port}", *gid, *what, "--report_gbits", "-F"]


def _client(command: list[str], server: subprocess.Popen[str]) -> str:
    """The client's report. A server does not say when it listens, and a client does not wait for it."""
    deadline = time.monotonic() + CONNECT_S
    while True:
        client = subprocess.run([*command, "127.0.0.1"], capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if client.returncode == 0:
            return client.stdout
        if server.poll() is not None or time.monotonic() > deadline:
            said = server.communicate()[0] if server.poll() is not None else ""
            raise RuntimeError(f"{PROGRAM} failed:\n{client.stdout}{client.stderr}{said}")
        time.sleep(0.1)
