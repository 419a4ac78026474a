"""All pushes of one worker rank, by the engine's request ids."""

from __future__ import annotations

import threading
from collections.abc import Callable

from prefill_worker.push.pieces import Pages
from prefill_worker.push.pools import Pools
from prefill_worker.push.push import BlockRange, Limits, Push
from transport.messages import Lease, Message


class Pusher:
    """`push`, `rewind` and `collect` are called by the engine's thread, `cancel` by any.

    A push lives here from its first range until `collect` has told the engine that its blocks are free.
    """

    def __init__(self, pools: Pools, pages: Pages, limits: Limits, report: Callable[[Message], None]) -> None:
        self._pools = pools
        self._pages = pages
        self._limits = limits
        self._report = report
        self._lock = threading.Lock()
        self._pushes: dict[str, Push] = {}
        self._by_transfer: dict[str, Push] = {}
        self._finished: set[str] = set()

    def push(self, request_id: str, transfer_id: str, lease: Lease, blocks: BlockRange) -> None:
        """The next range of a request; the first one begins its push."""
        with self._lock:
            push = self._pushes.get(request_id)
            if push is None:
                push = Push(transfer_id, lease, self._pools, self._pages, self._limits, self._report)
                self._pushes[request_id] = self._by_transfer[transfer_id] = push
        push.add(blocks)

    def rewind(self, request_id: str) -> None:
        """The engine takes the request's blocks back (preemption); returns when none is being read."""
        with self._lock:
            push = self._pushes.get(request_id)
        if push is not None:
            push.rewind()

    def cancel(self, transfer_id: str, reason: str) -> None:
        with self._lock:
            push = self._by_transfer.get(transfer_id)
        if push is not None:
            push.cancel(reason)

    def collect(self, finished: set[str]) -> set[str]:
        """Requests whose blocks may be freed; `finished`: those that ended in the engine since the last call.

        A request is returned once, and only after it was in `finished`.
        """
        with self._lock:
            self._finished |= finished & self._pushes.keys()
            free = {request_id for request_id in self._finished if self._pushes[request_id].released}
            self._finished -= free
            for request_id in free:
                del self._by_transfer[self._pushes.pop(request_id).transfer_id]
        return free

    def close(self, timeout_s: float = 2.0) -> None:
        """Give up all pushes; returns when their threads have ended, or after `timeout_s` each."""
        with self._lock:
            pushes = list(self._pushes.values())
        for push in pushes:
            push.cancel("the prefill worker is shutting down")
        for push in pushes:
            push.join(timeout_s)
