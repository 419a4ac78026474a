"""One job's life: Reserve → Prefill → first token → Decode → tokens, with retries, preemption and cancellation.

A failure is retried on other workers as long as the client has seen no token of the job; after that it is
the client's to know. A preempted job is prefilled again with what it has generated, and goes on.
"""

from __future__ import annotations

import asyncio
import logging

from router.calls import Call, CallFailed, CallTable, DecodePreempted, no_answer
from router.job import Job
from router.metrics import RouterMetrics
from router.placement import Placed, Placement, Prompt
from router.registry import Registry
from router.settings import RouterSettings
from router.workers import DecodeWorker, Worker
from transport.errors import (
    HawkError,
    Overloaded,
    Preempted,
    ProtocolError,
    RequestTimeout,
    StaleGeneration,
    UnknownPool,
    WorkerLost,
)
from transport.messages import Decode, Lease, Prefill, Prefilled, Reserve, Reserved, Writer

log = logging.getLogger(__name__)

#: errors of a living worker which mean that its connection to the other one is broken
PAIR_BROKEN = (UnknownPool, StaleGeneration, WorkerLost)


class DecodeFull(Exception):
    """D has no room for the lease: the job goes back into the queue, which is no retry."""


class Dispatcher:
    def __init__(
        self,
        settings: RouterSettings,
        registry: Registry,
        placement: Placement,
        calls: CallTable,
        metrics: RouterMetrics,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._placement = placement
        self._calls = calls
        self._metrics = metrics

    async def run(self, job: Job) -> None:
        """Generate all tokens of the job into its sink. Raises HawkError; cancelled, it frees both workers at once."""
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                await self._run(job)
        except TimeoutError:
            raise RequestTimeout(f"not finished within {self._settings.request_timeout_s:g} s") from None

    async def _run(self, job: Job) -> None:
        settings, loop = self._settings, asyncio.get_running_loop()
        tries = retries = preemptions = 0
        avoid: set[Worker] = set()
        arrived = order = loop.time()
        while True:
            prompt = Prompt([*job.prompt, *job.generated])
            placed = await self._placement.acquire(
                prompt,
                needs_decode=job.remaining > 1,
                kv_tokens=len(prompt.token_ids) + job.remaining - 1,
                order=order,
                deadline=arrived + settings.queue_timeout_s,
                avoid=frozenset(avoid),
            )
            self._metrics.queue_time.observe(loop.time() - arrived)
            call = Call(f"{job.id}.{tries}", job, placed.prefill, placed.decode)
            tries += 1
            try:
                await self._try(call, prompt, placed, preemptions)
                return
            except DecodeFull:
                continue
            except DecodePreempted:
                preemptions += 1
                self._metrics.preemptions.inc()
                if preemptions > settings.max_preemptions:
                    raise Preempted(f"preempted {preemptions} times: the decode workers are short of blocks") from None
                arrived = loop.time()
            except CallFailed as failure:
                error = failure.error
                self._blame(failure, placed)
                retries += 1
                if not worth_retrying(error) or retries > settings.max_retries or not self._can_start_anew(call):
                    raise error from None
                log.warning("request %s failed, trying again: %s: %s", call.request_id, error.code, error.message)
                self._metrics.retries.labels(error.code).inc()
                avoid.update({failure.worker} if failure.worker else {w for w in (call.prefill, call.decode) if w})
                arrived = loop.time()

    def _can_start_anew(self, call: Call) -> bool:
        """Nothing of this try has reached the client: either it gave no token, or the sink can forget them."""
        if call.handed_over == 0:
            return True
        if not call.job.sink.restart():
            return False
        call.job.generated.clear()
        return True

    def _blame(self, failure: CallFailed, placed: Placed) -> None:
        """A client's mistake or a full queue says nothing about the worker's health."""
        if failure.worker is None or not worth_retrying(failure.error) or isinstance(failure.error, Overloaded):
            return
        failure.worker.failed()
        if failure.reported and isinstance(failure.error, PAIR_BROKEN) and placed.decode is not None:
            self._registry.pools.reopen(placed.prefill, placed.decode)

    async def _try(self, call: Call, prompt: Prompt, placed: Placed, preemptions: int) -> None:
        self._calls.add(call)
        reason, lease = "cancelled", None
        try:
            if placed.decode is not None:
                lease = await self._reserve(call, prompt, placed.decode, preemptions)
            first = await self._prefill(call, prompt, lease)
            self._placement.release(placed)
            call.last_token_at = asyncio.get_running_loop().time()
            call.take(list(first.token_ids), list(first.logprobs) if first.logprobs else None, first.finish_reason)
            if first.finish_reason is not None or call.over:
                reason = "the first token ended the request"
            elif lease is not None:
                await self._decode(call, lease, first)
                reason = "finished"
            for worker in (call.prefill, call.decode):
                if worker is not None:
                    worker.succeeded()
        except WorkerLost as error:  # raised by sending
            raise CallFailed(error, None) from error
        except (CallFailed, DecodePreempted, DecodeFull) as error:
            reason = str(error)
            raise
        finally:
            call.cancel(reason)
            self._calls.remove(call)
            self._placement.release(placed)
            if lease is not None:
                self._placement.freed(placed.decode)

    async def _reserve(self, call: Call, prompt: Prompt, decode: DecodeWorker, preemptions: int) -> Lease:
        hashes = prompt.hashes(decode)
        assert call.prefill.hello is not None
        writer = Writer(worker=call.prefill.hello.worker, generation=call.prefill.hello.generation)
        decode.send(
            Reserve(
                request_id=call.request_id,
                prompt_tokens=len(prompt.token_ids),
                max_tokens=call.job.remaining,
                block_hashes=tuple(hashes),
                tail_tokens=tuple(prompt.token_ids[len(hashes) * decode.block_size :]),
                writer=writer,
                preemptions=preemptions,
            )
        )
        call.at_decode = True
        self._metrics.reservations.inc()
        try:
            lease = (await call.expect(Reserved, decode, self._settings.reserve_timeout_s)).lease
        except CallFailed as failure:
            if failure.worker is decode and isinstance(failure.error, Overloaded):
                self._placement.full(decode)
                raise DecodeFull from None
            raise
        decode.reserved_since += len(lease.block_ids) - lease.resident_tokens // decode.block_size
        return lease

    async def _prefill(self, call: Call, prompt: Prompt, lease: Lease | None) -> Prefilled:
        job = call.job
        sampling = job.sampling
        if job.generated:
            sampling = sampling.model_copy(update={"max_tokens": job.remaining})
        call.prefill.send(
            Prefill(
                request_id=call.request_id,
                token_ids=tuple(prompt.token_ids),
                sampling=sampling,
                lease=lease,
            )
        )
        call.at_prefill = True
        first = await call.expect(Prefilled, call.prefill, self._settings.prefill_timeout_s)
        if len(first.token_ids) != 1:
            raise CallFailed(ProtocolError(f"Prefilled with {len(first.token_ids)} tokens, expected 1"), call.prefill)
        if lease is None:
            call.at_prefill = False
        if job.cached_tokens is None:
            job.cached_tokens = min(first.cached_tokens, len(job.prompt))
        return first

    async def _decode(self, call: Call, lease: Lease, first: Prefilled) -> None:
        """Until the last token. Raises CallFailed when no token came for too long."""
        assert call.decode is not None
        call.decode.send(
            Decode(
                request_id=call.request_id,
                lease_id=lease.id,
                token_id=first.token_ids[-1],
                generated=len(call.job.generated),
                sampling=call.job.sampling,
            )
        )
        loop, limit = asyncio.get_running_loop(), self._settings.token_timeout_s
        while not call.over:
            idle = loop.time() - call.last_token_at
            if idle >= limit:
                raise CallFailed(no_answer(call.decode, "token", limit), call.decode)
            try:
                message = await call.next(limit - idle)
            except TimeoutError:
                continue
            if message is not None:
                raise CallFailed(ProtocolError(f"unexpected {type(message).__name__} while decoding"), call.decode)


def worth_retrying(error: HawkError) -> bool:
    """Another worker may succeed: never so for what the client got wrong."""
    return error.retryable or (error.status >= 500 and not isinstance(error, (RequestTimeout, Preempted)))
