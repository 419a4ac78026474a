"""From a writer's announcements to KV in the lease's blocks: pieces in their order, landed once all of them are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor

from decode_worker.coverage import Coverage
from decode_worker.lease import Inbound, LeaseRecord, LeaseState
from decode_worker.leases import LeaseTable
from decode_worker.metrics import DecodeMetrics
from decode_worker.pool import KVPool
from decode_worker.relayout import Relayout, Target
from transport.backends.base import Piece, Receiver
from transport.errors import ChecksumMismatch, HawkError, ProtocolError
from transport.geometry.kv import TILE
from transport.geometry.staging import linear_bytes

log = logging.getLogger(__name__)


class Arrivals:
    """The data plane's events about pieces and landings; all of it runs in the event loop's thread, the bytes are
    looked at and moved in `threads` threads.

    A lease is pinned while a thread may touch its blocks or slots. `on_placed(lease)`: all of it is in its blocks.
    """

    def __init__(
        self,
        pool: KVPool,
        leases: LeaseTable,
        receiver: Receiver,
        metrics: DecodeMetrics,
        on_placed: Callable[[LeaseRecord], None],
        threads: int = 1,
    ) -> None:
        self._pool, self._leases, self._receiver, self._metrics = pool, leases, receiver, metrics
        self._on_placed = on_placed
        self._relayout = Relayout(pool)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="relayout")
        self._tasks: set[asyncio.Task[None]] = set()
        self._staged = pool.kv_path == "host"
        self._counted = self._staged or pool.checksum

    def announced(self, lease_id: str, piece: Piece) -> None:
        lease = self._leases.progress(lease_id)
        if lease is None:
            self._leases.counts.late["announced"] += 1
            return
        self._metrics.pieces.inc()
        if not self._counted:
            return
        inbound = self._of(lease)
        try:
            begun_anew = inbound.coverage.add(piece)
            self._check(lease, inbound, piece)
        except ProtocolError as error:
            self._leases.fail(
                lease,
                ProtocolError(
                    f"lease {lease_id}: {lease.writer.worker} announced tokens [{piece.start}, {piece.stop}) of "
                    f"tensors {piece.first_tensor}…{piece.last_tensor}: {error}"
                ),
            )
            return
        if begun_anew and not self._staged:
            inbound.pieces.clear()  # what they have brought is overwritten
        inbound.announced += 1
        inbound.pieces.append(piece)
        if self._staged and not inbound.placing:
            inbound.placing = True
            self._start(lease, self._place(lease, inbound))

    def landed(self, lease: LeaseRecord) -> None:
        """The writer is done with the lease, which has not ended."""
        inbound = self._of(lease)
        if self._counted and (missing := inbound.coverage.missing):
            error = f"lease {lease.id}: {lease.writer.worker} completed it, but never announced {missing} of the "
            total = f"{inbound.coverage.total} rows of {TILE} tokens that it has over all tensors"
            self._leases.fail(lease, ProtocolError(error + total))
            return
        inbound.landed = True
        if self._staged:
            if not inbound.placing:
                self._on_placed(lease)
        elif self._pool.checksum or self._pool.kv_path in ("contiguous", "relay"):
            self._start(lease, self._finish(lease, inbound))
        else:
            self._on_placed(lease)

    async def close(self) -> None:
        """Call it when all leases have ended: what is in hand is finished, the rest dropped."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._executor.shutdown(wait=True)

    # ---- inside

    def _of(self, lease: LeaseRecord) -> Inbound:
        if lease.inbound is None:
            tensors = self._pool.geometry.num_tensors if self._counted else 0
            lease.inbound = Inbound(Coverage(lease.resident_tokens, lease.prompt_tokens, tensors))
        return lease.inbound

    def _check(self, lease: LeaseRecord, inbound: Inbound, piece: Piece) -> None:
        """Raises ProtocolError for what `Coverage` does not see."""
        regions = len(self._pool.handed_out()) if self._pool.checksum else 0
        if len(piece.digests) != regions:
            raise ProtocolError(f"{len(piece.digests)} digests, expected {regions}")
        if not self._staged or lease.staging is None:
            return
        if inbound.announced - inbound.placed >= lease.staging.count:
            raise ProtocolError(f"all of its {lease.staging.count} staging slots are still full")
        tensors = piece.last_tensor + 1 - piece.first_tensor
        length = linear_bytes(self._pool.geometry, self._pool.source_dtype, piece.start, piece.stop, tensors)
        if length > lease.staging.slot_bytes:
            raise ProtocolError(f"its {length} bytes are more than a staging slot's {lease.staging.slot_bytes}")

    def _start(self, lease: LeaseRecord, work: Coroutine[None, None, None]) -> None:
        self._leases.pin(lease)
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _place(self, lease: LeaseRecord, inbound: Inbound) -> None:
        """kv_path host: one piece after the other, so that one that comes again comes after itself."""
        loop, target = asyncio.get_running_loop(), _target(lease)
        try:
            while inbound.pieces and _live(lease):
                piece = inbound.pieces.popleft()
                await loop.run_in_executor(self._executor, self._relayout.place, target, inbound.placed, piece)
                inbound.placed += 1
                if lease.granted:
                    self._receiver.drained(lease.id)
            inbound.placing = False
            if inbound.landed and _live(lease):
                self._on_placed(lease)
        except Exception as error:
            self._failed(lease, error)
        finally:
            inbound.placing = False
            self._leases.unpin(lease)

    async def _finish(self, lease: LeaseRecord, inbound: Inbound) -> None:
        """kv_path hawk with checksums, relay, or contiguous: all has landed."""

        def work() -> None:
            if not _live(lease):  # it ended while the threads were busy with others
                return
            if self._pool.checksum:
                self._relayout.check(target, pieces)
            if target.staging is not None:
                self._relayout.scatter(target)
            elif self._pool.mirror is not None:
                copied = self._relayout.relay(target, lambda: _live(lease))
                self._metrics.relayed_bytes.inc(copied)

        target, pieces = _target(lease), list(inbound.pieces)
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, work)
            if _live(lease):
                self._on_placed(lease)
        except Exception as error:
            self._failed(lease, error)
        finally:
            self._leases.unpin(lease)

    def _failed(self, lease: LeaseRecord, error: Exception) -> None:
        if isinstance(error, ChecksumMismatch):
            log.error("%s", error)
            self._metrics.checksum_failures.inc()
            self._leases.corrupt(lease, error)
        elif _live(lease):
            log.exception("KV of lease %s could not be put into its blocks", lease.id, exc_info=error)
            self._leases.fail(lease, HawkError(f"KV that had landed could not be moved into its blocks: {error}"))


def _live(lease: LeaseRecord) -> bool:
    return lease.state in (LeaseState.RESERVED, LeaseState.WRITING)


def _target(lease: LeaseRecord) -> Target:
    return Target(
        lease.id,
        lease.writer.worker,
        list(lease.blocks),
        lease.prompt_tokens,
        lease.resident_tokens,
        lease.staging,
    )
