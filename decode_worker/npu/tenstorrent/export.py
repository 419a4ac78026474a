"""Device memory as dma-bufs, which a NIC writes into: one window of the card per bank, by tt-kmd."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from decode_worker.npu.base import DmaMapping
from decode_worker.npu.tenstorrent.kmd.driver import TenstorrentDriver
from decode_worker.npu.tenstorrent.kmd.windows import BankWindows, Port


class Exports:
    """Opens /dev/tenstorrent/`pci_device` at the first mapping. `banks[b]`: bank b's NOC ports, the one in use first.

    Raises the driver's errors (ConfigurationError), which name what to do.
    """

    def __init__(self, pci_device: int, banks: Sequence[Sequence[Port]]) -> None:
        self._path = str(Path("/dev/tenstorrent") / str(pci_device))
        self._banks = banks
        self._driver: TenstorrentDriver | None = None
        self._windows: list[BankWindows] = []

    def map(self, banks: Sequence[int], address: int, length: int, span: tuple[int, int]) -> list[DmaMapping]:
        """Bytes [address, address + length) of each of `banks`. Windows that are opened for it show all of `span`."""
        for windows in self._windows:
            try:
                return [mapping for bank in banks for mapping in windows.mappings(bank, address, length)]
            except ValueError:  # not in these
                continue
        if self._driver is None:
            self._driver = TenstorrentDriver.open(self._path)
        low, high = span
        whole = [(low, high - low)] * len(self._banks)
        self._windows.append(BankWindows(self._driver, self._banks, whole, single=True))
        return [mapping for bank in banks for mapping in self._windows[-1].mappings(bank, address, length)]

    @property
    def ports(self) -> list[Port] | None:
        """The NOC ports by which the NIC's writes reach the banks; None while nothing is mapped."""
        return self._windows[-1].ports if self._windows else None

    def close(self) -> None:
        """Close dma-bufs and windows, then the driver; nobody may have them registered any more. Idempotent."""
        while self._windows:
            self._windows.pop().close()
        if self._driver is not None:
            self._driver.close()
            self._driver = None
