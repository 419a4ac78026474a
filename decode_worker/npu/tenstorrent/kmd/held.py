"""Windows that another descriptor of this process holds, and where they point.

While tt-metal has a p150 open it keeps a 4 GiB window on every DRAM bank for itself (tt-metal,
`llrt/tlb_config.cpp`): all that there are. It does so in the process that decodes, and any code of that process can
export a window by its owner's descriptor. So tt-metal's windows serve us as well as our own.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from decode_worker.npu.tenstorrent.kmd import abi
from decode_worker.npu.tenstorrent.kmd.abi import Ordering
from decode_worker.npu.tenstorrent.kmd.driver import TenstorrentDriver, ioctl
from decode_worker.npu.tenstorrent.kmd.errors import call_failed


@dataclass(frozen=True, slots=True)
class HeldWindow:
    """A 4 GiB window of descriptor `owner` that shows `address` and up of the NOC node (x, y)."""

    owner: int
    id: int
    x: int
    y: int
    address: int
    ordering: Ordering


def held_windows(driver: TenstorrentDriver) -> list[HeldWindow]:
    """The 4 GiB windows of this process that are not the driver object's own. Changes nothing.

    Raises NpuDriverError where the windows' registers cannot be looked at.
    """
    owners = list(_other_descriptors(driver.fd))
    if not owners:
        return []
    found = []
    for window_id, words in enumerate(_registers(driver), abi.NUM_SMALL):
        owner = next((fd for fd in owners if _owns(fd, window_id)), None)
        target = None if owner is None else decode(words)
        if owner is not None and target is not None:
            found.append(HeldWindow(owner, window_id, *target))
    return found


def decode(words: tuple[int, int, int]) -> tuple[int, int, int, Ordering] | None:
    """(x, y, address, ordering) of a 4 GiB window's register; None for a multicast or the reserved ordering.

    Bits, from the lowest: address / 4 GiB 32, x_end 6, y_end 6, x_start 6, y_start 6, NOC 2, multicast 1,
    ordering 2, and more that does not matter here (tt-kmd, `blackhole.c`).
    """
    value = words[0] | words[1] << 32 | words[2] << 64
    multicast, ordering = value >> 58 & 1, value >> 59 & 3
    if multicast or ordering not in list(Ordering):
        return None
    return value >> 32 & 63, value >> 38 & 63, (value & 0xFFFFFFFF) * abi.GIB_4, Ordering(ordering)


def _other_descriptors(fd: int) -> Iterator[int]:
    device = os.fstat(fd).st_rdev
    for name in os.listdir("/proc/self/fd"):
        other = int(name)
        try:
            status = os.fstat(other)
        except OSError:  # the listing's own, or closed by another thread
            continue
        if other != fd and stat.S_ISCHR(status.st_mode) and status.st_rdev == device:
            yield other


def _owns(fd: int, window_id: int) -> bool:
    # An export that starts at the window's end is refused either way: to its owner as out of range.
    request = abi.ExportTlbDmabuf(argsz=ctypes.sizeof(abi.ExportTlbDmabuf), id=window_id, fd=-1, offset=abi.GIB_4)
    try:
        ioctl(fd, abi.EXPORT_TLB_DMABUF, request)
    except OSError as error:
        return error.errno == errno.EINVAL
    os.close(request.fd)
    return False


def _registers(driver: TenstorrentDriver) -> list[tuple[int, int, int]]:
    """Of the 4 GiB windows: three words each."""
    try:
        memory = mmap.mmap(driver.fd, mmap.PAGESIZE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=abi.REGISTERS)
    except OSError as error:
        raise call_failed(driver.path, "look at the windows' registers", error) from error
    first = abi.NUM_SMALL * abi.REGISTER_BYTES
    # Word by word: a device's registers need not answer to other sizes.
    registers = np.frombuffer(memory, np.uint32, 3 * abi.MAX_BIG, first)
    words = [int(registers[i]) for i in range(registers.size)]
    del registers
    memory.close()
    return [(words[i], words[i + 1], words[i + 2]) for i in range(0, len(words), 3)]
