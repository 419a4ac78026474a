"""The prefill service: each request from its `Prefill` to its last message, over any number of routers' sessions."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from dataclasses import dataclass
from typing import Protocol

from prefill_worker.control.messages import DataPlane, Held
from prefill_worker.engine import Handover
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.pool_table import PoolTable
from prefill_worker.sampling import Sampled
from transport.errors import (
    ContextLengthExceeded,
    EngineFailed,
    HawkError,
    InvalidRequest,
    Overloaded,
    ProtocolError,
)
from transport.messages import (
    PROTOCOL_VERSION,
    Cancel,
    ClosePool,
    ErrorInfo,
    Failed,
    Hello,
    Message,
    ModelInfo,
    OpenPool,
    Ping,
    PoolOpened,
    PoolRefused,
    Prefill,
    Prefilled,
    Pushed,
    Sampling,
    Status,
    Tokens,
    Writer,
)
from transport.session.server import Session

log = logging.getLogger(__name__)


class PrefillEngine(Protocol):
    """What the service needs of `prefill_worker.engine.Engine`."""

    async def prefill(
        self, request_id: str, token_ids: tuple[int, ...], sampling: Sampling, handover: Handover | None
    ) -> Sampled: ...

    @property
    def failed(self) -> bool: ...


class Control(Protocol):
    """The way to the process that pushes."""

    def send(self, message: Message) -> None: ...


@dataclass(slots=True, eq=False)
class Request:
    """queued/running in the engine (`task` not done) → pushing → gone. `pushed` is kept until `Prefilled` is out."""

    session: Session
    prefill: Prefill
    transfer_id: str
    task: asyncio.Task[None] | None = None
    prefilled: bool = False
    pushed: Pushed | None = None

    @property
    def id(self) -> str:
        return self.prefill.request_id


class PrefillService:
    """Implements `SessionHandler`. All methods run in the event loop's thread."""

    def __init__(
        self,
        worker: Writer,
        model: ModelInfo,
        engine: PrefillEngine,
        control: Control,
        metrics: PrefillMetrics,
        *,
        max_queued: int,
        stall_s: float,
    ) -> None:
        self.worker = worker
        self.model = model
        self.draining = False
        self._engine = engine
        self._control = control
        self._metrics = metrics
        self._max_queued = max_queued
        self._stall_s = stall_s
        self._heard = time.monotonic()
        self._pools = PoolTable(control.send)
        self._requests: dict[tuple[int, str], Request] = {}
        self._transfers: dict[str, Request] = {}
        self._numbers = itertools.count(1)
        self._idle = asyncio.Event()
        self._idle.set()
        self._failure: str | None = None
        self.failed = asyncio.Event()
        metrics.outstanding_tokens.set_function(lambda: self.status().outstanding_tokens)
        metrics.unprefilled.set_function(lambda: sum(not r.prefilled for r in self._requests.values()))
        metrics.pushing.set_function(lambda: sum(r.prefilled for r in self._requests.values()))
        metrics.open_pools.set_function(lambda: self._pools.open_count)

    # ---- what sessions see

    def hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            role="prefill",
            worker=self.worker.worker,
            generation=self.worker.generation,
            model=self.model,
            status=self.status(),
        )

    def status(self) -> Status:
        waiting = [r for r in self._requests.values() if not r.prefilled]
        return Status(
            ready=self.unready_reason() is None,
            draining=self.draining,
            running=len(waiting),
            outstanding_tokens=sum(len(r.prefill.token_ids) for r in waiting),
        )

    def unready_reason(self) -> str | None:
        if self._failure is not None or self._engine.failed:
            return self._failure or "the prefill engine died"
        silence = time.monotonic() - self._heard
        if silence > self._stall_s and any(not r.prefilled for r in self._requests.values()):
            return f"the prefill engine has made no step for {silence:.0f} s"
        return "draining" if self.draining else None

    async def on_open(self, session: Session) -> None:
        log.info("router %s attached", session.router)

    async def on_message(self, session: Session, message: Message | Tokens) -> None:
        if isinstance(message, Prefill):
            self._begin(session, message)
        elif isinstance(message, Cancel):
            self._cancel(session, message)
        elif isinstance(message, OpenPool):
            self._pools.ask(session, message.pool)
        elif isinstance(message, ClosePool):
            self._pools.leave(session, message.worker, message.generation)
        elif not isinstance(message, Ping):
            raise ProtocolError(f"a prefill worker takes no {type(message).__name__}")

    async def on_close(self, session: Session) -> None:
        gone = [request for request in self._requests.values() if request.session is session]
        for request in gone:
            self._abort(request, "its router is gone")
        self._pools.leave_all(session)
        log.info("router %s is gone; %d requests dropped", session.router, len(gone))

    async def drain(self) -> None:
        """Take no new requests and wait until those that run have ended, pushes included."""
        self.draining = True
        await self._idle.wait()

    # ---- what the engine says

    def on_engine_message(self, message: Message) -> None:
        self._heard = time.monotonic()
        if isinstance(message, Held):
            self._metrics.held_requests.set(message.requests)
            self._metrics.held_blocks.set(message.blocks)
        elif isinstance(message, DataPlane):
            self._metrics.data_plane = message.counters
        elif isinstance(message, (PoolOpened, PoolRefused)):
            self._pools.answer(message)
        elif isinstance(message, (Pushed, Failed)):
            self._push_ended(message)

    def engine_lost(self, reason: str) -> None:
        """Every request fails, and nothing is accepted any more; the process is to be restarted."""
        if self._failure is not None:
            return
        log.error("engine lost: %s", reason)
        self._failure = reason
        for request in list(self._requests.values()):
            self._fail(request, EngineFailed(f"the prefill engine died: {reason}"))
        self.failed.set()

    # ---- one request

    def _begin(self, session: Session, message: Prefill) -> None:
        try:
            self._check(session, message)
        except HawkError as error:
            self._metrics.failures.labels(error.code).inc()
            raise
        self._metrics.requests.inc()
        if all(r.prefilled for r in self._requests.values()):
            self._heard = time.monotonic()  # an idle engine has nothing to say
        request = Request(session, message, f"t{next(self._numbers)}")
        self._requests[session.id, message.request_id] = request
        self._transfers[request.transfer_id] = request
        self._idle.clear()
        request.task = asyncio.create_task(self._prefill(request))

    def _check(self, session: Session, message: Prefill) -> None:
        """Raises what the client or the router did wrong, before any work is done."""
        if self._failure is not None or self._engine.failed:
            raise EngineFailed(f"the prefill engine died: {self._failure or 'no answer'}")
        if self.draining:
            raise Overloaded("this prefill worker is shutting down")
        if sum(not r.prefilled for r in self._requests.values()) >= self._max_queued:
            raise Overloaded(f"{self._max_queued} requests are waiting for this prefill worker")
        if (session.id, message.request_id) in self._requests:
            raise ProtocolError(f"request {message.request_id} is already running here")
        count = len(message.token_ids)
        if not count:
            raise InvalidRequest("the prompt is empty")
        if count >= self.model.max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {count} tokens; with one token to generate, at most "
                f"{self.model.max_model_len - 1} fit the model's context of {self.model.max_model_len}"
            )
        for name, tokens in (("prompt", message.token_ids), ("stop_token_ids", message.sampling.stop_token_ids)):
            if tokens and max(tokens) >= self.model.vocab_size:
                raise InvalidRequest(
                    f"{name}: token id {max(tokens)} is outside the vocabulary of {self.model.vocab_size}"
                )
        if message.lease is not None:
            self._pools.check(message.lease, count)

    async def _prefill(self, request: Request) -> None:
        message = request.prefill
        # A request for one token has nothing to hand over, whatever was leased for it.
        lease = message.lease if message.sampling.max_tokens > 1 else None
        handover = Handover(request.transfer_id, lease) if lease is not None else None
        try:
            sampled = await self._engine.prefill(request.transfer_id, message.token_ids, message.sampling, handover)
        except HawkError as error:
            self._fail(request, error)
            return
        except Exception as error:
            log.exception("request %s failed", request.id)
            self._fail(request, EngineFailed(f"{type(error).__name__}: {error}"))
            return
        request.prefilled = True
        self._count(request, sampled)
        request.session.send(_prefilled(request.id, sampled))
        if handover is None or sampled.finish_reason is not None:
            self._forget(request)  # the connector gives up the push of a request that its first token ended
        elif request.pushed is not None:
            self._acknowledge(request, request.pushed)

    def _cancel(self, session: Session, message: Cancel) -> None:
        request = self._requests.get((session.id, message.request_id))
        if request is None:
            self._metrics.unknown.labels("Cancel").inc()
            return
        self._abort(request, message.reason or "cancelled by the router")

    def _abort(self, request: Request, reason: str) -> None:
        self._metrics.aborts.inc()
        self._drop(request, reason)

    def _fail(self, request: Request, error: HawkError) -> None:
        self._metrics.failures.labels(error.code).inc()
        self._drop(request, error.message)
        request.session.send(Failed(request_id=request.id, error=ErrorInfo.of(error)))

    def _drop(self, request: Request, reason: str) -> None:
        """End engine work and push in whatever state they are."""
        self._forget(request)
        if request.prefill.lease is not None:
            self._control.send(Cancel(request_id=request.transfer_id, reason=reason))
        if request.task is not None and request.task is not asyncio.current_task():
            request.task.cancel()

    def _push_ended(self, message: Pushed | Failed) -> None:
        request = self._transfers.get(message.request_id)
        if isinstance(message, Failed):
            self._metrics.push_failures.labels(message.error.code).inc()
        if request is None:  # cancelled meanwhile
            self._metrics.unknown.labels(type(message).__name__).inc()
        elif isinstance(message, Failed):
            self._fail(request, message.error.error())
        elif request.prefilled:
            self._acknowledge(request, message)
        else:
            request.pushed = message

    def _acknowledge(self, request: Request, message: Pushed) -> None:
        self._metrics.pushes.inc()
        self._metrics.pushed_bytes.inc(message.bytes)
        self._metrics.push_seconds.observe(message.seconds)
        self._forget(request)
        request.session.send(message.model_copy(update={"request_id": request.id}))

    def _forget(self, request: Request) -> None:
        self._transfers.pop(request.transfer_id, None)
        self._requests.pop((request.session.id, request.id), None)
        if not self._requests:
            self._idle.set()

    def _count(self, request: Request, sampled: Sampled) -> None:
        self._metrics.prefilled.inc()
        self._metrics.prompt_tokens.inc(len(request.prefill.token_ids))
        self._metrics.cached_tokens.inc(sampled.cached_tokens)
        self._metrics.queue_seconds.observe(sampled.timings.get("queue", 0.0))
        self._metrics.prefill_seconds.observe(sampled.timings.get("prefill", 0.0))


def _prefilled(request_id: str, sampled: Sampled) -> Prefilled:
    return Prefilled(
        request_id=request_id,
        token_ids=(sampled.token_id,),
        logprobs=sampled.logprobs,
        finish_reason=sampled.finish_reason,
        cached_tokens=sampled.cached_tokens,
        timings=sampled.timings,
    )
