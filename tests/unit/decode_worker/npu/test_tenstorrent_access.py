"""Access to a Tenstorrent chip's banks, without a chip: steps, locking, errors, dma-bufs through a stand-in driver."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decode_worker.npu.base import Buffer, DmaMapping, NpuMemoryError, OutOfDeviceMemory
from decode_worker.npu.tenstorrent import access, export
from decode_worker.npu.tenstorrent.access import STEP, NocAccess, first_line
from decode_worker.npu.tenstorrent.device import TenstorrentNpu
from decode_worker.npu.tenstorrent.export import Exports
from decode_worker.npu.tenstorrent.memory import _out_of_memory
from decode_worker.npu.tenstorrent.mesh import TenstorrentMesh
from transport.errors import ConfigurationError

PORTS = [(0, 11), (9, 3)]


class Chip:
    """tt-umd's TTDevice: memory per NOC node. `calls`: (name, x, y, address, length)."""

    def __init__(self) -> None:
        self.memory = {port: bytearray(4 * STEP) for port in PORTS}
        self.calls: list[tuple[Any, ...]] = []
        self.broken = ""

    def noc_read(self, noc: int, x: int, y: int, address: int, into: memoryview) -> None:
        self._say("read", x, y, address, len(into))
        into[:] = self.memory[x, y][address : address + len(into)]

    def noc_write(self, x: int, y: int, address: int, data: memoryview) -> None:
        self._say("write", x, y, address, len(data))
        self.memory[x, y][address : address + len(data)] = data

    def _say(self, *what: Any) -> None:
        if self.broken:
            raise RuntimeError(self.broken)
        self.calls.append(what)


def test_long_accesses_are_made_in_steps() -> None:
    chip = Chip()
    noc = NocAccess(chip, PORTS)
    data = np.random.default_rng(0).integers(0, 256, 2 * STEP + 3, dtype=np.uint8)
    noc.write(1, 100, data)
    assert np.array_equal(noc.read(1, 100, data.size), data)
    assert chip.calls == [
        (what, 9, 3, 100 + at, min(STEP, data.size - at)) for what in ("write", "read") for at in (0, STEP, 2 * STEP)
    ]
    assert not any(chip.memory[0, 11])


def test_a_chip_that_does_not_answer_is_named_with_bank_and_address() -> None:
    chip = Chip()
    noc = NocAccess(chip, PORTS)
    chip.broken = "TT_THROW @ device.cpp:12: hung\ninfo:\nthe NOC is hung\nbacktrace:\n --- libtt-umd.so"
    with pytest.raises(NpuMemoryError, match=r"^cannot read 8 bytes at 0x40 of bank 1: the NOC is hung$"):
        noc.read(1, 64, 8)
    noc.close()
    noc.close()
    with pytest.raises(NpuMemoryError, match="cannot write bank 0: the device is closed"):
        noc.write(0, 0, np.zeros(1, np.uint8))


@pytest.mark.parametrize(
    ("text", "words"),
    [("one\ntwo", "one"), ("TT_FATAL @ x.cpp:1: false\ninfo:\nthis\nbacktrace:", "this"), ("", "RuntimeError")],
)
def test_the_words_of_an_error_without_its_backtrace(text: str, words: str) -> None:
    assert first_line(RuntimeError(text)) == words


def test_only_running_out_of_memory_is_out_of_memory() -> None:
    with pytest.raises(OutOfDeviceMemory, match=r"^Out of Memory: Not enough space to allocate 5 B$"), _out_of_memory():
        raise RuntimeError(
            "TT_FATAL @ bank_manager.cpp:514: false\ninfo:\nOut of Memory: Not enough space to allocate 5 B\n"
        )
    with pytest.raises(RuntimeError, match="device is gone"), _out_of_memory():
        raise RuntimeError("the device is gone")


def test_our_own_simulator_is_told_from_others_by_its_socket(tmp_path: Path) -> None:
    ours = tmp_path / "ours.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(ours))
        listening.listen()
        assert str(ours) in access._sockets_of_this_process()
    assert str(ours) not in access._sockets_of_this_process()


def test_a_python_without_ttnn_is_told_which_one_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ttnn", None)
    with pytest.raises(ConfigurationError, match=r"ttnn cannot be imported .*`make env-ttnn`"):
        TenstorrentMesh()


class Memory:
    """What `DeviceMemory` says of two buffers, one interleaved and one in bank 1."""

    num_banks, base = 2, 4096

    def __init__(self) -> None:
        self.buffers = [Buffer(1, 4096, 8, 1024), Buffer(2, 8192, 1, 512, 1)]
        self.allocations = [type("Allocation", (), {"size": size, "maps": 0})() for size in (4096, 512)]

    def of(self, buffer: Buffer) -> Any:
        return self.allocations[self.buffers.index(buffer)]

    def span(self) -> tuple[int, int]:
        return 4096, 8704


def npu_of(name: str, memory: Memory, noc: NocAccess, exports: Exports | None) -> TenstorrentNpu:
    return TenstorrentNpu(name, memory, noc, exports, word=4096, bank_end=1 << 20, on_close=lambda: None)  # type: ignore[arg-type]


class Driver:
    def __init__(self) -> None:
        self.said: list[str] = []

    def close(self) -> None:
        self.said.append("driver closed")


def test_buffers_on_a_card_are_mapped_through_one_set_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()

    class Windows:
        def __init__(self, given: Driver, banks: Any, spans: Any, *, single: bool) -> None:
            assert (given, banks, single) == (driver, [[(0, 11)], [(9, 3)]], True)
            driver.said.append(f"windows {spans}")
            self.spans = spans

        def mappings(self, bank: int, address: int, length: int) -> list[DmaMapping]:
            low, size = self.spans[bank]
            if not low <= address <= address + length <= low + size:
                raise ValueError("outside")
            return [DmaMapping(bank, 70 + bank, address, length)]

        def close(self) -> None:
            driver.said.append("windows closed")

    monkeypatch.setattr(export.TenstorrentDriver, "open", lambda path: driver.said.append(path) or driver)
    monkeypatch.setattr(export, "BankWindows", Windows)
    exports, memory = Exports(3, [[(0, 11)], [(9, 3)]]), Memory()
    npu = npu_of("card", memory, NocAccess(Chip(), PORTS), exports)
    first, second = memory.buffers
    assert npu.map_buffer_dma(first) == [DmaMapping(0, 70, 4096, 4096), DmaMapping(1, 71, 4096, 4096)]
    assert npu.map_buffer_dma(second) == [DmaMapping(1, 71, 8192, 512)]
    npu.unmap_buffer_dma(second)
    with pytest.raises(ValueError, match="not mapped"):
        npu.unmap_buffer_dma(second)
    exports.close()
    exports.close()
    assert driver.said == [
        "/dev/tenstorrent/3",
        "windows [(4096, 4608), (4096, 4608)]",
        "windows closed",
        "driver closed",
    ]


def test_the_barrier_sends_a_word_to_every_bank_and_waits_for_it() -> None:
    chip = Chip()
    npu = npu_of("card", Memory(), NocAccess(chip, PORTS), None)
    npu.barrier()
    assert chip.calls == [(what, *port, 4096, 4) for port in PORTS for what in ("write", "read")]
    assert chip.memory[9, 3][4096] == 1
    npu.barrier()
    assert chip.memory[9, 3][4096] == 2


def test_the_barrier_takes_the_ports_that_the_nic_writes_by(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = Chip()
    chip.memory[0, 1] = bytearray(1 << 13)
    exports = Exports(0, [])
    exports._windows.append(type("Windows", (), {"ports": [(0, 1), (9, 3)]})())  # type: ignore[arg-type]
    npu_of("card", Memory(), NocAccess(chip, PORTS), exports).barrier()
    assert {call[1:3] for call in chip.calls} == {(0, 1), (9, 3)}


def test_a_word_that_does_not_come_back_ends_the_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "FLUSH_S", 0.01)
    chip = Chip()
    monkeypatch.setattr(chip, "noc_write", lambda *what: None)
    with pytest.raises(NpuMemoryError, match="bank 0 does not show within"):
        npu_of("card", Memory(), NocAccess(chip, PORTS), None).barrier()


def test_a_device_without_exports_names_the_other_path() -> None:
    memory = Memory()
    npu = npu_of("tenstorrent simulator 0", memory, NocAccess(Chip(), PORTS), None)
    with pytest.raises(ConfigurationError, match=r"^tenstorrent simulator 0 has no memory .* --kv-path relay"):
        npu.map_buffer_dma(memory.buffers[0])
    assert memory.allocations[0].maps == 0


def test_descriptors_that_close_meanwhile_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.readlink

    def gone(path: Any) -> str:
        if str(path).startswith("/proc/self/fd/"):
            raise FileNotFoundError(path)
        return real(path)

    monkeypatch.setattr(os, "readlink", gone)
    assert access._sockets_of_this_process() == set()
