"""Where a request runs: P by least outstanding tokens, D by resident prefix and load, and waiting for room.

A prefill slot on a P is taken before a lease is asked of D: what waits, waits here, where it pins nothing.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from router.registry import Registry
from router.workers import DecodeWorker, PrefillWorker, Worker
from transport.errors import HawkError, NoWorkers, Overloaded
from transport.prefix import block_hashes

log = logging.getLogger(__name__)

W = TypeVar("W", bound=Worker)

#: A D whose requests exceed twice those of the least loaded by more than this draws none by its prefix. Otherwise one
#: system prompt that all share would put all on one D: a resident prefix saves a transfer, a small batch every step.
PREFIX_SLACK = 4


@dataclass(slots=True)
class Prompt:
    """Token ids to prefill; block hashes are computed once per (block size, model and dtype)."""

    token_ids: list[int]
    _hashes: dict[tuple[int, bytes], list[bytes]] = field(default_factory=dict)

    def hashes(self, decode: DecodeWorker) -> list[bytes]:
        key = (decode.block_size, decode.root)
        if key not in self._hashes:
            self._hashes[key] = block_hashes(self.token_ids, *key)
        return self._hashes[key]


@dataclass(slots=True)
class Placed:
    """A prefill slot on P, and the D to ask for a lease (None: one token, nothing to hand over)."""

    prefill: PrefillWorker
    decode: DecodeWorker | None
    tokens: int
    slot_held: bool = True


@dataclass(slots=True, eq=False)
class Waiter:
    """A request in the queue. `order` is its first arrival: a request that comes back keeps its turn.

    `kv_tokens`: tokens that it may come to keep in D's pool.
    """

    order: float
    prompt: Prompt
    needs_decode: bool
    kv_tokens: int
    avoid: frozenset[Worker]
    placed: asyncio.Future[Placed]


class Placement:
    def __init__(self, registry: Registry, prefills_per_worker: int) -> None:
        self._registry = registry
        self._slots = prefills_per_worker
        self._queue: list[Waiter] = []

    @property
    def queued(self) -> int:
        return len(self._queue)

    async def acquire(
        self,
        prompt: Prompt,
        *,
        needs_decode: bool,
        kv_tokens: int,
        order: float,
        deadline: float,
        avoid: frozenset[Worker],
    ) -> Placed:
        """Wait for a slot. `order`, `deadline`: loop time. `avoid`: workers to use only if there are no others.

        `kv_tokens`: prompt and answer without its last token, for which D's whole pool must have room.
        Raises NoWorkers when nothing could ever serve it now, Overloaded at the deadline.
        """
        waiter = Waiter(order, prompt, needs_decode, kv_tokens, avoid, asyncio.get_running_loop().create_future())
        insort(self._queue, waiter, key=lambda w: w.order)
        self.kick()
        if waiter.placed.done():
            return waiter.placed.result()
        placed = None
        try:
            async with asyncio.timeout_at(deadline):
                placed = await waiter.placed
                return placed
        except TimeoutError:
            raise Overloaded("no room on the workers in time: prefill slots or KV blocks are all taken") from None
        finally:
            if placed is None:
                self._abandon(waiter)

    def _abandon(self, waiter: Waiter) -> None:
        """Its request is gone; a slot it was given in the same moment is free again."""
        if waiter in self._queue:
            self._queue.remove(waiter)
        elif not waiter.placed.cancelled() and waiter.placed.exception() is None:
            self.release(waiter.placed.result())

    def release(self, placed: Placed) -> None:
        """Give the prefill slot back (once, however often it is called)."""
        if placed.slot_held:
            placed.slot_held = False
            placed.prefill.in_flight -= 1
            placed.prefill.outstanding -= placed.tokens
            self.kick()

    def full(self, decode: DecodeWorker) -> None:
        """D refused a reservation: nothing is sent there until its status changes or one of its requests ends."""
        decode.full = True

    def freed(self, decode: DecodeWorker | None) -> None:
        """One of D's leases ended."""
        if decode is not None:
            decode.full = False
            self.kick()

    def kick(self) -> None:
        """Place all that can be placed, in order. One that lacks blocks on D holds up only those who need D too."""
        decode_blocked = False
        for waiter in list(self._queue):
            if waiter.placed.done():
                continue
            if waiter.needs_decode and decode_blocked:
                continue
            try:
                prefill = self._prefill(waiter)
                if prefill is None:
                    return
                decode = self._decode(waiter, prefill) if waiter.needs_decode else None
            except HawkError as error:
                self._queue.remove(waiter)
                waiter.placed.set_exception(error)
                continue
            if waiter.needs_decode and decode is None:
                decode_blocked = True
                continue
            self._queue.remove(waiter)
            tokens = len(waiter.prompt.token_ids)
            prefill.in_flight += 1
            prefill.outstanding += tokens
            waiter.placed.set_result(Placed(prefill, decode, tokens))

    def _prefill(self, waiter: Waiter) -> PrefillWorker | None:
        """The P with the least to do that has a free slot; None: all are busy."""
        candidates = [p for p in self._registry.prefill if p.usable]
        if waiter.needs_decode:
            candidates = [p for p in candidates if any(self._pair(waiter, p, d) for d in self._registry.decode)]
        if not candidates and not (waiter.needs_decode and self._registry.pools.any_opening()):
            reason = self._registry.not_ready()
            if reason is None:
                raise NoWorkers(f"no ready worker can hold {waiter.kv_tokens} tokens")
            # Which workers there are, and where, is no client's business.
            log.warning("a request was refused: %s", reason)
            raise NoWorkers("no pair of prefill and decode workers is ready; try again later")
        with_room = [p for p in candidates if p.in_flight < self._slots]
        if waiter.needs_decode:
            free = [d for d in self._registry.decode if not d.full]
            to_free_d = [p for p in with_room if any(self._pair(waiter, p, d) for d in free)]
            with_room = to_free_d or with_room
        return _best(with_room, waiter, lambda p: (p.load, p.in_flight))

    def _decode(self, waiter: Waiter, prefill: PrefillWorker) -> DecodeWorker | None:
        """The D with the longest resident prefix that is not much busier than others, then the most free blocks.

        None: all are full.
        """
        candidates = [d for d in self._registry.decode if self._pair(waiter, prefill, d) and not d.full]
        busy = 2 * min((d.calls for d in candidates), default=0) + PREFIX_SLACK
        return _best(
            candidates,
            waiter,
            lambda d: (d.calls > busy, -d.resident_blocks(waiter.prompt.hashes(d)), -d.free_blocks, d.calls),
        )

    def _pair(self, waiter: Waiter, prefill: PrefillWorker, decode: DecodeWorker) -> bool:
        fits = decode.usable and waiter.kv_tokens <= decode.pool_tokens
        return fits and self._registry.pools.is_open(prefill, decode)


def _best(candidates: list[W], waiter: Waiter, key: Callable[[W], tuple[int, ...]]) -> W | None:
    return min(candidates, key=lambda w: (w in waiter.avoid, w.cooling, *key(w)), default=None)
