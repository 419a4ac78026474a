"""The decode workers' pools this process may write: checked once, then connected for as long as they live."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from prefill_worker.control.messages import LocalKV
from transport.backends.base import LeaseWriter, OnLost, PoolWriter
from transport.errors import GeometryMismatch, HawkError, PushFailed, StaleGeneration, UnknownPool
from transport.messages import ErrorInfo, Lease, Message, PoolDescription, PoolOpened, PoolRefused

log = logging.getLogger(__name__)

Connect = Callable[[PoolDescription, OnLost], PoolWriter]
"""(pool, called once when it goes away later) → its connection."""


def check_pool(pool: PoolDescription, kv: LocalKV, fingerprint: str) -> None:
    """Raises GeometryMismatch, naming both values, unless KV computed here means the same there."""
    if pool.model.fingerprint != fingerprint:
        raise GeometryMismatch(
            f"decode worker {pool.worker} serves another model: its fingerprint is {pool.model.fingerprint}, "
            f"ours {fingerprint}"
        )
    geometry = pool.geometry
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        theirs, ours = getattr(geometry, name), getattr(kv, name)
        if theirs != ours:
            raise GeometryMismatch(f"decode worker {pool.worker} has {name} {theirs}, ours is {ours}")
    channels = geometry.num_channels if pool.kv_path == "hawk" else len(pool.channels)  # else out of our reach
    if len(pool.bases) != geometry.num_tensors or len(pool.channels) != channels:
        raise GeometryMismatch(
            f"decode worker {pool.worker} describes {len(pool.bases)} tensors in {len(pool.channels)} channels, its "
            f"geometry says {geometry.num_tensors} in {geometry.num_channels}"
        )
    if (pool.staging is None) != (pool.kv_path == "hawk"):
        raise GeometryMismatch(f"decode worker {pool.worker}: its staging does not go with kv_path {pool.kv_path}")
    if pool.staging_dtype not in (None, kv.dtype):
        raise GeometryMismatch(f"decode worker {pool.worker} stages {pool.staging_dtype}, our KV is {kv.dtype}")


class Pools:
    """Thread-safe. Says `PoolOpened` or `PoolRefused`, and `PoolRefused` again when an open pool is lost."""

    def __init__(
        self,
        kv: LocalKV,
        fingerprint: str,
        connect: Connect,
        report: Callable[[Message], None],
    ) -> None:
        self._kv = kv
        self._fingerprint = fingerprint
        self._connect = connect
        self._report = report
        self._lock = threading.Lock()
        self._open: dict[str, tuple[PoolDescription, PoolWriter]] = {}

    def add(self, pool: PoolDescription) -> None:
        """Check and connect; replaces an older generation of the same worker. Blocks while connecting."""
        try:
            check_pool(pool, self._kv, self._fingerprint)
            writer = self._connect(pool, lambda reason: self._lost(pool, reason))
        except Exception as error:
            if not isinstance(error, HawkError):
                log.exception("pool of %s refused", pool.worker)
                error = PushFailed(f"cannot connect to {pool.worker}: {type(error).__name__}: {error}")
            self._report(_refused(pool, error))
            return
        with self._lock:
            _, old = self._open.get(pool.worker, (None, None))
            self._open[pool.worker] = (pool, writer)
        if old is not None:
            old.close()
        self._report(PoolOpened(worker=pool.worker, generation=pool.generation))
        if not writer.alive:  # lost before it was known here
            self._lost(pool, "the connection broke at once")

    def remove(self, worker: str, generation: str) -> None:
        """The decode worker is gone; its leases count as aborted. Unknown pools are ignored."""
        writer = self._take(worker, generation)
        if writer is not None:
            writer.close()

    def open(self, lease: Lease) -> tuple[PoolDescription, LeaseWriter]:
        """Begin to write a lease. Raises UnknownPool, StaleGeneration, LeaseRevoked, PushFailed."""
        with self._lock:
            entry = self._open.get(lease.worker)
        if entry is None:
            raise UnknownPool(f"the pool of decode worker {lease.worker} is not open here")
        pool, writer = entry
        if pool.generation != lease.generation:
            raise StaleGeneration(
                f"lease {lease.id} is of generation {lease.generation} of {lease.worker}, the open one is "
                f"{pool.generation}"
            )
        return pool, writer.open(lease)

    def close(self) -> None:
        with self._lock:
            entries = list(self._open.values())
            self._open.clear()
        for _, writer in entries:
            writer.close()

    def _take(self, worker: str, generation: str) -> PoolWriter | None:
        with self._lock:
            entry = self._open.get(worker)
            if entry is None or entry[0].generation != generation:
                return None
            del self._open[worker]
            return entry[1]

    def _lost(self, pool: PoolDescription, reason: str) -> None:
        writer = self._take(pool.worker, pool.generation)
        if writer is not None:
            writer.close()
            self._report(_refused(pool, PushFailed(f"lost the decode worker {pool.worker}: {reason}")))


def _refused(pool: PoolDescription, error: HawkError) -> PoolRefused:
    log.warning("pool of %s refused: %s", pool.worker, error)
    return PoolRefused(worker=pool.worker, generation=pool.generation, error=ErrorInfo.of(error))
