"""What tt-kmd and a card's windows would allow, looked at without changing anything on the card."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from decode_worker.npu.tenstorrent.kmd import abi
from decode_worker.npu.tenstorrent.kmd.driver import DEFAULT_PATH, DriverVersion, TenstorrentDriver, module_version
from decode_worker.npu.tenstorrent.kmd.errors import NoWindows, NpuDriverError, holders


@dataclass(frozen=True, slots=True)
class DriverProbe:
    """What could be found out about one device node; None is "not known", because `problem` was in the way.

    `module_version`: of the loaded kernel module (sysfs). `version`: as the driver answers. `big_windows`: how many
    4 GiB windows the card's BAR4 has room for. `free_windows`: free ones by size in bytes, where they were counted.
    `holders`: (pid, command) of others that have the device open. `export_problem`: why no dma-buf can be exported,
    with what to do.
    """

    path: str
    module_version: str | None
    problem: str | None = None
    version: DriverVersion | None = None
    pci_address: str | None = None
    is_blackhole: bool | None = None
    big_windows: int | None = None
    free_windows: dict[int, int] | None = None
    holders: tuple[tuple[int, str], ...] = ()
    export_problem: str | None = None

    @property
    def supports_export(self) -> bool:
        return self.problem is None and self.export_problem is None


def devices(dev: Path = Path("/dev/tenstorrent")) -> list[str]:
    """The device nodes of all cards, in order of their numbers."""
    if not dev.is_dir():
        return []
    return [str(dev / str(number)) for number in sorted(int(p.name) for p in dev.iterdir() if p.name.isdigit())]


def probe(
    path: str = DEFAULT_PATH,
    *,
    count: bool = False,
    sysfs: Path = Path("/sys"),
    proc: Path = Path("/proc"),
) -> DriverProbe:
    """Never raises. The card's power state, its windows and their registers stay as they are.

    `count` the free windows: the driver does not tell their number, so each is allocated for a moment, in which
    nobody else gets one. Leave it out while another process may be opening the card.
    """
    module = module_version(sysfs)
    others = tuple((pid, name) for pid, name in holders(path, proc) if pid != os.getpid())
    try:
        driver = TenstorrentDriver.open(path, idle=True)
    except NpuDriverError as error:
        return DriverProbe(path, module, problem=error.message, holders=others)
    with driver:
        export_problem: str | None = None
        try:
            driver.check_export()
        except NpuDriverError as error:
            export_problem = error.message
        free: dict[int, int] | None = None
        problem: str | None = None
        if count:
            try:
                free = {size: _count(driver, size) for size in (abi.GIB_4, abi.MIB_2)}
            except NpuDriverError as error:
                problem = error.message
        return DriverProbe(
            path,
            module,
            problem=problem,
            version=driver.version,
            pci_address=driver.pci_address,
            is_blackhole=driver.is_blackhole,
            big_windows=_big_windows(sysfs, driver.pci_address),
            free_windows=free,
            holders=others,
            export_problem=export_problem,
        )


def _count(driver: TenstorrentDriver, size: int) -> int:
    windows = []
    try:
        while True:
            windows.append(driver.allocate_window(size))
    except NoWindows:
        return len(windows)
    finally:
        for window in windows:
            driver.free(window)


def _big_windows(sysfs: Path, pci_address: str) -> int | None:
    """BAR4's size, from the PCI device's `resource` (a line per BAR: first byte, last byte, flags), in 4 GiB."""
    try:
        first, last = (sysfs / "bus/pci/devices" / pci_address / "resource").read_text().splitlines()[4].split()[:2]
        size = int(last, 16) - int(first, 16) + 1
    except (OSError, ValueError, IndexError):
        return None
    return min(size // abi.GIB_4, abi.MAX_BIG)
