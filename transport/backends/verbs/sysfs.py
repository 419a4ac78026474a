"""What the kernel shows of RDMA devices in /sys: names, ports, GIDs. Needs no library and no permission."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path

from transport.errors import ConfigurationError

SYS = Path("/sys")
SOFT_DRIVERS = {"rxe": "rdma_rxe", "siw": "siw"}
"""Software devices have no driver link; their default names begin like this."""


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's GID table: an address of the port."""

    index: int
    gid: str
    type: str
    """"RoCE v2" or "IB/RoCE v1", which an InfiniBand port shows as well."""
    netdev: str | None

    @property
    def ip(self) -> str | None:
        """The IPv4 address of an IPv4-mapped GID."""
        mapped = ipaddress.IPv6Address(self.gid).ipv4_mapped
        return None if mapped is None else str(mapped)


@dataclass(frozen=True, slots=True)
class Port:
    number: int
    link_layer: str
    """"ethernet" or "infiniband"."""
    state: str
    """"active", "down", "init", "armed", or "gone" while the device is removed; only an active port carries data."""
    physical_state: str
    rate: str
    lid: int
    gids: tuple[Gid, ...]


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    node_type: str
    """"CA" for InfiniBand and RoCE, "RNIC" for iWARP."""
    node_guid: str
    driver: str
    node: str | None
    """The file that opens it, such as /dev/infiniband/uverbs0."""
    ports: tuple[Port, ...]


def read_devices(sys: Path = SYS) -> list[Device]:
    """All RDMA devices, mlx5_2 before mlx5_10. Raises ConfigurationError where the kernel has none."""
    base = sys / "class/infiniband"
    names = sorted((path.name for path in base.iterdir()), key=_natural) if base.is_dir() else []
    if not names:
        without = "has no RDMA devices" if base.is_dir() else "runs without RDMA (no /sys/class/infiniband)"
        raise ConfigurationError(
            f"this machine {without}: load the NIC's driver (`modprobe mlx5_ib` or the like), or for Soft-RoCE "
            "`modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0`"
        )
    return [_device(base / name, device_node(name, sys)) for name in names]


def device_node(name: str, sys: Path = SYS) -> str | None:
    """The file that opens the device, whether or not it exists; None while ib_uverbs does not serve the device."""
    nodes = (path for path in (sys / "class/infiniband_verbs").glob("uverbs*") if _read(path / "ibdev") == name)
    found = next(nodes, None)
    return None if found is None else f"/dev/infiniband/{found.name}"


def is_software(name: str, sys: Path = SYS) -> bool:
    """Whether the device is made of software only: no hardware belongs to it."""
    return not (sys / "class/infiniband" / name / "device").exists()


def _device(path: Path, node: str | None) -> Device:
    ports = sorted((path / "ports").glob("*"), key=lambda port: int(port.name))
    link = path / "device/driver"
    soft = next((driver for prefix, driver in SOFT_DRIVERS.items() if path.name.startswith(prefix)), "unknown")
    return Device(
        name=path.name,
        node_type=_value(path / "node_type"),
        node_guid=_read(path / "node_guid"),
        driver=link.resolve().name if link.exists() else soft,
        node=node,
        ports=tuple(_port(port) for port in ports),
    )


def _port(path: Path) -> Port:
    return Port(
        number=int(path.name),
        link_layer=_read(path / "link_layer").lower(),
        state=_value(path / "state").lower() or "gone",
        physical_state=_value(path / "phys_state") or "unknown",
        rate=_read(path / "rate"),
        lid=int(_read(path / "lid") or "0", 0),
        gids=tuple(_gids(path)),
    )


def _gids(path: Path) -> list[Gid]:
    found = []
    for name, gid in _table(path / "gids"):
        if set(gid) - set("0:"):
            kind = _read(path / "gid_attrs/types" / name)
            netdev = _read(path / "gid_attrs/ndevs" / name)
            found.append(Gid(index=int(name), gid=gid, type=kind, netdev=netdev or None))
    return found


def _table(path: Path) -> list[tuple[str, str]]:
    """(name, text) of all files of a folder with numbers as names.

    A GID table has up to 1024 files, nearly all of them empty entries: `Path.read_text` takes several times as long.
    """
    if not path.is_dir():
        return []
    found = []
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in sorted(os.listdir(folder), key=int):
            with contextlib.suppress(OSError):
                file = os.open(name, os.O_RDONLY, dir_fd=folder)
                try:
                    found.append((name, os.read(file, 256).decode().strip()))
                finally:
                    os.close(file)
    finally:
        os.close(folder)
    return found


def _read(path: Path) -> str:
    """ "" for what this kernel does not have; an empty GID entry's attributes answer EINVAL."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _value(path: Path) -> str:
    """The text of "4: ACTIVE"."""
    return _read(path).rpartition(":")[2].strip()


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
