"""The decode worker: routers' messages and the data plane's events in, leases and scheduler moved, answers out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from decode_worker.arrivals import Arrivals
from decode_worker.engines.base import Engine
from decode_worker.lease import LeaseLimits, LeaseRecord, LeaseState, Owner
from decode_worker.leases import LeaseTable
from decode_worker.metrics import DecodeMetrics
from decode_worker.pool import KVPool
from decode_worker.reports import Reports
from decode_worker.scheduler import Scheduler
from transport import prefix
from transport.backends.base import Piece, Receiver, ReceiverEvents
from transport.errors import EngineFailed, HawkError, LeaseRevoked, Overloaded, ProtocolError
from transport.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Decode,
    ErrorInfo,
    Failed,
    Hello,
    Message,
    ModelInfo,
    Ping,
    PreemptedNotice,
    Reserve,
    Reserved,
    Status,
    TokenItem,
    Tokens,
    Writer,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerLimits:
    """`status_interval_s`: at most one unasked Status per so many seconds. `stall_s`: an engine step that takes
    longer makes the worker not ready. `relayout_threads`: leases whose landed bytes are checked or moved at once."""

    max_batch: int = 32
    status_interval_s: float = 0.05
    stall_s: float = 60.0
    relayout_threads: int = 1
    leases: LeaseLimits = field(default_factory=LeaseLimits)


class DecodeWorker:
    """Session handler and data-plane event sink of one pool and one engine. Lives in one event loop's thread."""

    def __init__(
        self,
        *,
        name: str,
        generation: str,
        model: ModelInfo,
        eos_ids: frozenset[int],
        pool: KVPool,
        engine: Engine,
        make_receiver: Callable[[ReceiverEvents], Receiver],
        metrics: DecodeMetrics,
        limits: WorkerLimits,
    ) -> None:
        self.name, self.generation, self.model = name, generation, model
        self.pool, self.metrics, self.draining = pool, metrics, False
        self._engine, self._limits = engine, limits
        self.receiver = make_receiver(self)
        self.description = pool.description(name, generation, self.receiver.endpoint, model)
        self.leases = LeaseTable(
            pool.blocks,
            self.receiver,
            worker=name,
            generation=generation,
            block_size=pool.geometry.block_size,
            max_model_len=model.max_model_len,
            limits=limits.leases,
            on_failed=self._failed,
            on_free=self._on_free,
            staging=pool.staging,
            staging_room=pool.staging_room,
        )
        self.scheduler = Scheduler(
            engine,
            self.leases,
            max_batch=limits.max_batch,
            max_model_len=model.max_model_len,
            eos_ids=eos_ids,
            root=prefix.root_hash(model.fingerprint, pool.geometry.dtype),
            emit=self._emit,
            on_preempt=self._on_preempt,
            on_step=self._on_step,
        )
        metrics.watch(self.leases, self.scheduler, pool.device)
        self._reports = Reports(pool.blocks, self.status, limits.status_interval_s)
        self._arrivals = Arrivals(
            pool, self.leases, self.receiver, metrics, self._land, threads=limits.relayout_threads
        )
        self._empty = asyncio.Event()
        self._broken: str | None = None

    # ---- life

    async def start(self) -> None:
        """Open the data plane."""
        await self.receiver.start()

    async def run(self) -> None:
        """Serve until cancelled. Raises EngineFailed when the worker is of no use any more; all its requests
        have been told so by then."""
        parts = [
            asyncio.create_task(part, name=name)
            for name, part in (
                ("scheduler", self.scheduler.run()),
                ("reaper", self.leases.reap_forever()),
                ("status", self._reports.run()),
            )
        ]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            ended = next(iter(done))
            cause = ended.exception()
            log.error("%s failed", ended.get_name(), exc_info=cause)
            raise self._break(f"{ended.get_name()}: {type(cause).__name__}: {cause}") from cause
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def drain(self) -> None:
        """Take no new reservation, and return once every lease is back."""
        self.draining = True
        self._reports.send_status()
        while len(self.leases):
            self._empty.clear()
            await self._empty.wait()

    async def close(self, timeout_s: float = 2.0) -> None:
        """End all leases and release everything; call it when `run` has ended."""
        await asyncio.get_running_loop().run_in_executor(None, self.scheduler.close)
        with contextlib.suppress(asyncio.TimeoutError):  # a writer that does not answer ends with the data plane
            await asyncio.wait_for(self.leases.close(), timeout_s)
        await self._arrivals.close()
        await self.receiver.close()
        self._engine.close()
        self.pool.close()

    # ---- what we are

    def ready(self) -> str | None:
        """None, or why no request should come here now."""
        if self._broken is not None:
            return self._broken
        if self.draining:
            return "draining"
        if (seconds := self.scheduler.stepping_for) > self._limits.stall_s:
            return f"the engine has been in one step for {seconds:.0f} s"
        return self.receiver.ready()

    def status(self) -> Status:
        return Status(
            ready=self.ready() is None,
            draining=self.draining,
            running=self.scheduler.running,
            waiting=self.scheduler.waiting,
            free_blocks=self.leases.admissible,
            total_blocks=self.pool.blocks.total,
        )

    def hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            role="decode",
            worker=self.name,
            generation=self.generation,
            model=self.model,
            pool=self.description,
            status=self.status(),
        )

    def info(self) -> dict[str, object]:
        """The JSON of /v1/info."""
        return self.hello().model_dump(mode="json")

    # ---- sessions

    async def on_open(self, session: Owner) -> None:
        self._reports.join(session)

    async def on_close(self, session: Owner) -> None:
        self._reports.leave(session)
        self.leases.close_owner(session)
        self.scheduler.wake()

    async def on_message(self, session: Owner, message: Message | Tokens) -> None:
        try:
            self._handle(session, message)
        except HawkError as error:
            self.metrics.failures.labels(error.code).inc()
            raise

    def _handle(self, session: Owner, message: Message | Tokens) -> None:
        if isinstance(message, Ping):
            self.leases.refresh(session)
        elif isinstance(message, Reserve):
            if (reason := self.ready()) is not None:
                raise Overloaded(f"decode worker {self.name} takes no request: {reason}")
            lease = self.leases.reserve(session, message)
            session.send(Reserved(request_id=message.request_id, lease=lease))
            self._reports.due()
        elif isinstance(message, Decode):
            self._decode(session, message)
        elif isinstance(message, Cancel):
            found = self.leases.of_request(session, message.request_id)
            if found is None:
                self.metrics.unknown.labels("Cancel").inc()
            else:
                self.leases.finish(found, "cancelled")
                self.scheduler.wake()
        else:
            raise ProtocolError(f"a decode worker takes no {type(message).__name__}")

    def _decode(self, session: Owner, message: Decode) -> None:
        lease = self.leases.get(message.lease_id)
        ended = lease is None or lease.state in (LeaseState.FENCING, LeaseState.FREED)
        if lease is None or ended or lease.owner is not session or lease.request_id != message.request_id:
            self.metrics.unknown.labels("Decode").inc()
            if not self.leases.was_here(message.lease_id):
                raise LeaseRevoked(f"lease {message.lease_id} is not held by request {message.request_id} here")
            return  # its end was said already, and crossed this message
        if lease.decode is not None:
            self.metrics.unknown.labels("Decode").inc()
            return
        if message.token_id >= self.model.vocab_size:
            self.leases.finish(lease, "refused")
            raise ProtocolError(f"token {message.token_id} is outside the vocabulary of {self.model.vocab_size}")
        lease.decode = message
        if lease.state is LeaseState.LANDED:
            self.scheduler.start(lease, message)

    # ---- the data plane's events

    def announced(self, lease_id: str, piece: Piece) -> None:
        self._arrivals.announced(lease_id, piece)

    def landed(self, lease_id: str) -> None:
        lease = self.leases.written(lease_id)
        if lease is not None:
            self._arrivals.landed(lease)

    def push_failed(self, lease_id: str, reason: str) -> None:
        self.leases.push_failed(lease_id, reason)

    def writer_joined(self, writer: Writer) -> None:
        log.info("writer %s/%s connected", writer.worker, writer.generation)

    def writer_lost(self, writer: Writer) -> None:
        log.warning("writer %s/%s is gone", writer.worker, writer.generation)
        self.leases.writer_lost(writer)

    def _land(self, lease: LeaseRecord) -> None:
        self.pool.device.barrier()
        self.leases.land(lease)
        if lease.state is not LeaseState.LANDED:
            return  # ended meanwhile
        self.metrics.landed_seconds.observe(self.leases.age(lease))
        self.metrics.landing_seconds.observe(self.leases.since_written(lease))
        self._reports.due()
        if lease.decode is not None:
            self.scheduler.start(lease, lease.decode)

    # ---- answers

    def _emit(self, owner: Owner, items: list[TokenItem]) -> None:
        self.metrics.tokens.inc(sum(len(item.token_ids) for item in items))
        owner.send(Tokens(items))

    def _failed(self, lease: LeaseRecord, error: HawkError) -> None:
        self.metrics.failures.labels(error.code).inc()
        lease.owner.send(Failed(request_id=lease.request_id, error=ErrorInfo.of(error)))
        self.scheduler.wake()

    def _on_preempt(self, lease: LeaseRecord) -> None:
        self.metrics.preemptions.inc()
        lease.owner.send(PreemptedNotice(request_id=lease.request_id))

    def _on_step(self, rows: int, seconds: float) -> None:
        self.metrics.steps.inc()
        self.metrics.step_seconds.observe(seconds)
        self.metrics.batch_rows.observe(rows)
        self._reports.due()

    def _on_free(self) -> None:
        self._reports.due()
        self._empty.set()
        self.scheduler.wake()

    def _break(self, reason: str) -> EngineFailed:
        self._broken = reason
        error = EngineFailed(f"decode worker {self.name}: {reason}")
        for lease in self.leases.live():
            self.leases.fail(lease, error)
        self._reports.send_status()
        return error
