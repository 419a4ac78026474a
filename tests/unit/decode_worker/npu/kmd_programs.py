"""What the processes do for which kmd_shim.c plays tt-kmd. Each function returns something that JSON can hold."""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from decode_worker.npu.base import DmaMapping
from decode_worker.npu.tenstorrent.kmd import abi, held
from decode_worker.npu.tenstorrent.kmd.abi import Ordering
from decode_worker.npu.tenstorrent.kmd.driver import TenstorrentDriver, Window
from decode_worker.npu.tenstorrent.kmd.errors import NpuDriverError
from decode_worker.npu.tenstorrent.kmd.probe import probe
from decode_worker.npu.tenstorrent.kmd.windows import BankWindows

CARD = ctypes.CDLL(None)
"""Where the preload library's own functions are found."""

BANKS = [[(17 + bank // 4, 12 + 3 * (bank % 4) + port) for port in (2, 0, 1)] for bank in range(8)]
"""The ports of a p150's banks, translated coordinates."""


def main(programs: dict[str, Any] | None = None) -> None:
    name, args = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps((programs or globals())[name](*args)))


def several(calls: list[tuple[str, list[Any], dict[str, Any]]]) -> list[Any]:
    """Of each (program, arguments, environment) in turn: what it returned, or [class, message] of its error."""
    outcomes: list[Any] = []
    for program, args, environment in calls:
        names = [f"KMD_{name.upper()}" for name in environment]
        os.environ.update(zip(names, map(str, environment.values()), strict=True))
        try:
            outcomes.append(globals()[program](*args))
        except NpuDriverError as error:
            outcomes.append([type(error).__name__, error.message])
        assert not any(counts().values()), (program, args, environment, counts())
        for name in names:
            del os.environ[name]
    return outcomes


# ---- the card, as a NIC and as the test see it


def dma_write(fd: int, offset: int, data: bytes) -> int:
    return CARD.kmd_dma(fd, ctypes.c_uint64(offset), data, ctypes.c_uint64(len(data)), 1)


def counts() -> dict[str, int]:
    numbers = (ctypes.c_int * 4)()
    CARD.kmd_counts(numbers)
    return dict(zip(("devices", "windows", "exports", "mappings"), numbers, strict=True))


def bank_file(bank: int) -> Path:
    return Path(os.environ["KMD_BANKS"]) / f"bank-{bank}"


def written(bank: int) -> list[tuple[int, int]]:
    """The [start, stop) of a bank's bytes that are not 0."""
    found: list[tuple[int, int]] = []
    with bank_file(bank).open("rb") as file:
        fd, end, at = file.fileno(), os.fstat(file.fileno()).st_size, 0
        while at < end:
            try:
                start = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:  # a hole up to the end
                break
            at = os.lseek(fd, start, os.SEEK_HOLE)
            data = os.pread(fd, at - start, start)
            inner = data.strip(b"\0")
            if not inner:
                continue
            assert b"\0" not in inner, "these tests write no zeros"
            low = start + len(data) - len(data.lstrip(b"\0"))
            if found and found[-1][1] == low:
                low = found.pop()[0]
            found.append((low, low + len(inner)))
    return found


def wipe(bank: int) -> None:
    os.truncate(bank_file(bank), 0)
    os.truncate(bank_file(bank), abi.GIB_4)


def nonzero(rng: random.Random, length: int) -> bytes:
    return bytes(rng.choices(range(1, 256), k=min(length, 4096))) * (length // 4096 + 1)


# ---- one window


def versions() -> dict[str, Any]:
    with TenstorrentDriver.open() as driver:
        return {
            "version": str(driver.version),
            "pci": driver.pci_address,
            "blackhole": driver.is_blackhole,
            "export": driver.supports_export(),
        }


def one_window(size: int, use: Callable[[TenstorrentDriver, Window], Any]) -> Any:
    with TenstorrentDriver.open() as driver:
        return use(driver, driver.allocate_window(size))


def show_a_bank(size: int, address: int) -> dict[str, int]:
    """Bytes go into bank 3 through a mapping, at 100 of the window; a NIC writes behind them, at 4097."""

    def use(driver: TenstorrentDriver, window: Window) -> dict[str, int]:
        driver.configure(window, *BANKS[3][0], address)
        memory = driver.map(window)
        memory[100:104] = b"host"
        fd = driver.export_dmabuf(window, 4096, size - 4096)
        assert dma_write(fd, 1, b"nic") == 0
        assert memory[4097:4100] == b"nic"
        return counts()

    return one_window(size, use)


def ordering_of(size: int) -> int:
    def use(driver: TenstorrentDriver, window: Window) -> int:
        driver.configure(window, *BANKS[0][0], 0)
        return CARD.kmd_ordering(window.id)

    return one_window(size, use)


def export_piecewise() -> list[int]:
    """What a NIC gets for writes at the edges of an export that is a part of its window."""

    def use(driver: TenstorrentDriver, window: Window) -> list[int]:
        driver.configure(window, *BANKS[0][0], 0)
        fd = driver.export_dmabuf(window, 8192, 4096)
        return [
            dma_write(fd, 0, b"a"),
            dma_write(fd, 4095, b"z"),
            dma_write(fd, 4095, b"zz"),
            dma_write(fd, 4096, b"z"),
        ]

    return one_window(abi.MIB_2, use)


def bad_arguments() -> list[str]:
    messages = []

    def use(driver: TenstorrentDriver, window: Window) -> list[str]:
        driver.configure(window, 17, 12, 0)
        for wrong in (
            lambda: driver.allocate_window(1 << 24),
            lambda: driver.configure(window, 17, 12, 1 << 20),
            lambda: driver.configure(window, 64, 12, 0),
            lambda: driver.export_dmabuf(window, 1, 4096),
            lambda: driver.export_dmabuf(window, 0, 4095),
            lambda: driver.export_dmabuf(window, 0, 0),
            lambda: driver.export_dmabuf(window, abi.MIB_2, 4096),
            lambda: driver.export_dmabuf(window, 4096, abi.MIB_2),
        ):
            try:
                wrong()
            except ValueError as error:
                messages.append(str(error))
        return messages

    return one_window(abi.MIB_2, use)


def fork_beside_a_mapping() -> list[bool]:
    """Whether the window is mapped: here, and in a forked child."""

    def mapped() -> bool:
        return "bank-2" in Path("/proc/self/maps").read_text()

    def use(driver: TenstorrentDriver, window: Window) -> list[bool]:
        driver.configure(window, *BANKS[2][0], 0)
        driver.map(window, uncached=True)
        child = os.fork()
        if not child:
            os._exit(mapped())
        return [mapped(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0]

    return one_window(abi.MIB_2, use)


def mapping_in_use() -> dict[str, Any]:
    """An array that shows the window keeps it; without the array it can be given back."""
    driver = TenstorrentDriver.open()
    window = driver.allocate_window(abi.MIB_2)
    driver.configure(window, *BANKS[0][0], 0)
    array = memoryview(driver.map(window))
    try:
        driver.free(window)
        message = ""
    except NpuDriverError as error:
        message = f"{type(error).__name__}: {error.message}"
    held_meanwhile = counts()["windows"]
    array.release()
    driver.close()
    return {"message": message, "meanwhile": held_meanwhile, "after": counts()["windows"]}


def use_closed() -> None:
    driver = TenstorrentDriver.open()
    driver.close()
    driver.close()
    driver.allocate_window(abi.MIB_2)


def open_and_allocate(size: int) -> None:
    with TenstorrentDriver.open() as driver:
        driver.allocate_window(size)


def stuck_window() -> str:
    """A window that the driver says is mapped still."""
    driver = TenstorrentDriver.open()
    driver.allocate_window(abi.MIB_2)
    try:
        driver.close()
    except NpuDriverError as error:
        return f"{type(error).__name__}: {error.message}; {counts()['devices']} devices are open"
    return ""


def open_path(path: str) -> None:
    TenstorrentDriver.open(path).close()


# ---- wrong on purpose: the shim must see it


def leave_a_window() -> None:
    TenstorrentDriver.open().allocate_window(abi.MIB_2)


def close_the_device_first() -> None:
    driver = TenstorrentDriver.open()
    driver.allocate_window(abi.MIB_2)
    os.close(driver.fd)


def free_before_the_export() -> None:
    driver = TenstorrentDriver.open()
    window = driver.allocate_window(abi.MIB_2)
    driver.configure(window, *BANKS[0][0], 0)
    fd = driver.export_dmabuf(window, 0, 4096)
    window.exports.clear()
    driver.free(window)
    os.close(fd)
    driver.close()


def close_before_the_nic() -> None:
    with TenstorrentDriver.open() as driver:
        windows = BankWindows(driver, BANKS, [(0, 4096)] * 8)
        CARD.kmd_import(windows.mappings(0, 0, 4096)[0].fd, 1)
        windows.close()


# ---- banks


def whole_banks(num_banks: int, *, single: bool = True) -> dict[str, Any]:
    with TenstorrentDriver.open() as driver:
        windows = BankWindows(driver, BANKS[:num_banks], [(0, abi.GIB_4)] * num_banks, single=single)
        found = [windows.mappings(bank, 0x100080, 4352) for bank in range(num_banks)]
        result = {"mappings": [[asdict(m) for m in bank] for bank in found], "counts": counts()}
        windows.close()
        windows.close()
        return result | {"after": counts()}


def ranges(spans: list[tuple[int, int]], *, single: bool = False) -> list[int]:
    """How many mappings each bank's range takes; what a NIC writes through them is all that changes."""
    with TenstorrentDriver.open() as driver:
        return check_ranges(driver, spans, random.Random(0), single=single)


def check_ranges(
    driver: TenstorrentDriver, spans: list[tuple[int, int]], rng: random.Random, *, single: bool = False
) -> list[int]:
    windows = BankWindows(driver, BANKS[: len(spans)], spans, single=single)
    numbers = []
    for bank, (address, length) in enumerate(spans):
        if not length:
            numbers.append(0)
            continue
        mappings = windows.mappings(bank, address, length)
        assert sum(m.length for m in mappings) == length
        data, at = nonzero(rng, length), 0
        for m in mappings:
            assert m.bank == bank
            assert dma_write(m.fd, m.offset, data[at : at + m.length]) == 0
            at += m.length
        assert written(bank) == [(address, address + length)]
        with bank_file(bank).open("rb") as file:
            assert os.pread(file.fileno(), length, address) == data[:length]
        wipe(bank)
        check_part(windows.mappings, bank, address, length, rng)
        numbers.append(len(mappings))
    windows.close()
    assert counts()["windows"] == counts()["exports"] == 0
    return numbers


def check_part(
    mappings: Callable[[int, int, int], list[DmaMapping]], bank: int, address: int, length: int, rng: random.Random
) -> None:
    """A part of a range is that part's bytes; what reaches beyond it is refused."""
    low = rng.randrange(length)
    part = rng.randrange(1, length - low + 1)
    data, at = nonzero(rng, part), 0
    for m in mappings(bank, address + low, part):
        assert dma_write(m.fd, m.offset, data[at : at + m.length]) == 0
        at += m.length
    assert written(bank) == [(address + low, address + low + part)]
    wipe(bank)
    for start, size in ((address, length + 1), (address - 1, 1), (address + length, 1), (address, 0)):
        try:
            mappings(bank, start, size)
        except ValueError:
            continue
        raise AssertionError((bank, start, size))


def random_ranges(seed: int, rounds: int, longest: int) -> int:
    rng = random.Random(seed)
    most = 0
    with TenstorrentDriver.open() as driver:
        for _ in range(rounds):
            spans = []
            for _bank in range(rng.randint(1, 8)):
                length = rng.choice((0, 1, rng.randint(1, 5000), rng.randint(1, longest)))
                edge = rng.randrange(0, abi.GIB_4, abi.MIB_2)
                near = edge + rng.choice((0, -1, 1, -4096, 64, rng.randint(-longest, longest)))
                spans.append((max(0, min(near, abi.GIB_4 - length)), length))
            most = max(most, *check_ranges(driver, spans, rng))
    return most


def fill_up(spans: list[tuple[int, int]], single: bool = False) -> None:
    """For what is refused: nothing may stay open, with the device still open."""
    with TenstorrentDriver.open() as driver:
        try:
            BankWindows(driver, BANKS[: len(spans)], spans, single=single)
        finally:
            assert counts() == {"devices": 1, "windows": 0, "exports": 0, "mappings": 0}


# ---- tt-metal's windows


def metal(banks: list[int], ordering: Ordering = Ordering.POSTED) -> TenstorrentDriver:
    """Another descriptor of the device, that holds a window on each of some banks, as tt-metal does."""
    driver = TenstorrentDriver.open()
    for bank in reversed(banks):
        driver.configure(driver.allocate_window(abi.GIB_4), *BANKS[bank][1], 0, ordering=ordering)
    return driver


def borrow(banks: list[int]) -> dict[str, Any]:
    theirs = metal(banks)
    with TenstorrentDriver.open() as driver:
        windows = BankWindows(driver, BANKS, [(0, abi.GIB_4)] * 8, single=True)
        for bank in range(8):
            [m] = windows.mappings(bank, 4096 * bank + 64, 5)
            assert dma_write(m.fd, m.offset, b"%05d" % (11111 * (bank + 1))) == 0
            assert written(bank) == [(4096 * bank + 64, 4096 * bank + 69)]
        result = {
            "orderings": [o.name for o in windows.orderings],
            "ports": [BANKS[bank].index(port) for bank, port in enumerate(windows.ports)],
            "counts": counts(),
        }
        windows.close()
        result["after"] = counts()
    theirs.close()
    return result


def beside_windows_that_move() -> None:
    """Another descriptor has all big windows, but as tt-umd has those that it keeps pointing elsewhere."""
    theirs = metal(list(range(8)), Ordering.STRICT)
    try:
        with TenstorrentDriver.open() as driver:
            BankWindows(driver, BANKS, [(0, abi.GIB_4)] * 8)
    finally:
        theirs.close()


def held_by_us() -> list[dict[str, Any]]:
    theirs = metal([0, 1])
    with TenstorrentDriver.open() as driver:
        driver.configure(driver.allocate_window(abi.GIB_4), *BANKS[5][0], 0)
        found = [{"x": w.x, "y": w.y, "address": w.address, "id": w.id} for w in held.held_windows(driver)]
    theirs.close()
    return found


# ---- looking only


def look(count: bool, sysfs: str, proc: str) -> dict[str, Any]:
    found = probe(count=count, sysfs=Path(sysfs), proc=Path(proc))
    return asdict(found) | {"supports_export": found.supports_export, "after": counts()}


if __name__ == "__main__":
    main()
