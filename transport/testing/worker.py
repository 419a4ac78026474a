"""What both fake workers share: the session handler, a record of all messages, and what a fake model says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from transport.errors import HawkError
from transport.generation import new_generation
from transport.messages import (
    PROTOCOL_VERSION,
    Cancel,
    ErrorInfo,
    Failed,
    FinishReason,
    Hello,
    Logprob,
    Message,
    ModelInfo,
    PoolDescription,
    Role,
    Sampling,
    Status,
    Tokens,
)
from transport.session.server import Session

M = TypeVar("M", bound=Message)


def fake_model(name: str = "fake", max_model_len: int = 4096, vocab_size: int = 1024) -> ModelInfo:
    return ModelInfo(
        name=name, fingerprint=f"fingerprint of {name}", max_model_len=max_model_len, vocab_size=vocab_size
    )


class FakeWorker:
    """A `SessionHandler`. The fake model's next token is `successor(last token)`, so that P, D and a prefill of
    prompt plus answer always agree; a token in `eos` ends the text.

    `received`: every message but pings, in order. `held`: ids of the requests that take room here now.
    `ready`, `draining`: as told in the status.
    """

    role: Role

    def __init__(self, name: str, model: ModelInfo) -> None:
        self.name = name
        self.model = model
        self.generation = new_generation()
        self.successor: Callable[[int], int] = lambda token: token + 1
        self.eos: frozenset[int] = frozenset()
        self.ready = True
        self.draining = False
        self.received: list[Message] = []
        self.held: dict[str, Session] = {}
        self.sessions: list[Session] = []
        self._changed = asyncio.Condition()

    # ---- what the script says

    def finish(self, token: int, count: int, sampling: Sampling) -> FinishReason | None:
        """Whether `token`, the `count`-th of the request, is its last."""
        if token in sampling.stop_token_ids or (token in self.eos and not sampling.ignore_eos):
            return "stop"
        return "length" if count >= sampling.max_tokens else None

    def logprob(self, token: int, sampling: Sampling) -> Logprob | None:
        if sampling.logprobs is None:
            return None
        top = tuple((token + i, -0.5 - i) for i in range(sampling.logprobs))
        return Logprob(token=token, logprob=-0.5, top=top)

    # ---- what tests wait for

    def seen(self, kind: type[M]) -> list[M]:
        """All received messages of a kind."""
        return [message for message in self.received if isinstance(message, kind)]

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait for a condition on this worker, looked at after each change. Raises TimeoutError."""
        async with self._changed:
            await asyncio.wait_for(self._changed.wait_for(condition), timeout_s)

    async def until_seen(self, kind: type[M], count: int = 1, timeout_s: float = 10.0) -> list[M]:
        await self.until(lambda: len(self.seen(kind)) >= count, timeout_s)
        return self.seen(kind)

    async def until_free(self, timeout_s: float = 10.0) -> None:
        """Until this worker holds nothing any more."""
        await self.until(lambda: not self.held, timeout_s)

    async def changed(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # ---- session handler

    def pool(self) -> PoolDescription | None:
        return None

    def status(self) -> Status:
        return Status(ready=self.ready, draining=self.draining, running=len(self.held))

    def hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            role=self.role,
            worker=self.name,
            generation=self.generation,
            model=self.model,
            pool=self.pool(),
            status=self.status(),
        )

    async def on_open(self, session: Session) -> None:
        self.sessions.append(session)
        await self.changed()

    async def on_message(self, session: Session, message: Message | Tokens) -> None:
        if isinstance(message, Message) and type(message).__name__ != "Ping":
            self.received.append(message)
            if isinstance(message, Cancel):
                await self.drop(message.request_id)
            else:
                await self.handle(session, message)
            await self.changed()

    async def on_close(self, session: Session) -> None:
        self.sessions.remove(session)
        for request_id in [r for r, owner in self.held.items() if owner is session]:
            await self.drop(request_id)
        await self.changed()

    async def handle(self, session: Session, message: Message) -> None:
        raise NotImplementedError

    async def drop(self, request_id: str) -> None:
        """Forget a request, in whatever state."""
        self.held.pop(request_id, None)

    async def fail(self, request_id: str, error: HawkError) -> None:
        """Report that the request failed here; nothing of it is held any more."""
        session = self.held.get(request_id)
        await self.drop(request_id)
        if session is not None:
            session.send(Failed(request_id=request_id, error=ErrorInfo.of(error)))
        await self.changed()
