"""kv_path relay: host memory of the pool's shape that writers reach in place of the device's, which they cannot."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence

import numpy as np

from decode_worker.npu.base import NpuDevice
from transport.geometry import KVGeometry
from transport.geometry.plan import plan
from transport.messages import Region


class Mirror:
    """One memfd per channel, each the span that the pool's tensors take in one bank of the device.

    Byte x of a channel stands for byte `start + x` of the bank, so a writer's plan is the one it would carry out on
    the device, and nothing is re-laid-out on the way there. Pages that nobody has written cost no memory.
    """

    def __init__(self, geometry: KVGeometry, bases: Sequence[int]) -> None:
        self.start = min(bases) // mmap.PAGESIZE * mmap.PAGESIZE
        """The bank's address that byte 0 stands for."""
        end = -(-(max(bases) + geometry.bank_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.length = end - self.start
        self._geometry = geometry
        self._bases = tuple(base - self.start for base in bases)
        self._fds: list[int] = []
        self.channels: list[np.ndarray] = []
        for channel in range(geometry.num_channels):
            fd = os.memfd_create(f"hawk-relay{channel}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._fds.append(fd)
            os.ftruncate(fd, self.length)
            self.channels.append(np.frombuffer(mmap.mmap(fd, self.length), np.uint8))

    def handed_out(self) -> list[tuple[Region, int, int]]:
        """(region, fd, offset of the region in it) per channel."""
        return [(Region(address=0, rkey=0, length=self.length), fd, 0) for fd in self._fds]

    def copy_to(
        self,
        device: NpuDevice,
        blocks: Sequence[int],
        start: int,
        stop: int,
        *,
        go_on: Callable[[], bool] = lambda: True,
    ) -> int:
        """Copy tokens [start, stop) of the request that has `blocks` to the device, bank by bank → bytes copied.

        Ends before the next write once `go_on` says no.
        """
        copied = 0
        if start >= stop:
            return copied
        for run in plan(self._geometry, self._bases, blocks, start, stop):
            if not go_on():
                break
            data = self.channels[run.region][run.remote_offset : run.remote_offset + run.length]
            device.write(run.region, self.start + run.remote_offset, data)
            copied += run.length
        return copied

    def close(self) -> None:
        """Drop the memory. Idempotent."""
        for fd in self._fds:
            os.close(fd)
        self._fds, self.channels = [], []
