"""Two guests and the wire between them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from .machine import Spec

ADDRESSES = {"A": "10.99.0.1", "B": "10.99.0.2"}


@contextlib.contextmanager
def pair(
    commands: Mapping[str, str],
    out: Path,
    *,
    limit_s: float = 240,
    memory_mb: int = 1024,
    environment: Mapping[str, str] | None = None,
) -> Iterator[list[Spec]]:
    """Specs of nodes A and B, joined by a socket pair (no port of the host is taken), writing into out/A and out/B.

    Each finds HAWK_NODE (A or B), HAWK_ADDRESS and HAWK_PEER (IPv4 addresses) in its environment.
    """
    ends = socket.socketpair()
    try:
        specs = []
        for (node, command), end in zip(commands.items(), ends, strict=True):
            peer = next(address for other, address in ADDRESSES.items() if other != node)
            own = {"HAWK_NODE": node, "HAWK_PEER": peer, "HAWK_ADDRESS": ADDRESSES[node]}
            specs.append(
                Spec(
                    command=command,
                    out=out / node,
                    link="wire",
                    address=ADDRESSES[node],
                    wire_fd=end.fileno(),
                    limit_s=limit_s,
                    memory_mb=memory_mb,
                    environment={**own, **(environment or {})},
                )
            )
        yield specs
    finally:
        for end in ends:
            end.close()
