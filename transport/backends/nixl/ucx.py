"""What UCX may use, which it reads from the environment: sound defaults, and what they mean for a fence."""

from __future__ import annotations

import os

import psutil  # type: ignore[import-untyped]

DEFAULT_TRANSPORTS = "tcp"
"""Reaches every host, and a receiver can stop its writer by itself. For writers on the receiver's own host
`UCX_TLS=tcp,sm` is about twice as fast, but see `strict`."""

_RDMA = ("ib", "rc", "dc", "ud", "gga")
_STOPPED_BY_THE_RECEIVER = ("self", "tcp", *_RDMA)


def transports() -> list[str]:
    """The transports that UCX may use here; whatever the operator has set in UCX_TLS is left as it is."""
    chosen = os.environ.get("UCX_TLS") or DEFAULT_TRANSPORTS
    return [name.partition(":")[0] for name in chosen.split(",")]


def strict() -> bool:
    """Whether no byte can land once the receiver's agent is gone, whatever its writers do.

    Over TCP it is the receiver's own thread that stores what it reads off the socket, and a NIC refuses writes to a
    queue pair that is no more. By shared memory (`sm`, `cma`, `xpmem`, …) the writer's process stores by itself. A
    receiver's choice binds its writers: they reach it only by what its address offers.
    """
    return all(name.split("_")[0] in _STOPPED_BY_THE_RECEIVER for name in transports())


def uses_rdma() -> bool:
    """Whether UCX may use RDMA devices: also if it may use all but some transports."""
    return any(name.split("_")[0] in (*_RDMA, "all") or name.startswith("^") for name in transports())


def prepare() -> None:
    """To be called before UCX is loaded, once; what is set already stays as it is."""
    # Else UCX takes SIGHUP from whoever handles it, for debugging.
    os.environ.setdefault("UCX_DEBUG_SIGNO", "0")
    if not uses_rdma():
        # Not needed then, and the libnl that NIXL's wheel has for it crashes when the process ends.
        os.environ.setdefault("UCX_MODULES", "^ib")


def engine_config(host: str) -> str:
    """NIXL's setting for an agent that is to be reached by way of `host`, an address of this machine.

    UCX would listen on every interface otherwise, and it asks nobody who connects for a token.
    """
    settings = [] if os.environ.get("UCX_TLS") else [f"TLS={DEFAULT_TRANSPORTS}"]
    interface = None if uses_rdma() else interface_of(host)
    if interface is not None:
        settings.append(f"NET_DEVICES={interface}")
    return ",".join(settings)


def interface_of(host: str) -> str | None:
    """The network interface that has the address, None if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.partition("%")[0] == host.partition("%")[0] for known in addresses):
            return str(name)
    return None
