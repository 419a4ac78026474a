"""The receiver's regions as NICs know them: mapped host memory, or a device's memory by dma-buf."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from transport.backends.link.mapping import map_shared
from transport.backends.verbs.nic import OpenNic, Registration
from transport.errors import ConfigurationError
from transport.kernels.source import address
from transport.messages import Region


class RegisteredRegions:
    """`regions`: (region, descriptor, byte in it where the region starts), registered on every NIC.

    `keys[n][r]` is NIC n's registration of region r. A descriptor that is a dma-buf is registered as it is; any other
    is mapped first. Raises ConfigurationError.
    """

    def __init__(self, nics: Sequence[OpenNic], regions: Sequence[tuple[Region, int, int]]) -> None:
        self.keys: list[list[Registration]] = [[] for _ in nics]
        self._mappings: list[np.ndarray] = []
        try:
            for region, fd, offset in regions:
                if is_dmabuf(fd):
                    for nic, keys in zip(nics, self.keys, strict=True):
                        keys.append(nic.register_dmabuf(fd, offset, region.length, remote_write=True))
                    continue
                memory = self._map(fd, offset, region.length)
                for nic, keys in zip(nics, self.keys, strict=True):
                    keys.append(nic.register(address(memory), region.length, remote_write=True))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Deregister: from now on the NICs refuse every key. Idempotent."""
        for keys in self.keys:
            for key in keys:
                key.close()
            keys.clear()
        self._mappings.clear()

    def _map(self, fd: int, offset: int, length: int) -> np.ndarray:
        try:
            array = map_shared(fd, offset, length)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"cannot map {length} bytes at {offset} of descriptor {fd}: {error}") from error
        self._mappings.append(array)
        return array


def is_dmabuf(fd: int) -> bool:
    """Whether a descriptor is a dma-buf: memory of a device that the kernel can hand to a NIC as it is."""
    return "dmabuf" in os.readlink(f"/proc/self/fd/{fd}")
