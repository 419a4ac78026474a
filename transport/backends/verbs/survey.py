"""A survey of everything that decides whether RDMA works here: for `hawk doctor rdma`."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from transport.backends.verbs import library
from transport.backends.verbs.devices import Nic, bytes_of_mtu, choose_and_say_why, open_device
from transport.backends.verbs.library import Library
from transport.backends.verbs.memlock import Memlock, memlock
from transport.backends.verbs.sysfs import SYS, Device, read_devices
from transport.errors import ConfigurationError

T = TypeVar("T")

RDMA_MODULES = (
    *("ib_core", "ib_uverbs", "rdma_cm", "rdma_ucm", "rdma_rxe", "siw"),
    *("mlx5_ib", "mlx4_ib", "irdma", "bnxt_re", "efa", "erdma", "hns_roce_hw_v2", "ionic_rdma", "mana_ib", "qedr"),
)
PEER_MODULES = ("nvidia_peermem", "nv_peer_mem", "ib_peer_mem", "amdkfd")


@dataclass(frozen=True, slots=True)
class GidSurvey:
    index: int
    gid: str
    type: str
    ip: str | None
    netdev: str | None


@dataclass(frozen=True, slots=True)
class PortSurvey:
    number: int
    link_layer: str
    state: str
    physical_state: str
    rate: str
    lid: int
    active_mtu: int | None
    max_mtu: int | None
    """Bytes; None where the device could not be opened."""
    gids: tuple[GidSurvey, ...]


@dataclass(frozen=True, slots=True)
class DmaBuf:
    """Whether a region can be registered from a dma-buf; None: unknown until a registration is tried."""

    supported: bool | None
    how_known: str


@dataclass(frozen=True, slots=True)
class DeviceSurvey:
    name: str
    driver: str
    node_type: str
    node_guid: str
    node: str | None
    problem: str | None
    """Why this process cannot open the device."""
    dmabuf: DmaBuf
    ports: tuple[PortSurvey, ...]


@dataclass(frozen=True, slots=True)
class Survey:
    """Everything `hawk doctor rdma` shows; `dataclasses.asdict` makes JSON of it."""

    kernel: str
    library: str | None
    """Version and place of pyverbs, or None, and then `library_problem` says why."""
    library_problem: str | None
    devices: tuple[DeviceSurvey, ...]
    memlock: Memlock
    peer_memory: tuple[str, ...]
    """Loaded modules and registered clients that let a NIC reach a GPU's or NPU's memory without a dma-buf."""
    modules: tuple[str, ...]
    chosen: tuple[Nic, ...]
    why: tuple[str, ...]
    """For each of `chosen`."""
    problem: str | None
    """Why nothing can be chosen."""


def survey(names: Sequence[str] = ()) -> Survey:
    """Look at everything; `names` as for `choose`. Never raises."""
    lib, library_problem = _attempt(library.load)
    devices, _ = _attempt(read_devices)
    chosen, problem = _attempt(lambda: choose_and_say_why(names))
    return Survey(
        kernel=platform.release(),
        library=None if lib is None else f"{lib.version} ({lib.path})",
        library_problem=library_problem,
        devices=tuple(_survey_device(lib, device) for device in devices or ()),
        memlock=memlock(),
        peer_memory=_peer_memory(SYS),
        modules=_loaded(SYS, RDMA_MODULES),
        chosen=tuple(nic for nic, _ in chosen or ()),
        why=tuple(why for _, why in chosen or ()),
        problem=problem,
    )


def _attempt(call: Callable[[], T]) -> tuple[T | None, str | None]:
    try:
        return call(), None
    except ConfigurationError as error:
        return None, error.message
    except Exception as error:  # a survey shows what it finds, whatever that is
        return None, f"{type(error).__name__}: {error}"


def _survey_device(lib: Library | None, device: Device) -> DeviceSurvey:
    dmabuf = DmaBuf(None, "unknown: the device could not be opened")
    mtus: dict[int, tuple[int, int]] = {}
    problem: str | None = "pyverbs is missing"
    if lib is not None:
        context, problem = _attempt(lambda: open_device(lib, device.name, device.node))
        if context is not None:
            mtus = _attempt(lambda: _mtus(context, device))[0] or {}
            probed, failure = _attempt(lambda: _probe_dmabuf(lib, context))
            dmabuf = probed or DmaBuf(None, f"unknown until a registration is tried: {failure}")
            _attempt(context.close)
    return DeviceSurvey(
        name=device.name,
        driver=device.driver,
        node_type=device.node_type,
        node_guid=device.node_guid,
        node=device.node,
        problem=problem,
        dmabuf=dmabuf,
        ports=tuple(
            PortSurvey(
                number=port.number,
                link_layer=port.link_layer,
                state=port.state,
                physical_state=port.physical_state,
                rate=port.rate,
                lid=port.lid,
                active_mtu=mtus.get(port.number, (None, None))[0],
                max_mtu=mtus.get(port.number, (None, None))[1],
                gids=tuple(GidSurvey(gid.index, gid.gid, gid.type, gid.ip, gid.netdev) for gid in port.gids),
            )
            for port in device.ports
        ),
    )


def _mtus(context: Any, device: Device) -> dict[int, tuple[int, int]]:
    """Active and maximal, by port."""
    found = {port.number: context.query_port(port.number) for port in device.ports}
    return {number: (bytes_of_mtu(port.active_mtu), bytes_of_mtu(port.max_mtu)) for number, port in found.items()}


def _probe_dmabuf(lib: Library, context: Any) -> DmaBuf:
    """Register a dma-buf that does not exist: who can register one complains of the descriptor."""
    with lib.pd.PD(context) as domain:
        try:
            lib.mr.DmaBufMR(domain, 4096, lib.enums.IBV_ACCESS_LOCAL_WRITE, dmabuf=-1, offset=0).close()
        except lib.error as error:
            code = getattr(error, "error_code", None)
            if code == errno.EBADF:
                return DmaBuf(True, "kernel and driver take dma-bufs; whether the exporter's memory fits shows later")
            if code in (errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, errno.ENOSYS):
                return DmaBuf(False, f"tried: {os.strerror(code)} (kernel {platform.release()})")
            return DmaBuf(None, f"unknown until a registration is tried: the probe ended with {error}")
    return DmaBuf(None, "unknown until a registration is tried")


def _loaded(sys: Path, modules: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in modules if (sys / "module" / name).is_dir())


def _peer_memory(sys: Path) -> tuple[str, ...]:
    """Vendor kernels list the clients of their peer-memory interface under /sys/kernel/mm."""
    clients = sys / "kernel/mm/memory_peers"
    registered = [f"{path.name} (registered)" for path in sorted(clients.iterdir())] if clients.is_dir() else []
    return (*_loaded(sys, PEER_MODULES), *registered)
