"""perftest's `ib_write_bw`: what a NIC does for a C program that writes the same bytes over and over."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from transport.backends.verbs.devices import Nic
from transport.errors import ConfigurationError

PROGRAM = "ib_write_bw"
LEAST = 5
"""Writes; fewer it refuses."""
LIMIT_S = 120.0
_MIB = 1 << 20
_TCP_LISTEN = "0A"


@dataclass(frozen=True)
class Posting:
    """How writes are handed to the NIC: on one queue pair, `chain` in one post with one completion, `depth` under way.

    `timeout`: the queue pair's, as `transport.backends.verbs.queue_pair.Options` has it.
    """

    depth: int = 128
    chain: int = 1
    timeout: int = 14


def ib_write_bw(nic: Nic, size: int, count: int, posting: Posting) -> float:
    """Bytes per second of `count` writes of `size` bytes, from the first post to the last completion.

    Both ends are processes on this host that exist for this one measurement; they inherit this process's CPUs.
    Raises ConfigurationError where perftest is not installed, RuntimeError where it fails.
    """
    if shutil.which(PROGRAM) is None:
        raise ConfigurationError(f"{PROGRAM} is not installed: it comes with the package perftest")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = _command(nic, size, count, posting, port)
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        if not _listens(server, port):
            raise RuntimeError(f"{PROGRAM} failed:\n{server.communicate()[0]}")
        client = subprocess.run([*command, "127.0.0.1"], capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if client.returncode != 0:
            server.kill()
            raise RuntimeError(f"{PROGRAM} failed:\n{client.stdout}{client.stderr}{server.communicate()[0]}")
        server.communicate(timeout=LIMIT_S)
    finally:
        if server.poll() is None:
            server.kill()
            server.communicate()
    return average(client.stdout, size)


def average(output: str, size: int) -> float:
    """Bytes per second in the report for `size`. Raises RuntimeError if there is none.

    Reports are in MiB/s, which older versions call MB. In Gbit/s they would have two decimals, too, which are steps of
    several percent on a software NIC.
    """
    row = re.search(rf"^\s*{size}\s+\d+\s+[\d.]+\s+([\d.]+)\s", output, re.MULTILINE)
    if row is None or float(row[1]) <= 0 or not re.search(r"BW average\[Mi?B/sec\]", output):
        raise RuntimeError(f"{PROGRAM} reports no bandwidth for {size} bytes:\n{output}")
    return float(row[1]) * _MIB


def _command(nic: Nic, size: int, count: int, posting: Posting, port: int) -> list[str]:
    gid = [] if nic.gid_index is None else [f"--gid-index={nic.gid_index}"]
    what = [f"--size={size}", f"--iters={count}", "--qp=1", f"--tx-depth={posting.depth}"]
    how = [f"--post_list={posting.chain}", f"--cq-mod={posting.chain}", f"--qp-timeout={posting.timeout}", "-F"]
    return [PROGRAM, f"--ib-dev={nic.device}", f"--ib-port={nic.port}", *gid, *what, *how, f"--port={port}"]


def _listens(server: subprocess.Popen[str], port: int) -> bool:
    """Wait until it does; False if it ends instead. It does not say so itself, and its client does not wait for it."""
    deadline = time.monotonic() + LIMIT_S
    while server.poll() is None and time.monotonic() < deadline:
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            path = Path(table)
            sockets = path.read_text().splitlines()[1:] if path.exists() else []
            for _, local, _, state, *_ in map(str.split, sockets):
                if state == _TCP_LISTEN and local.endswith(f":{port:04X}"):
                    return True
        time.sleep(0.02)
    return False
