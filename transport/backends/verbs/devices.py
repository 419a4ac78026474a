"""The NICs of this machine that the data plane uses, opened far enough to know their MTU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transport.backends.verbs import library
from transport.backends.verbs.library import Library
from transport.backends.verbs.selection import Pick, select
from transport.backends.verbs.sysfs import read_devices
from transport.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Nic:
    """One port of one device, and the address it is used with."""

    device: str
    port: int
    link_layer: str
    """"ethernet" or "infiniband"."""
    gid_index: int | None
    """None: addressed by LID alone, without a global route header."""
    gid: str
    gid_type: str
    ip: str | None
    """The IPv4 address that an IPv4-mapped GID stands for."""
    lid: int
    mtu: int
    """Active path MTU in bytes."""
    netdev: str | None
    node_guid: str


def choose(names: Sequence[str] = ()) -> list[Nic]:
    """The NICs to use: those named ("mlx5_0", "mlx5_0:1" with the port, "mlx5_0:1:3" with the GID index), or the
    first device, by name, with an active port. RoCE: a RoCE v2 GID, IPv4-mapped if there is one; InfiniBand: the LID.

    Raises ConfigurationError: no pyverbs, no RDMA in the kernel, no such device, an inactive port, no usable GID.
    """
    return [nic for nic, _ in choose_and_say_why(names)]


def choose_and_say_why(names: Sequence[str]) -> list[tuple[Nic, str]]:
    picks = select(read_devices(), names)
    lib = library.load()
    return [(_nic(lib, pick), pick.why) for pick in picks]


def _nic(lib: Library, pick: Pick) -> Nic:
    device, port, gid = pick.device, pick.port, pick.gid
    context = open_device(lib, device.name, device.node)
    try:
        mtu = bytes_of_mtu(context.query_port(port.number).active_mtu)
    except lib.error as error:
        raise ConfigurationError(f"{device.name} port {port.number} cannot be queried: {error}") from error
    finally:
        context.close()
    return Nic(
        device=device.name,
        port=port.number,
        link_layer=port.link_layer,
        gid_index=pick.gid_index,
        gid=gid.gid,
        gid_type=gid.type,
        ip=gid.ip,
        lid=port.lid,
        mtu=mtu,
        netdev=gid.netdev,
        node_guid=device.node_guid,
    )


def open_device(lib: Library, name: str, node: str | None) -> Any:
    """A pyverbs Context. Raises ConfigurationError that says what keeps this process from it."""
    if node is None or not os.path.exists(node):
        file = node or "/dev/infiniband/uverbs*"
        raise ConfigurationError(
            f"{name} is there, but not {file}: load ib_uverbs, or give the container the device "
            "(docker --device=/dev/infiniband)"
        )
    if not os.access(node, os.R_OK | os.W_OK):
        raise ConfigurationError(f"{name}: no permission for {node}; make it readable and writable for this user")
    try:
        return lib.device.Context(name=name)
    except lib.error as error:
        raise ConfigurationError(
            f"{name} cannot be opened: {error}; is its user-space driver installed (ibverbs-providers)?"
        ) from error


def bytes_of_mtu(code: int) -> int:
    """An `ibv_mtu` (1 to 5) in bytes, 256 to 4096."""
    return 128 << code
