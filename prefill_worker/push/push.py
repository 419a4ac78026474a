"""One lease's push: a thread that writes block ranges in order, completes, and can be stopped between pieces."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from prefill_worker.push.pieces import Pages, Piece, PieceWriter
from prefill_worker.push.pools import Pools
from transport.backends.base import LeaseWriter
from transport.errors import HawkError, PushFailed
from transport.messages import ErrorInfo, Failed, Lease, Message, PoolDescription, Pushed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Tokens [start, stop) of a request whose whole block table is `blocks`; `last` ends the prompt.

    `start` is a multiple of 32; so is `stop`, but at the prompt's end. Empty only if all is resident.
    """

    start: int
    stop: int
    blocks: Sequence[int]
    last: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """How pushes share the process. `slots`: those that copy at the same time."""

    ttl_s: float
    chunk_bytes: int
    slots: threading.Semaphore


class _Stopped(Exception):
    """The push was cancelled."""


class Push:
    """States: writing → completing → done; `cancel` ends it in any of them.

    The engine's blocks may be reused once `released` is true: the lease is complete or given up, and no page is
    being read. Each wait of the thread is bounded by `limits.ttl_s`, but the one for the engine's next range.
    """

    def __init__(
        self,
        transfer_id: str,
        lease: Lease,
        pools: Pools,
        pages: Pages,
        limits: Limits,
        report: Callable[[Message], None],
    ) -> None:
        self.transfer_id = transfer_id
        self.lease = lease
        self._pools = pools
        self._pages = pages
        self._limits = limits
        self._report = report
        self._changed = threading.Condition()
        self._ranges: deque[BlockRange] = deque()
        self._epoch = 0
        self._reading = False
        self._reason: str | None = None
        self._waiting: LeaseWriter | None = None
        """Waits for the decode worker now, and reads no page: a cancellation aborts it at once."""
        self._done = False
        self._bytes = 0
        self._thread = threading.Thread(target=self._run, name=f"push-{transfer_id}", daemon=True)
        self._thread.start()

    # ---- called by the engine's threads

    def add(self, blocks: BlockRange) -> None:
        """Queue the next range; its pages are complete now and stay until `released`."""
        with self._changed:
            self._ranges.append(blocks)
            self._changed.notify_all()

    def rewind(self) -> None:
        """The engine is about to reuse the pages: forget what is queued; returns when no page is being read.

        The ranges will come again, from the start. Pieces that the decode worker was told of are written once more:
        it sees from the first of them that the push begins anew.
        """
        with self._changed:
            self._ranges.clear()
            self._epoch += 1
            self._changed.wait_for(lambda: not self._reading)

    def cancel(self, reason: str) -> None:
        """Stop after the piece in hand and give the lease up. Idempotent; nothing is reported."""
        with self._changed:
            if self._reason is not None:
                return
            self._reason = reason
            self._changed.notify_all()
            waiting = self._waiting
        if waiting is not None:
            waiting.abort(reason)

    @property
    def released(self) -> bool:
        with self._changed:
            return self._done or (self._reason is not None and not self._reading)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    # ---- the thread

    def _run(self) -> None:
        started = time.monotonic()
        writer: LeaseWriter | None = None
        outcome: Pushed | Failed | None = None
        try:
            pool, writer = self._pools.open(self.lease)
            self._write_all(pool, writer)
            self._complete(writer)
            seconds = time.monotonic() - started
            outcome = Pushed(request_id=self.transfer_id, lease_id=self.lease.id, bytes=self._bytes, seconds=seconds)
        except _Stopped:
            log.debug("push %s cancelled: %s", self.transfer_id, self._reason)
        except Exception as error:
            if self._reason is None:  # else it is how a cancelled `complete` ends
                outcome = self._failed(error)
        if writer is not None and not isinstance(outcome, Pushed):
            writer.abort(outcome.error.message if outcome is not None else self._reason or "cancelled")
        with self._changed:
            self._done = True
            if outcome is not None and self._reason is None:
                self._report(outcome)

    def _write_all(self, pool: PoolDescription, writer: LeaseWriter) -> None:
        pieces = PieceWriter(writer, pool, self.lease, self._pages)
        last = False
        while not last:
            epoch, blocks = self._next()
            last = all(
                self._write(epoch, writer, pieces, blocks.blocks, piece)
                for piece in pieces.split(blocks.start, blocks.stop, self._limits.chunk_bytes)
            )
            last = last and blocks.last

    def _next(self) -> tuple[int, BlockRange]:
        with self._changed:
            self._changed.wait_for(lambda: self._ranges or self._reason is not None)
            if self._reason is not None:
                raise _Stopped
            return self._epoch, self._ranges.popleft()

    def _write(self, epoch: int, writer: LeaseWriter, pieces: PieceWriter, blocks: Sequence[int], piece: Piece) -> bool:
        """False when the range was taken back by `rewind` before the piece was written."""
        with self._abortable(writer):
            pieces.wait_for_room(self._limits.ttl_s)
        if not self._limits.slots.acquire(timeout=self._limits.ttl_s):
            raise PushFailed(f"no turn to copy within {self._limits.ttl_s:g} s")
        try:
            with self._changed:
                if self._reason is not None:
                    raise _Stopped
                if epoch != self._epoch:
                    return False
                self._reading = True
            try:
                self._bytes += pieces.write(blocks, piece)
            finally:
                with self._changed:
                    self._reading = False
                    self._changed.notify_all()
        finally:
            self._limits.slots.release()
        return True

    def _complete(self, writer: LeaseWriter) -> None:
        with self._abortable(writer):
            writer.complete(self._limits.ttl_s)

    @contextmanager
    def _abortable(self, writer: LeaseWriter) -> Iterator[None]:
        """Around waiting for the decode worker."""
        with self._changed:
            if self._reason is not None:
                raise _Stopped
            self._waiting = writer
        try:
            yield
        finally:
            with self._changed:
                self._waiting = None

    def _failed(self, error: Exception) -> Failed:
        """`PushFailed` with the cause in words; what is already more precise (a revoked lease, …) stays."""
        if not isinstance(error, HawkError):
            log.exception("push %s failed", self.transfer_id)
            error = PushFailed(f"{type(error).__name__}: {error}")
        log.warning("push %s into lease %s of %s failed: %s", self.transfer_id, self.lease.id, self.lease.worker, error)
        return Failed(request_id=self.transfer_id, error=ErrorInfo.of(error))
