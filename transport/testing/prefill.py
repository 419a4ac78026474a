"""A prefill worker without an engine."""

from __future__ import annotations

import asyncio
from collections import deque

from transport.errors import HawkError
from transport.messages import (
    ErrorInfo,
    Message,
    ModelInfo,
    OpenPool,
    PoolOpened,
    PoolRefused,
    Prefill,
    Prefilled,
    Pushed,
    Role,
    Status,
)
from transport.session.server import Session
from transport.testing.worker import FakeWorker


class FakePrefill(FakeWorker):
    """Script:

    - `failures`: errors for the next prefills, one each; None lets one pass;
    - `gate`, `push_gate`: closed (`clear()`), first tokens, or acknowledged pushes, wait;
    - `push_failures`: errors for the next pushes; `refusal`: what OpenPool is answered with;
    - `cached_tokens`: what Prefilled claims.
    """

    role: Role = "prefill"

    def __init__(self, name: str, model: ModelInfo) -> None:
        super().__init__(name, model)
        self.failures: deque[HawkError | None] = deque()
        self.push_failures: deque[HawkError | None] = deque()
        self.refusal: HawkError | None = None
        self.cached_tokens = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.push_gate = asyncio.Event()
        self.push_gate.set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[str, int] = {}

    def status(self) -> Status:
        return Status(
            ready=self.ready,
            draining=self.draining,
            running=len(self.held),
            outstanding_tokens=sum(self._waiting.values()),
        )

    async def handle(self, session: Session, message: Message) -> None:
        if isinstance(message, OpenPool):
            worker, generation = message.pool.worker, message.pool.generation
            if self.refusal is None:
                session.send(PoolOpened(worker=worker, generation=generation))
            else:
                refused = PoolRefused(worker=worker, generation=generation, error=ErrorInfo.of(self.refusal))
                session.send(refused)
        elif isinstance(message, Prefill):
            self.held[message.request_id] = session
            self._waiting[message.request_id] = len(message.token_ids)
            self._tasks[message.request_id] = asyncio.create_task(self._prefill(session, message))

    async def _prefill(self, session: Session, message: Prefill) -> None:
        request_id = message.request_id
        failure = self.failures.popleft() if self.failures else None
        if failure is not None:
            await self.fail(request_id, failure)
            return
        await self.gate.wait()
        self._waiting.pop(request_id, None)
        token = self.successor(message.token_ids[-1])
        finish = self.finish(token, 1, message.sampling)
        logprob = self.logprob(token, message.sampling)
        session.send(
            Prefilled(
                request_id=request_id,
                token_ids=(token,),
                logprobs=None if logprob is None else (logprob,),
                finish_reason=finish,
                cached_tokens=self.cached_tokens,
            )
        )
        if message.lease is not None and finish is None:
            await self._push(session, request_id, message.lease.id)
        await self.drop(request_id)
        await self.changed()

    async def _push(self, session: Session, request_id: str, lease_id: str) -> None:
        failure = self.push_failures.popleft() if self.push_failures else None
        if failure is not None:
            await self.fail(request_id, failure)
            return
        await self.push_gate.wait()
        session.send(Pushed(request_id=request_id, lease_id=lease_id, bytes=0, seconds=0.0))

    async def drop(self, request_id: str) -> None:
        await super().drop(request_id)
        self._waiting.pop(request_id, None)
        task = self._tasks.pop(request_id, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
