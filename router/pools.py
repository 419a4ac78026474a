"""Which prefill worker may write into which decode worker's pool: opened, answered, closed, opened again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from router.workers import DecodeWorker, PrefillWorker
from transport.errors import GeometryMismatch, WorkerLost
from transport.messages import ClosePool, Hello, OpenPool, PoolOpened, PoolRefused

log = logging.getLogger(__name__)

RETRY_S, MAX_RETRY_S = 0.5, 15.0


@dataclass
class Pair:
    """One P's connection to one life of one D."""

    generation: str
    state: Literal["opening", "open", "refused"] = "opening"
    reason: str = ""
    refusals: int = 0
    retry: asyncio.TimerHandle | None = None


class Pools:
    """`changed` is called when a pair opens."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._pairs: dict[tuple[PrefillWorker, DecodeWorker], Pair] = {}
        self._changed = changed

    def is_open(self, prefill: PrefillWorker, decode: DecodeWorker) -> bool:
        pair = self._pairs.get((prefill, decode))
        return pair is not None and pair.state == "open"

    def any_open(self, prefill: Iterable[PrefillWorker], decode: Iterable[DecodeWorker]) -> bool:
        decode = list(decode)
        return any(p.usable and d.usable and self.is_open(p, d) for p in prefill for d in decode)

    def any_opening(self) -> bool:
        """Whether a P has yet to answer: then it is worth a moment's wait."""
        return any(pair.state == "opening" and p.usable and d.usable for (p, d), pair in self._pairs.items())

    def states(self, prefill: PrefillWorker) -> dict[str, str]:
        """Decode worker's URL → state, for `GET /workers`."""
        return {
            d.url: f"{pair.state}: {pair.reason}" if pair.reason else pair.state
            for (p, d), pair in self._pairs.items()
            if p is prefill
        }

    def why_not(self) -> str:
        reasons = [f"{p.name} → {d.name}: {pair.reason}" for (p, d), pair in self._pairs.items() if pair.reason]
        return f" ({'; '.join(reasons)})" if reasons else ""

    def open(self, prefill: PrefillWorker, decode: DecodeWorker) -> None:
        """Tell P to connect to D's pool, again if it already did."""
        assert decode.hello is not None
        assert decode.hello.pool is not None
        before = self._forget(prefill, decode)
        pair = Pair(decode.hello.generation, refusals=before.refusals if before else 0)
        self._pairs[prefill, decode] = pair
        with suppress(WorkerLost):  # then its session is about to end, and the pair with it
            prefill.send(OpenPool(pool=decode.hello.pool))

    def reopen(self, prefill: PrefillWorker, decode: DecodeWorker) -> None:
        """One of the two said that an open pair is not connected: connect it again."""
        if self.is_open(prefill, decode) and prefill.up and decode.up:
            self.open(prefill, decode)

    def answered(self, prefill: PrefillWorker, decode: DecodeWorker, message: PoolOpened | PoolRefused) -> None:
        """P's answer, or its later word that the connection was lost."""
        pair = self._pairs.get((prefill, decode))
        if pair is None or pair.generation != message.generation:
            return
        if isinstance(message, PoolOpened):
            pair.state, pair.reason, pair.refusals = "open", "", 0
            log.info("%s has opened the pool of %s", prefill.name, decode.name)
            self._changed()
            return
        pair.state, pair.reason = "refused", message.error.message
        log.warning("%s cannot write into the pool of %s: %s", prefill.name, decode.name, pair.reason)
        if message.error.code == GeometryMismatch.code:
            return
        delay = min(MAX_RETRY_S, RETRY_S * 2**pair.refusals)
        pair.refusals += 1
        if pair.retry is not None:
            pair.retry.cancel()
        pair.retry = asyncio.get_running_loop().call_later(delay, self._again, prefill, decode)

    def _again(self, prefill: PrefillWorker, decode: DecodeWorker) -> None:
        if prefill.up and decode.up:
            self.open(prefill, decode)

    def prefill_gone(self, prefill: PrefillWorker) -> None:
        for p, d in list(self._pairs):
            if p is prefill:
                self._forget(p, d)

    def decode_gone(self, decode: DecodeWorker, hello: Hello) -> None:
        """All P let go of a D's memory, so that nothing keeps that of a dead process alive."""
        for p, d in list(self._pairs):
            if d is decode:
                self._forget(p, d)
                with suppress(WorkerLost):
                    p.send(ClosePool(worker=hello.worker, generation=hello.generation))

    def _forget(self, prefill: PrefillWorker, decode: DecodeWorker) -> Pair | None:
        pair = self._pairs.pop((prefill, decode), None)
        if pair is not None and pair.retry is not None:
            pair.retry.cancel()
        return pair

    def close(self) -> None:
        for prefill, decode in list(self._pairs):
            self._forget(prefill, decode)
