"""Which NIC to use: by configuration, or the first that can carry data."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from transport.backends.verbs.sysfs import Device, Gid, Port
from transport.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Pick:
    """A port to use and its address there. `gid_index` None: addressed by LID, without a global route."""

    device: Device
    port: Port
    gid: Gid
    gid_index: int | None
    why: str


def select(devices: Sequence[Device], names: Sequence[str] = ()) -> list[Pick]:
    """The ports that `names` ("device", "device:port", "device:port:gid index") mean; without names, one.

    Raises ConfigurationError that names what is wrong and what there is.
    """
    return [_named(devices, name) for name in names] if names else [_first(devices)]


def _first(devices: Sequence[Device]) -> Pick:
    reasons = []
    for device in devices:
        for port in device.ports:
            try:
                return _use(device, port, None, why="the first active port")
            except ConfigurationError as error:
                reasons.append(error.message)
    raise ConfigurationError("no RDMA port can be used: " + "; ".join(reasons))


def _named(devices: Sequence[Device], name: str) -> Pick:
    parts = name.split(":")
    try:
        numbers = [int(part) for part in parts[1:]]
    except ValueError:
        numbers = [-1]
    if len(numbers) > 2 or any(number < 0 for number in numbers):
        raise ConfigurationError(f"{name!r} names no NIC: write device, device:port or device:port:gid index")
    device = next((device for device in devices if device.name == parts[0]), None)
    if device is None:
        there = ", ".join(device.name for device in devices)
        raise ConfigurationError(f"there is no RDMA device {parts[0]!r}; there are: {there}")
    if not device.ports:
        raise ConfigurationError(f"device {device.name} has no ports")
    if not numbers:
        active = next((port for port in device.ports if port.state == "active"), device.ports[0])
        return _use(device, active, None, why=f"named {name!r}, its first active port")
    port = next((port for port in device.ports if port.number == numbers[0]), None)
    if port is None:
        there = ", ".join(str(port.number) for port in device.ports)
        raise ConfigurationError(f"device {device.name} has no port {numbers[0]}; its ports: {there}")
    return _use(device, port, numbers[1] if len(numbers) == 2 else None, why=f"named {name!r}")


def _use(device: Device, port: Port, index: int | None, *, why: str) -> Pick:
    where = f"{device.name} port {port.number}"
    if device.node_type != "CA":
        raise ConfigurationError(f"{where} is {device.node_type} (iWARP), but InfiniBand or RoCE is needed")
    if port.state != "active":
        raise ConfigurationError(
            f"{where} is {port.state} (physically {port.physical_state}), not active: check the cable, "
            "or set its network interface up"
        )
    if index is not None:
        gid = next((gid for gid in port.gids if gid.index == index), None)
        if gid is None:
            raise ConfigurationError(f"{where} has no GID {index}; its GIDs: {_table(port)}")
        return Pick(device, port, gid, index, f"{why}, with the GID asked for")
    if port.link_layer == "infiniband":
        if not port.lid or not port.gids:
            raise ConfigurationError(f"{where} has no LID yet: is a subnet manager running?")
        return Pick(device, port, port.gids[0], None, f"{why}, by LID")
    usable = [gid for gid in port.gids if gid.type == "RoCE v2"]
    if not usable:
        raise ConfigurationError(
            f"{where} has no RoCE v2 GID: give its network interface an IP address; its GIDs: {_table(port)}"
        )
    gid = min(usable, key=lambda gid: (_rank(gid), gid.index))
    return Pick(device, port, gid, gid.index, f"{why}, {_KINDS[_rank(gid)]} of its GIDs")


_KINDS = ("the first IPv4-mapped RoCE v2", "the first global IPv6 RoCE v2", "a link-local RoCE v2, for want of better,")


def _rank(gid: Gid) -> int:
    """A link-local GID reaches only the same Ethernet segment, and none of it a router knows."""
    if gid.ip is not None:
        return 0
    return 2 if ipaddress.IPv6Address(gid.gid).is_link_local else 1


def _table(port: Port) -> str:
    return ", ".join(f"{gid.index} = {gid.gid} ({gid.type})" for gid in port.gids) or "none"
