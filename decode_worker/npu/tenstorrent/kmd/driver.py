"""One open device node of tt-kmd: windows onto the card's memory, mapped here or exported as dma-bufs."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from decode_worker.npu.tenstorrent.kmd import abi, errors
from decode_worker.npu.tenstorrent.kmd.abi import Ordering
from transport.errors import ConfigurationError

DEFAULT_PATH = "/dev/tenstorrent/0"


class DriverVersion(NamedTuple):
    major: int
    minor: int
    patch: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}" if self.major else "from before 2.0"


EXPORT_SINCE = DriverVersion(2, 10, 0)


@dataclass(eq=False, slots=True)
class Window:
    """An aperture of `size` bytes in the card's BAR, that shows what its configuration points it at.

    `owner`: the descriptor that allocated it, the only one by which it is exported. `exports` and `mappings`: what
    `free` closes.
    """

    id: int
    size: int
    owner: int
    mmap_uncached: int = 0
    mmap_combining: int = 0
    exports: list[int] = field(default_factory=list)
    mappings: list[mmap.mmap] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{words(self.size)} window {self.id}"


class TenstorrentDriver:
    """Open with `TenstorrentDriver.open`, or as a context manager. Not thread-safe.

    All methods raise `NpuDriverError` (a ConfigurationError) or one of its subclasses with what to do about it, and
    ValueError on a bad argument.
    """

    def __init__(self, fd: int, path: str) -> None:
        self.path = path
        self.fd = fd
        self.windows: list[Window] = []
        self._can_export = False
        info = abi.DeviceInfo(room=ctypes.sizeof(abi.DeviceInfo) - 4)
        self._call(abi.GET_DEVICE_INFO, info, "read the device's information")
        self.pci_address = pci_address(info)
        self.is_blackhole = (info.vendor, info.device) == abi.BLACKHOLE
        driver = abi.DriverInfo(room=ctypes.sizeof(abi.DriverInfo) - 4)
        self._call(abi.GET_DRIVER_INFO, driver, "read the driver's version")
        self.version = DriverVersion(driver.major, driver.minor, driver.patch)
        """As the driver itself says; 0.0.0 for one before 2.0."""

    @classmethod
    def open(cls, path: str = DEFAULT_PATH, *, idle: bool = False) -> TenstorrentDriver:
        """`idle`: to look only; the card's power state stays as it is."""
        # Non-blocking, because an open waits for a process that has the device for itself; with O_APPEND
        # it asks for no power (tt-kmd, chardev.c).
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_APPEND if idle else 0)
        try:
            fd = os.open(path, flags)
        except OSError as error:
            raise errors.open_failed(path, error, module_version()) from error
        try:
            return cls(fd, path)
        except BaseException:
            os.close(fd)
            raise

    def __enter__(self) -> TenstorrentDriver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- windows

    def allocate_window(self, size: int) -> Window:
        """A window of 2 MiB or 4 GiB (`abi.MIB_2`, `abi.GIB_4`) that points nowhere yet. Raises NoWindows."""
        if size not in (abi.MIB_2, abi.GIB_4):
            raise ValueError(f"a Blackhole's windows have 2 MiB or 4 GiB, not {size} bytes")
        request = abi.AllocateTlb(window_bytes=size)
        try:
            self._ioctl(abi.ALLOCATE_TLB, request)
        except OSError as error:
            raise errors.no_window(self.path, words(size), error, big=size == abi.GIB_4) from error
        window = Window(request.id, size, self.fd, request.mmap_uncached, request.mmap_combining)
        self.windows.append(window)
        return window

    def borrow(self, window_id: int, size: int, owner: int) -> Window:
        """A window that `owner`, another descriptor of this device in this process, has allocated and pointed."""
        window = Window(window_id, size, owner)
        self.windows.append(window)
        return window

    def configure(self, window: Window, x: int, y: int, address: int, *, ordering: Ordering = Ordering.RELAXED) -> None:
        """Point a window at `address` (a multiple of its size) of the NOC node (x, y), in translated coordinates.

        RELAXED suits KV: the writes of a push need no order among themselves, and a read that comes after the
        NIC's completion, as a barrier does, sees them all. POSTED promises the latter to nobody.
        """
        if address < 0 or address % window.size:
            raise ValueError(f"a {words(window.size)} window starts at a multiple of its size, not at {address:#x}")
        if not (0 <= x < 64 and 0 <= y < 64):
            raise ValueError(f"NOC coordinates have six bits, not ({x}, {y})")
        request = abi.ConfigureTlb(id=window.id, address=address, x_end=x, y_end=y, ordering=ordering)
        self._call(abi.CONFIGURE_TLB, request, f"point {window} at {address:#x} of ({x}, {y})")

    def map(self, window: Window, *, uncached: bool = False) -> mmap.mmap:
        """The window in this process's memory, until `free`; reads are slow, and writes combine unless `uncached`.

        Free the arrays made of it first. A forked child does not inherit it: there it would keep the window.
        """
        offset = window.mmap_uncached if uncached else window.mmap_combining
        try:
            mapping = mmap.mmap(self.fd, window.size, flags=mmap.MAP_SHARED, offset=offset)
        except OSError as error:
            raise errors.call_failed(self.path, f"map {window}", error) from error
        window.mappings.append(mapping)
        mapping.madvise(mmap.MADV_DONTFORK)
        return mapping

    def check_export(self) -> None:
        """Raises DriverTooOld or ExportUnsupported. Changes nothing."""
        if self._can_export:
            return
        if self.version < EXPORT_SINCE:
            raise errors.too_old(self.path, str(self.version))
        # Nobody owns the driver's own window: one that can export refuses it for that and no other reason.
        refused = self._try_export(abi.KERNEL_WINDOW)
        if not isinstance(refused, PermissionError):
            raise errors.export_failed(self.path, "export a window", refused, str(self.version)) from refused
        self._can_export = True

    def supports_export(self) -> bool:
        """Whether `check_export` has nothing against it."""
        try:
            self.check_export()
        except (errors.DriverTooOld, errors.ExportUnsupported):
            return False
        return True

    def export_dmabuf(self, window: Window, offset: int, size: int) -> int:
        """A descriptor for [offset, offset + size) of a window, whole pages; `free` closes it.

        The window may not be pointed elsewhere afterwards: what holds the dma-buf would follow. While it exists,
        the card cannot be reset.
        """
        page = mmap.PAGESIZE
        if offset % page or size % page or not 0 <= offset < offset + size <= window.size:
            raise ValueError(f"[{offset}, {offset + size}) are no whole pages of a {words(window.size)} window")
        self.check_export()
        request = abi.ExportTlbDmabuf(
            argsz=ctypes.sizeof(abi.ExportTlbDmabuf), id=window.id, fd=-1, offset=offset, size=size
        )
        try:
            ioctl(window.owner, abi.EXPORT_TLB_DMABUF, request)
        except OSError as error:
            raise errors.export_failed(self.path, f"export {window}", error, str(self.version)) from error
        window.exports.append(request.fd)
        return int(request.fd)

    def free(self, window: Window) -> None:
        """Close a window's dma-bufs, unmap it, give it back. Whoever imported a dma-buf must have let go before.

        A window that another descriptor owns stays that one's. Raises WindowInUse while an array shows its mapping.
        """
        while window.exports:
            os.close(window.exports.pop())
        while window.mappings:
            try:
                window.mappings[-1].close()
            except BufferError as error:
                raise errors.WindowInUse(f"{window} is still mapped: free the arrays that show it first") from error
            window.mappings.pop()
        if window.owner == self.fd:
            self._call(abi.FREE_TLB, abi.FreeTlb(id=window.id), f"free {window}")
        self.windows.remove(window)

    def close(self) -> None:
        """Free all windows, then close the device. Idempotent. Raises what `free` does, with the device closed."""
        failed: list[errors.NpuDriverError] = []
        for window in reversed(self.windows):
            try:
                self.free(window)
            except errors.NpuDriverError as error:
                failed.append(error)
        self.windows.clear()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        if failed:
            raise failed[0]

    # ---- helpers

    def _try_export(self, window_id: int) -> OSError:
        request = abi.ExportTlbDmabuf(argsz=ctypes.sizeof(abi.ExportTlbDmabuf), id=window_id, fd=-1)
        try:
            ioctl(self.fd, abi.EXPORT_TLB_DMABUF, request)
        except OSError as error:
            return error
        os.close(request.fd)
        return OSError(f"{self.path} exported a window that is not ours")

    def _ioctl(self, number: int, request: ctypes.Structure) -> None:
        if self.fd < 0:
            raise ConfigurationError(f"{self.path} is closed")
        ioctl(self.fd, number, request)

    def _call(self, number: int, request: ctypes.Structure, what: str) -> None:
        try:
            self._ioctl(number, request)
        except OSError as error:
            raise errors.call_failed(self.path, what, error) from error


def ioctl(fd: int, number: int, request: ctypes.Structure) -> None:
    """Raises OSError."""
    while True:
        try:
            fcntl.ioctl(fd, number, request, True)
        except InterruptedError:  # by a signal, while it waited for a window
            continue
        return


def pci_address(info: abi.DeviceInfo) -> str:
    """Such as "0000:01:00.0"."""
    bdf = info.bus_dev_fn
    return f"{info.pci_domain:04x}:{bdf >> 8:02x}:{bdf >> 3 & 31:02x}.{bdf & 7}"


def module_version(sysfs: Path = Path("/sys")) -> str | None:
    """Of the loaded tt-kmd, such as "2.10.0"; None if none is loaded."""
    try:
        return (sysfs / "module/tenstorrent/version").read_text().strip()
    except OSError:
        return None


def words(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"
