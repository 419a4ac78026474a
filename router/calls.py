"""Calls: one try of a job on a pair of workers, and the table that hands workers' messages to them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TypeVar

from router.job import Job
from router.metrics import RouterMetrics
from router.workers import DecodeWorker, PrefillWorker, Worker
from transport.errors import HawkError, ProtocolError, WorkerLost
from transport.messages import (
    Cancel,
    Failed,
    FinishReason,
    Logprob,
    Message,
    PreemptedNotice,
    Pushed,
    TokenItem,
    Tokens,
)

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


class CallFailed(Exception):
    """`error` ended the call; `worker` is to blame, if one is. `reported`: the worker said so itself."""

    def __init__(self, error: HawkError, worker: Worker | None, *, reported: bool = False) -> None:
        super().__init__(error.message)
        self.error = error
        self.worker = worker
        self.reported = reported


class DecodePreempted(Exception):
    """D ran out of blocks and dropped the request."""


class Call:
    """`over`: no more tokens are taken. `ended_on_decode`: D itself said that it was the last token.

    `at_prefill`, `at_decode`: that worker may still hold something of this call.
    """

    def __init__(self, request_id: str, job: Job, prefill: PrefillWorker, decode: DecodeWorker | None) -> None:
        self.request_id = request_id
        self.job = job
        self.prefill = prefill
        self.decode = decode
        self.at_prefill = self.at_decode = False
        self.over = False
        self.handed_over = 0
        self.last_token_at = 0.0
        self._events: deque[tuple[Worker, Message] | CallFailed | None] = deque()
        self._wake: asyncio.Future[None] | None = None

    # ---- what the workers say

    def deliver(self, event: tuple[Worker, Message] | CallFailed | None) -> None:
        """None: the last token was taken."""
        self._events.append(event)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def take(self, token_ids: list[int], logprobs: list[Logprob] | None, finish: FinishReason | None) -> None:
        """Give tokens to the sink; at `max_tokens` the call is over whatever the worker says."""
        job = self.job
        if len(token_ids) > job.remaining:
            token_ids = token_ids[: job.remaining]
            finish = "length"
        elif finish is None and len(token_ids) == job.remaining:
            finish = "length"
        job.generated.extend(token_ids)
        self.handed_over += len(token_ids)
        if job.sink.tokens(token_ids, logprobs, finish):
            self.over = True

    # ---- what the dispatcher waits for

    async def next(self, timeout_s: float) -> Message | None:
        """The next message about this call; None when it is over.

        Raises TimeoutError, CallFailed, DecodePreempted.
        """
        while not self._events:
            self._wake = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake
            finally:
                self._wake = None
        event = self._events.popleft()
        if event is None:
            return None
        if isinstance(event, CallFailed):
            self._released(event.worker)
            raise event
        worker, message = event
        if isinstance(message, Failed):
            self._released(worker)
            raise CallFailed(message.error.error(), worker, reported=True)
        if isinstance(message, PreemptedNotice):
            self._released(worker)
            raise DecodePreempted
        return message

    async def expect(self, kind: type[M], worker: Worker, timeout_s: float) -> M:
        """The next message, which must be of this kind and come in time. Raises CallFailed, DecodePreempted."""
        try:
            message = await self.next(timeout_s)
        except TimeoutError:
            raise CallFailed(no_answer(worker, kind.__name__, timeout_s), worker) from None
        if not isinstance(message, kind):
            raise CallFailed(ProtocolError(f"expected {kind.__name__}, got {type(message).__name__}"), worker)
        return message

    def _released(self, worker: Worker | None) -> None:
        if worker is self.prefill:
            self.at_prefill = False
        elif worker is self.decode:
            self.at_decode = False

    def cancel(self, reason: str) -> None:
        """Tell every worker that may hold something of this call to drop it now."""
        for worker, holds in ((self.decode, self.at_decode), (self.prefill, self.at_prefill)):
            if holds and worker is not None:
                try:
                    worker.send(Cancel(request_id=self.request_id, reason=reason))
                except WorkerLost:
                    continue  # its session is gone, and what it held with it
        self.at_prefill = self.at_decode = False


def no_answer(worker: Worker, what: str, timeout_s: float) -> WorkerLost:
    return WorkerLost(f"{worker.role} worker {worker.name} sent no {what} within {timeout_s:g} s")


class CallTable:
    """All calls in flight, by request id: the `Inbox` of the registry."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._calls: dict[str, Call] = {}
        self._metrics = metrics

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Call) -> None:
        self._calls[call.request_id] = call
        call.prefill.calls += 1
        if call.decode is not None:
            call.decode.calls += 1

    def remove(self, call: Call) -> None:
        del self._calls[call.request_id]
        call.prefill.calls -= 1
        if call.decode is not None:
            call.decode.calls -= 1

    def tokens(self, worker: Worker, tokens: Tokens) -> None:
        """One engine step of a decode worker: the hot path."""
        now = asyncio.get_running_loop().time()
        calls = self._calls
        for item in tokens.items:
            call = calls.get(item.request_id)
            if call is not None and not call.over and call.decode is worker:
                self._step(call, item, now)

    def _step(self, call: Call, item: TokenItem, now: float) -> None:
        self._metrics.observe_gap(now - call.last_token_at)
        call.last_token_at = now
        try:
            call.take(item.token_ids, item.logprobs, item.finish_reason)
        except Exception as error:
            log.exception("tokens of request %s", call.request_id)
            call.over = True
            call.deliver(CallFailed(HawkError(f"{type(error).__name__}: {error}"), None))
            return
        if item.finish_reason is not None:
            call.at_decode = call.at_prefill = False  # D ended it, so P's push has long landed
            call.over = True
        if call.over:
            call.deliver(None)

    def message(self, worker: Worker, message: Message) -> None:
        call = self._calls.get(getattr(message, "request_id", ""))
        if call is None or worker not in (call.prefill, call.decode):
            return  # the answer to a call that was cancelled meanwhile
        if isinstance(message, Pushed):
            call.at_prefill = False
            return
        call.deliver((worker, message))

    def lost(self, worker: Worker, error: HawkError) -> None:
        """A session broke: all that the worker held for this router is gone."""
        lost = WorkerLost(f"lost {worker.role} worker at {worker.url}: {error.message}")
        for call in list(self._calls.values()):
            if call.decode is worker or (call.prefill is worker and call.at_prefill):
                call.deliver(CallFailed(lost, worker))
