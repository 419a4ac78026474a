"""Ranges of DRAM banks as dma-bufs: which windows show them, and which bytes of those."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

from decode_worker.npu.base import DmaMapping
from decode_worker.npu.tenstorrent.kmd import abi
from decode_worker.npu.tenstorrent.kmd.abi import Ordering
from decode_worker.npu.tenstorrent.kmd.driver import TenstorrentDriver, Window
from decode_worker.npu.tenstorrent.kmd.errors import RELAY, NoWindows, NpuDriverError
from decode_worker.npu.tenstorrent.kmd.held import HeldWindow, held_windows

Port = tuple[int, int]
"""(x, y) of a NOC node, translated coordinates."""

SMALL_WINDOWS = abi.NUM_SMALL - 1


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` bytes at `offset` of a window that starts at address `base`."""

    base: int
    offset: int
    length: int

    @property
    def address(self) -> int:
        return self.base + self.offset


def cover(address: int, length: int, window: int) -> list[Piece]:
    """The windows of `window` bytes, each at a multiple of its size, that show [address, address + length)."""
    if address < 0 or length <= 0:
        raise ValueError(f"a range has an address and a length, not {address} and {length}")
    pieces = []
    stop = address + length
    while address < stop:
        base = address // window * window
        part = min(stop, base + window) - address
        pieces.append(Piece(base, address - base, part))
        address += part
    return pieces


@dataclass(frozen=True, slots=True)
class _Exported:
    piece: Piece
    fd: int


class BankWindows:
    """Opens windows onto a range of each DRAM bank and exports them, until `close`.

    `banks[b]`: the NOC ports of bank b; the first is the one to use, the others count as the same bank. As tt-umd's
    `SocDescriptor.get_cores(CoreType.DRAM, CoordSystem.TRANSLATED)` has them, three to a bank, with the device's
    preferred port moved to the front. `spans[b]`: (address, length) in bank b; length 0 for none of it.

    A bank gets a 4 GiB window; if none is free, one that tt-metal has on it in this process; else as many of 2 MiB
    as the range needs. The dma-buf starts where the window does: with a 4 GiB window, the byte at address a of the
    bank is byte a of the dma-buf. `single`: never more than one window per bank, as a KV pool needs it, which
    hands out one region per bank.

    `ports[b]` and `orderings[b]`: by which port bank b's windows reach it, and in which order: RELAXED for our own,
    POSTED for tt-metal's. A barrier must read by the same port; behind POSTED writes it is sure to come only where it
    reads back a word that it wrote behind them.

    Raises NoWindows that says who has them and what to do, and the driver's other errors; then nothing stays open.
    """

    def __init__(
        self,
        driver: TenstorrentDriver,
        banks: Sequence[Sequence[Port]],
        spans: Sequence[tuple[int, int]],
        *,
        single: bool = False,
    ) -> None:
        if len(banks) != len(spans):
            raise ValueError(f"{len(banks)} banks, but {len(spans)} ranges")
        driver.check_export()
        self._driver = driver
        self._single = single
        self._windows: list[Window] = []
        self._exports: list[list[_Exported]] = []
        self._held: list[HeldWindow] | None = None
        self.ports: list[Port] = []
        self.orderings: list[Ordering] = []
        try:
            for bank, (ports, (address, length)) in enumerate(zip(banks, spans, strict=True)):
                self.ports.append(ports[0])
                self.orderings.append(Ordering.RELAXED)
                self._exports.append(self._open(bank, ports, address, length) if length else [])
        except BaseException:
            # The first failure is the one to tell.
            with contextlib.suppress(NpuDriverError):
                self.close()
            raise

    def mappings(self, bank: int, address: int, length: int) -> list[DmaMapping]:
        """Where [address, address + length) of a bank lies: in order, one mapping per window that shows part of it.

        Raises ValueError where the bank's range does not hold it all.
        """
        stop = address + length
        found = []
        for export in self._exports[bank]:
            piece = export.piece
            low, high = max(address, piece.address), min(stop, piece.address + piece.length)
            if low < high:
                found.append(DmaMapping(bank, export.fd, low - piece.base, high - low))
        if length <= 0 or sum(mapping.length for mapping in found) != length:
            raise ValueError(f"[{address}, {stop}) is not in bank {bank}'s windows")
        return found

    def close(self) -> None:
        """Close dma-bufs, then give the windows back; memory regions of them must be deregistered. Idempotent."""
        self._exports.clear()
        while self._windows:
            self._driver.free(self._windows.pop())

    # ---- helpers

    def _open(self, bank: int, ports: Sequence[Port], address: int, length: int) -> list[_Exported]:
        big = cover(address, length, abi.GIB_4)
        try:
            return [self._own(abi.GIB_4, ports[0], piece) for piece in big]
        except NoWindows as none_big:
            held = [self._find_held(ports, piece.base) for piece in big]
            found = [window for window in held if window is not None]
            if len(found) == len(big):
                self.ports[bank], self.orderings[bank] = (found[0].x, found[0].y), found[0].ordering
                return [self._borrowed(window, piece) for window, piece in zip(found, big, strict=True)]
            return self._small(bank, ports[0], cover(address, length, abi.MIB_2), none_big)

    def _small(self, bank: int, port: Port, pieces: list[Piece], none_big: NoWindows) -> list[_Exported]:
        needed = f"and bank {bank}'s {sum(p.length for p in pieces)} bytes need {len(pieces)} windows of 2 MiB"
        if self._single and len(pieces) > 1:
            raise NoWindows(f"{none_big.message}; {needed}, which make no single region", errno=none_big.errno)
        if len(pieces) > SMALL_WINDOWS:
            raise NoWindows(f"{none_big.message}; {needed}, of {SMALL_WINDOWS} that there are", errno=none_big.errno)
        exported = []
        for piece in pieces:
            try:
                exported.append(self._own(abi.MIB_2, port, piece))
            except NoWindows as error:
                raise NoWindows(
                    f"neither 4 GiB nor enough 2 MiB windows of {self._driver.path} are free ({needed}, "
                    f"{len(exported)} were left): stop the process that holds them, lower the pool's size, or {RELAY}",
                    errno=error.errno,
                ) from error
        return exported

    def _own(self, size: int, port: Port, piece: Piece) -> _Exported:
        window = self._driver.allocate_window(size)
        self._windows.append(window)
        self._driver.configure(window, *port, piece.base)
        return self._export(window, piece)

    def _borrowed(self, held: HeldWindow, piece: Piece) -> _Exported:
        window = self._driver.borrow(held.id, abi.GIB_4, held.owner)
        self._windows.append(window)
        return self._export(window, piece)

    def _export(self, window: Window, piece: Piece) -> _Exported:
        page = mmap.PAGESIZE
        size = -(-(piece.offset + piece.length) // page) * page
        return _Exported(piece, self._driver.export_dmabuf(window, 0, size))

    def _find_held(self, ports: Sequence[Port], address: int) -> HeldWindow | None:
        if self._held is None:
            self._held = held_windows(self._driver)
        # What stays where it is, tt-metal makes POSTED; other windows tt-umd points elsewhere whenever it likes.
        matching = (
            w for w in self._held if (w.x, w.y) in ports and w.address == address and w.ordering == Ordering.POSTED
        )
        return next(matching, None)
