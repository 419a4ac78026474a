"""Two connected queue pairs in one process, each with its own completion queue, and memory to write from and into."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import select
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

from transport.backends.verbs.address import Address
from transport.backends.verbs.completions import Completion, Completions
from transport.backends.verbs.nic import OpenNic, Registration
from transport.backends.verbs.queue_pair import Options, QueuePair

LIMIT_S = 60.0
"""Nothing here takes that long; a failure, not a measurement."""
QUICK = Options(timeout=10, retry_count=2, rnr_retry=2, min_rnr_timer=1)
"""A dead peer is known after 4.096 µs * 2^10 * 3 = 13 ms."""


class Memory:
    """Registered, page-aligned memory of this process."""

    def __init__(self, nic: OpenNic, length: int, *, remote_write: bool) -> None:
        self.map = mmap.mmap(-1, length)
        self._view = ctypes.c_char.from_buffer(self.map)
        self.region: Registration = nic.register(ctypes.addressof(self._view), length, remote_write=remote_write)
        self.address = self.region.address

    def __getitem__(self, where: slice) -> bytes:
        return self.map[where]

    def __setitem__(self, where: slice, data: bytes) -> None:
        self.map[where] = data


@dataclass
class Ends:
    """P writes out of `source`, D has `target`."""

    nic: OpenNic
    source: Memory
    target: Memory
    p_done: Completions
    d_done: Completions
    p: QueuePair
    d: QueuePair

    def write(self, local: int, length: int, remote: int) -> tuple[int, int, int, int, int]:
        """A write of `length` bytes from offset `local` of the source to offset `remote` of the target."""
        source, target = self.source.region, self.target.region
        return source.address + local, source.lkey, length, target.address + remote, target.rkey


@contextlib.contextmanager
def ends(
    nic: OpenNic,
    *,
    size: int = 1 << 20,
    send_depth: int = 64,
    receive_depth: int = 4,
    options: Options = QUICK,
) -> Iterator[Ends]:
    source, target = Memory(nic, size, remote_write=False), Memory(nic, size, remote_write=True)
    p_done, d_done = Completions(nic, send_depth + receive_depth), Completions(nic, send_depth + receive_depth)
    p = QueuePair(nic, p_done, send_depth=send_depth, receive_depth=receive_depth, options=options)
    d = QueuePair(nic, d_done, send_depth=send_depth, receive_depth=receive_depth, options=options)
    p.connect(Address.from_list(d.address.to_list()))
    d.connect(Address.from_list(p.address.to_list()))
    try:
        yield Ends(nic, source, target, p_done, d_done, p, d)
    finally:
        for closable in (p, d, p_done, d_done, source.region, target.region):
            closable.close()


def wait(completions: Completions, count: int = 1) -> list[Completion]:
    """Sleep on the descriptor until `count` completions have come."""
    found: list[Completion] = []
    deadline = time.monotonic() + LIMIT_S
    while len(found) < count:
        left = deadline - time.monotonic()
        assert left > 0, f"{len(found)} of {count} completions within {LIMIT_S} s"
        select.select([completions.fd], [], [], left)
        found += completions.drain()
    return found


def wait_event(nic: OpenNic, kind: str) -> None:
    """Sleep until the NIC reports an event of that kind."""
    deadline = time.monotonic() + LIMIT_S
    seen = []
    while True:
        left = deadline - time.monotonic()
        assert left > 0, f"no {kind} within {LIMIT_S} s, only {seen}"
        select.select([nic.event_fd], [], [], left)
        event = nic.take_event()
        if event is not None:
            seen.append(event.kind)
            if event.kind == kind:
                return


@contextlib.contextmanager
def soft_nic(name: str, link: str) -> Iterator[str]:
    """Another Soft-RoCE device on a link of its own, for tests that break it."""
    sh(f"ip link add {link} type veth peer name {link}p")
    sh(f"ip address add 10.98.0.1/24 dev {link}")
    sh(f"ip link set {link} up; ip link set {link}p up")
    sh(f"rdma link add {name} type rxe netdev {link}")
    try:
        yield name
    finally:
        sh(f"rdma link delete {name}; ip link delete {link}")


def sh(command: str) -> None:
    subprocess.run(["bash", "-c", command], check=False, timeout=LIMIT_S)
