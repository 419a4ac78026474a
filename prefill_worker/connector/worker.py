"""Worker side: lives where the KV pages are; runs the pushes and obeys the service's control messages."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

import torch

from prefill_worker.connector import pages
from prefill_worker.connector.step import Step
from prefill_worker.control.engine_end import EngineEnd
from prefill_worker.control.messages import DataPlane, Joined, Start
from prefill_worker.push.pieces import Pages
from prefill_worker.push.pools import Pools
from prefill_worker.push.push import Limits
from prefill_worker.push.pusher import Pusher
from prefill_worker.push.totals import Totals
from transport.backends import connect
from transport.backends.base import OnLost, PoolWriter, WriterOptions
from transport.errors import EngineFailed
from transport.messages import Cancel, ClosePool, Message, OpenPool, PoolDescription

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0


class WorkerSide:
    """`layers` are vLLM's attention layers by name (read at save time)."""

    def __init__(self, control_path: str, rank: int, layers: Mapping[str, Any]) -> None:
        self._control_path = control_path
        self._rank = rank
        self._layers = layers
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._control: EngineEnd | None = None
        self._start: Start | None = None
        self._pools: Pools | None = None
        self._pusher: Pusher | None = None
        self._totals = Totals()
        self._started = threading.Event()

    # ---- called by vLLM, in the engine's thread

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Introduce ourselves to the service with the shape of the cache."""
        self._kv_caches = kv_caches
        self._kv = pages.local_kv(kv_caches)
        joined = Joined(part="worker", rank=self._rank, pid=os.getpid(), kv=self._kv)
        self._control = EngineEnd(self._control_path, joined, self._on_message)

    def before_step(self, step: Step) -> None:
        """Blocks of preempted requests are about to be overwritten: their pushes must let go of them."""
        for request_id in step.rewound:
            self._ready_pusher().rewind(request_id)

    def after_step(self, step: Step) -> None:
        """All layers of this step are in the pages now."""
        for item in step.ranges:
            self._ready_pusher().push(item.request_id, item.transfer_id, item.lease, item.blocks)
        for transfer_id in step.cancelled:
            self._ready_pusher().cancel(transfer_id, "the request ended in the engine")

    def collect(self, finished: set[str]) -> set[str]:
        return self._pusher.collect(finished) if self._pusher is not None else set()

    def close(self) -> None:
        if self._pusher is not None:
            self._pusher.close()
        if self._pools is not None:
            self._pools.close()
        if self._control is not None:
            self._control.close()

    def _ready_pusher(self) -> Pusher:
        if self._pusher is None:
            if not self._started.wait(START_TIMEOUT_S):
                raise EngineFailed(f"the service said nothing for {START_TIMEOUT_S:g} s")
            assert self._start is not None
            assert self._pools is not None
            assert self._control is not None
            limits = Limits(
                self._start.hold_ttl_s,
                self._start.push_chunk_bytes,
                threading.Semaphore(self._start.push_threads),
            )
            self._pusher = Pusher(self._pools, self._pages(), limits, self._report)
        return self._pusher

    def _pages(self) -> Pages:
        # Imported here: the kernels load llvmlite, and vLLM's start trips over that module.
        from transport.kernels import cpu

        return Pages(pages.source(self._kv_caches, self._layers), cpu)

    # ---- called by the control channel's threads

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Start):
            self._begin(message)
        elif isinstance(message, Cancel):
            if self._pusher is not None:
                self._pusher.cancel(message.request_id, message.reason or "cancelled")
        elif isinstance(message, OpenPool):
            assert self._pools is not None
            # Connecting can take as long as the peer likes; cancellations must not wait behind it.
            threading.Thread(target=self._pools.add, args=(message.pool,), name="open-pool", daemon=True).start()
        elif isinstance(message, ClosePool):
            assert self._pools is not None
            self._pools.remove(message.worker, message.generation)

    def _begin(self, start: Start) -> None:
        assert self._control is not None
        self._start = start
        self._pools = Pools(self._kv, start.fingerprint, self._connect, self._report)
        self._started.set()

    def _connect(self, pool: PoolDescription, on_lost: OnLost) -> PoolWriter:
        assert self._start is not None
        ready = self._pages()
        ready.kernel.prepare(pool.geometry, ready.source.layout)  # compiles, so that no request waits for it
        options = WriterOptions(self._start.rdma_devices, self._start.push_staging_bytes)
        writer = connect(pool, self._start.writer, self._start.token, on_lost=on_lost, options=options)
        self._totals.add(writer)
        return writer

    def _report(self, message: Message) -> None:
        assert self._control is not None
        self._control.send(message)
        self._control.send(DataPlane(counters=self._totals.counters()))
