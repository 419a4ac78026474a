"""Facts about this machine that the launcher and the doctor act on."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil

GIB = 1 << 30


def cores() -> list[int]:
    """CPUs that this process may use, in order."""
    return sorted(os.sched_getaffinity(0))


def available_memory() -> int:
    """Bytes that new processes can take: what the system has left, and no more than the control group allows."""
    return min([psutil.virtual_memory().available, *_cgroup_left()])


def _cgroup_left() -> list[int]:
    """Bytes left in this process's control group (version 2, all levels), as far as limits are set."""
    try:
        own = next(
            line.split("::", 1)[1] for line in Path("/proc/self/cgroup").read_text().splitlines() if "::" in line
        )
    except (OSError, StopIteration):
        return []
    left, directory = [], Path("/sys/fs/cgroup") / own.strip("/")
    for level in [directory, *directory.parents]:
        try:
            limit = (level / "memory.max").read_text().strip()
            used = int((level / "memory.current").read_text())
        except (OSError, ValueError):
            continue
        if limit != "max":
            left.append(max(0, int(limit) - used))
    return left


def port_is_free(host: str, port: int) -> bool:
    """Whether a listener could be bound there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def port_owner(port: int) -> str:
    """Who listens on `port`, as far as this user may see: "pid 123 (python)", or ""."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"pid {connection.pid} ({psutil.Process(connection.pid).name()})"
    except psutil.Error:
        pass
    return ""


def cpu_flags() -> set[str]:
    """The CPU's instruction set flags as Linux names them."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split(":", 1)[1].split())
    return set()


def gib(count: float) -> str:
    """Bytes for people: "1.5 GiB"."""
    return f"{count / GIB:.1f} GiB"
