"""The file descriptors of event queues that older pyverbs opens and does not tell about."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from transport.errors import ConfigurationError

_EVENTS = "anon_inode:[infinibandevent]"
_TRIES = 10
_lock = threading.Lock()


def create_with_descriptor(create: Callable[[], Any]) -> tuple[Any, int]:
    """Call `create`, which opens one event queue, and say which descriptor that is: made non-blocking.

    pyverbs before 57 shows none, so it is the one that appeared meanwhile. Another library in this process may
    open one in the same moment (NCCL, UCX); then both are candidates, and it is tried again.
    """
    with _lock:
        for _ in range(_TRIES):
            before = _event_queues()
            made = create()
            fd = getattr(made, "fd", None)
            if fd is None:
                new = _event_queues() - before
                if len(new) != 1:
                    made.close()
                    continue
                fd = new.pop()
            os.set_blocking(fd, False)
            return made, fd
    raise ConfigurationError(
        f"the NIC's event descriptor could not be told apart from others in {_TRIES} tries: something in this "
        "process keeps opening RDMA devices"
    )


def _event_queues() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own descriptor is closed by now
            if os.readlink(f"/proc/self/fd/{name}") == _EVENTS:
                found.add(int(name))
    return found
