"""The fleet: sessions to all workers, which of them agree on the model, and what is ready to serve."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from router.pools import Pools
from router.settings import RouterSettings
from router.workers import DecodeWorker, PrefillWorker, Worker, WorkerRole
from transport.errors import HawkError, InvalidRequest
from transport.messages import (
    Hello,
    Message,
    ModelInfo,
    Pong,
    PoolOpened,
    PoolRefused,
    ResidentBlocks,
    Status,
    Tokens,
)
from transport.session.client import SessionClient

log = logging.getLogger(__name__)


class Inbox(Protocol):
    """Who takes what workers say about requests."""

    def tokens(self, worker: Worker, tokens: Tokens) -> None: ...

    def message(self, worker: Worker, message: Message) -> None: ...

    def lost(self, worker: Worker, error: HawkError) -> None: ...


@dataclass(frozen=True)
class Limits:
    """The longest context that every worker serves, and the largest pool (None while no decode worker is up)."""

    context: int
    pool_tokens: int | None


class Registry:
    """`changed` is called whenever there may be room for a waiting request."""

    def __init__(
        self, settings: RouterSettings, model: ModelInfo, generation: str, inbox: Inbox, changed: Callable[[], None]
    ) -> None:
        self.prefill: list[PrefillWorker] = []
        self.decode: list[DecodeWorker] = []
        self.pools = Pools(changed)
        self.draining = False
        self._settings = settings
        self._generation = generation
        self._inbox = inbox
        self._changed = changed
        self._model = model
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._removals: dict[Worker, asyncio.Task[None]] = {}
        self._numbers = itertools.count(1)

    # ---- members

    @property
    def workers(self) -> list[Worker]:
        return [*self.prefill, *self.decode]

    def add(self, role: WorkerRole, url: str) -> tuple[Worker, bool]:
        """(the worker, whether it is new). Raises InvalidRequest for a URL that another role has."""
        url = url.rstrip("/")
        known = next((worker for worker in self.workers if worker.url == url), None)
        if known is not None:
            if known.role != role:
                raise InvalidRequest(f"{url} is already known as a {known.role} worker", param="role")
            known.removing = False
            if (removal := self._removals.pop(known, None)) is not None:
                removal.cancel()
            return known, False
        worker = PrefillWorker(url) if role == "prefill" else DecodeWorker(url)
        worker.client = SessionClient(
            url,
            self._settings.secret,
            self._settings.name,
            # One worker under two URLs has two sessions: the second must be refused, not take the first one's place.
            f"{self._generation}-{next(self._numbers)}",
            on_hello=lambda hello: self._attached(worker, hello),
            on_message=lambda message: self._message(worker, message),
            on_down=lambda error: self._down(worker, error),
            ping_interval_s=self._settings.ping_interval_s,
            dead_after_s=self._settings.dead_after_s,
            backoff_max_s=self._settings.reconnect_max_s,
            max_frame_bytes=self._settings.max_frame_bytes,
            max_queue_bytes=self._settings.max_queue_bytes,
        )
        if isinstance(worker, PrefillWorker):
            self.prefill.append(worker)
        else:
            self.decode.append(worker)
        self._tasks[worker] = asyncio.create_task(worker.client.run(), name=f"session {url}")
        return worker, True

    def remove(self, url: str) -> Worker | None:
        """Take no new work to the worker; drop its session once its requests have ended (at most `grace_s`)."""
        worker = next((worker for worker in self.workers if worker.url == url.lower().rstrip("/")), None)
        if worker is not None and not worker.removing:
            worker.removing = True
            self._removals[worker] = asyncio.create_task(self._retire(worker))
        return worker

    async def _retire(self, worker: Worker) -> None:
        deadline = asyncio.get_running_loop().time() + self._settings.grace_s
        while worker.calls and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        await self._end(worker, HawkError("removed by the administrator"))
        self._removals.pop(worker, None)

    async def _end(self, worker: Worker, error: HawkError) -> None:
        """Forgotten at once: while its session closes, the same URL may already be added anew."""
        if isinstance(worker, PrefillWorker):
            self.prefill.remove(worker)
        elif isinstance(worker, DecodeWorker):
            self.decode.remove(worker)
        task = self._tasks.pop(worker)
        task.cancel()
        self._down(worker, error)
        await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        """End all sessions: the workers free whatever this router still had."""
        removals = list(self._removals.values())
        for task in removals:
            task.cancel()
        await asyncio.gather(*removals, return_exceptions=True)
        for worker in self.workers:
            await self._end(worker, HawkError("the router is shutting down"))
        self.pools.close()

    # ---- readiness

    def not_ready(self) -> str | None:
        """Why no request can be served now; None when at least one pair can serve."""
        if self.draining:
            return "the router is shutting down"
        for role, workers in (("prefill", self.prefill), ("decode", self.decode)):
            if not any(worker.usable for worker in workers):
                states = ", ".join(f"{worker.url} is {worker.state()}" for worker in workers)
                return f"no {role} worker is ready" + (f": {states}" if states else "; none is registered")
        if not self.pools.any_open(self.prefill, self.decode):
            return "no prefill worker has opened the pool of a decode worker yet" + self.pools.why_not()
        return None

    def limits(self) -> Limits:
        models = [worker.hello.model.max_model_len for worker in self.workers if worker.up and worker.hello]
        pools = [worker.pool_tokens for worker in self.decode if worker.up and worker.status]
        return Limits(min(models, default=self._model.max_model_len), max(pools, default=None))

    # ---- what sessions say

    def _attached(self, worker: Worker, hello: Hello) -> None:
        worker.attached(hello)
        self._accept(worker, hello)

    def _accept(self, worker: Worker, hello: Hello) -> None:
        """Use an attached worker, or say why not."""
        worker.refused = self._objection(worker, hello)
        if worker.refused is not None:
            log.error("%s worker at %s refused: %s", worker.role, worker.url, worker.refused)
            return
        log.info("%s worker %s at %s attached, generation %s", worker.role, hello.worker, worker.url, hello.generation)
        if isinstance(worker, PrefillWorker):
            for decode in self.decode:
                if decode.up:
                    self.pools.open(worker, decode)
        elif isinstance(worker, DecodeWorker):
            for prefill in self.prefill:
                if prefill.up:
                    self.pools.open(prefill, worker)
        self._changed()

    def _objection(self, worker: Worker, hello: Hello) -> str | None:
        if hello.role != worker.role:
            return f"registered as a {worker.role} worker, but it is a {hello.role} worker"
        if isinstance(worker, DecodeWorker) and hello.pool is None:
            return "a decode worker must describe its pool"
        for other in self.workers:
            if other is not worker and other.hello is not None and other.hello.worker == hello.worker:
                return f"its name {hello.worker!r} is already that of the worker at {other.url}"
        if hello.model.fingerprint != self._model.fingerprint:
            return (
                f"it serves another model ({hello.model.name}, fingerprint {hello.model.fingerprint}) "
                f"than the router ({self._model.name}, fingerprint {self._model.fingerprint})"
            )
        return None

    def _message(self, worker: Worker, message: Message | Tokens) -> None:
        if isinstance(message, Tokens):
            self._inbox.tokens(worker, message)
        elif isinstance(message, (Pong, Status)):
            worker.heard(message if isinstance(message, Status) else message.status)
            self._changed()
        elif isinstance(message, ResidentBlocks):
            if isinstance(worker, DecodeWorker):
                _update(worker.resident, message)
        elif isinstance(message, (PoolOpened, PoolRefused)):
            decode = next((d for d in self.decode if d.hello is not None and d.hello.worker == message.worker), None)
            if isinstance(worker, PrefillWorker) and decode is not None:
                self.pools.answered(worker, decode, message)
        else:
            self._inbox.message(worker, message)

    def _down(self, worker: Worker, error: HawkError) -> None:
        if worker.hello is None:
            return
        hello, was_up = worker.hello, worker.up
        worker.detached(error)
        if was_up:
            if isinstance(worker, PrefillWorker):
                self.pools.prefill_gone(worker)
            elif isinstance(worker, DecodeWorker):
                self.pools.decode_gone(worker, hello)
        self._inbox.lost(worker, error)
        for other in self.workers:
            if other.refused is not None and other.hello is not None:
                self._accept(other, other.hello)  # what was held against it may be gone now, a name that was taken
        self._changed()


def _update(resident: set[bytes], message: ResidentBlocks) -> None:
    if message.reset:
        resident.clear()
    resident.difference_update(message.removed)
    resident.update(message.added)
