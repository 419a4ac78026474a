"""One or more Tenstorrent chips that ttnn opens together, each an NPU of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from decode_worker.npu.base import Buffer, TensorShape
from decode_worker.npu.tenstorrent import access
from decode_worker.npu.tenstorrent.access import BankAccess, NoAccess, NocAccess, Port, first_line
from decode_worker.npu.tenstorrent.device import TenstorrentNpu
from decode_worker.npu.tenstorrent.export import Exports
from decode_worker.npu.tenstorrent.memory import DeviceMemory
from transport.errors import ConfigurationError
from transport.geometry.kv import KVDtype

SIMULATOR = "TT_METAL_SIMULATOR"
MOCK = "TT_METAL_MOCK_CLUSTER_DESC_PATH"


class TenstorrentMesh:
    """Opens a row of `chips` chips, the first of which is `device_id`. What ttnn finds is its environment's matter:
    cards, or the simulator or mock chips that it names.

    Raises ConfigurationError where ttnn is missing or opens nothing.
    """

    def __init__(self, chips: int = 1, device_id: int = 0) -> None:
        if chips <= 0 or device_id < 0:
            raise ValueError(f"chips must be positive and device_id not negative, got {chips} and {device_id}")
        try:
            import ttnn
        except ImportError as error:
            raise ConfigurationError(
                f"ttnn cannot be imported ({error}): run the decode worker by the Python of an environment that has "
                "it; `make env-ttnn` makes one, .venv-ttnn"
            ) from error
        self._ttnn = ttnn
        self._closers: list[Callable[[], None]] = []
        try:
            self.device = self._open(chips, device_id)
            self._closers.append(self._close_device)
            self.memory = DeviceMemory(self.device)
            self._closers.append(self.memory.close)
            self._word = 0 if _mock() else self.memory.allocate_words()
            self.chips = [self._chip(chip, device_id) for chip in range(chips)]
        except BaseException:
            self.close()
            raise

    def allocate_tensor(self, shape: TensorShape, dtype: KVDtype) -> Buffer:
        """A K or V tensor whose heads are dealt over the chips: chip i has heads [i·H/n, (i+1)·H/n), at the same
        address as the others. Raises ValueError where the heads do not divide, OutOfDeviceMemory."""
        blocks, heads, rows, columns = shape
        count = len(self.chips)
        if heads % count:
            raise ValueError(f"{heads} heads cannot be dealt over {count} chips")
        return self.memory.allocate_tensor((blocks, heads // count, rows, columns), dtype)

    def close(self) -> None:
        """Dma-bufs, tensors, connections and the device, in this order. Idempotent."""
        while self._closers:
            self._closers.pop()()

    # ---- helpers

    def _open(self, chips: int, device_id: int) -> Any:
        ttnn = self._ttnn
        try:
            if chips == 1:
                return ttnn.open_device(device_id=device_id)
            ids = list(range(device_id, device_id + chips))
            return ttnn.open_mesh_device(ttnn.MeshShape(1, chips), physical_device_ids=ids)
        except RuntimeError as error:
            wanted = f"{chips} Tenstorrent chips, from {device_id} on" if chips > 1 else f"Tenstorrent chip {device_id}"
            raise ConfigurationError(f"ttnn cannot open {wanted}: {first_line(error)}") from error

    def _close_device(self) -> None:
        if len(self.device.get_device_ids()) == 1:
            self._ttnn.close_device(self.device)
        else:
            self._ttnn.close_mesh_device(self.device)

    def _chip(self, chip: int, device_id: int) -> TenstorrentNpu:
        ttnn = self._ttnn
        ports = [
            (int(core.x), int(core.y))
            for core in (
                self.device.dram_core_from_logical_core(ttnn.CoreCoord(bank, 0))
                for bank in range(self.memory.num_banks)
            )
        ]
        made: BankAccess
        exports: Exports | None = None
        if _mock():
            kind, made = "mock", NoAccess()
        elif os.environ.get(SIMULATOR):
            connection, devices = access.simulated_chips()
            kind, made = "simulator", NocAccess(devices[chip], ports, connection=connection)
        else:
            pci = int(ttnn._ttnn.device.GetPCIeDeviceID(device_id + chip))
            umd = access.card(pci)
            kind, made, exports = "card", NocAccess(umd, ports), Exports(pci, all_ports(umd, ports))
        self._closers.append(made.close)
        if exports is not None:
            self._closers.append(exports.close)
        return TenstorrentNpu(
            f"tenstorrent {kind} {device_id + chip}",
            self.memory,
            made,
            exports,
            word=self._word,
            bank_end=self.memory.base + self.memory.usage()[0].total,
            on_close=self.close,
        )


def _mock() -> bool:
    return bool(os.environ.get(MOCK)) and not os.environ.get(SIMULATOR)


def all_ports(umd: Any, preferred: list[Port]) -> list[list[Port]]:
    """Every bank's NOC ports, the preferred one first."""
    import tt_umd

    cores = umd.get_soc_descriptor().get_cores(tt_umd.CoreType.DRAM, tt_umd.CoordSystem.TRANSLATED)
    ports = [(int(core.x), int(core.y)) for core in cores]
    each = len(ports) // len(preferred)
    banks = [ports[bank * each : (bank + 1) * each] for bank in range(len(preferred))]
    return [[first, *(port for port in bank if port != first)] for first, bank in zip(preferred, banks, strict=True)]
