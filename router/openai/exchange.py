"""One admitted request: its jobs, run together, and the answer they make, whole or streamed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any

from starlette.types import Send

from router.dispatch import Dispatcher
from router.job import Job
from router.openai.choice import Choice, TokenLogprob
from router.openai.errors import error_event, hawk_error
from router.openai.rendering import Rendered
from router.openai.shapes import DONE, Shape
from router.openai.usage import cached_tokens, usage
from router.outbox import Outbox
from transport.messages import FinishReason

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Part:
    """One choice: which prompt it continues, its text, its job."""

    prompt: Rendered
    choice: Choice
    job: Job


class Exchange:
    def __init__(self, dispatcher: Dispatcher, shape: Shape, parts: list[Part]) -> None:
        self._dispatcher = dispatcher
        self._shape = shape
        self._parts = parts

    # ---- running

    async def _run(self) -> None:
        """All jobs to their end; the first failure stops the others and is raised."""
        if len(self._parts) == 1:
            await self._dispatcher.run(self._parts[0].job)
            return
        tasks = [asyncio.create_task(self._dispatcher.run(part.job)) for part in self._parts]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt, _ in self._by_prompt())

    @property
    def completion_tokens(self) -> int:
        return sum(part.choice.completion_tokens for part in self._parts)

    @property
    def cached(self) -> int:
        return sum(cached_tokens([part.job.cached_tokens for part in parts]) for _, parts in self._by_prompt())

    def _by_prompt(self) -> list[tuple[Rendered, list[Part]]]:
        groups: dict[int, tuple[Rendered, list[Part]]] = {}
        for part in self._parts:
            groups.setdefault(id(part.prompt), (part.prompt, []))[1].append(part)
        return list(groups.values())

    def _usage(self) -> dict[str, Any]:
        return usage(self.prompt_tokens, self.completion_tokens, self.cached)

    # ---- answering

    async def whole(self) -> dict[str, Any]:
        """The answer's JSON, once all choices are complete."""
        await self._run()
        return self._shape.whole([part.choice for part in self._parts], self._usage())

    async def stream(self, send: Send, outbox: Outbox, headers: list[tuple[bytes, bytes]], *, with_usage: bool) -> None:
        """Send the stream. Raises what failed before there was anything to send; later failures are an error event.

        An error event is the last event: no [DONE] follows it, because the answer is not done.
        """
        producer = asyncio.create_task(self._produce(outbox, with_usage=with_usage))
        try:
            chunk = await outbox.get()
            if not chunk and outbox.error is not None:
                raise outbox.error
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                chunk = await outbox.get()
            if outbox.error is not None:
                event = error_event(hawk_error(outbox.error))
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            if outbox.error is not None:
                raise outbox.error
        finally:
            producer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await producer

    async def _produce(self, outbox: Outbox, *, with_usage: bool) -> None:
        try:
            await self._run()
        except Exception as error:
            outbox.close(error)
            return
        if with_usage:
            outbox.put(self._shape.usage_chunk(self._usage()))
        outbox.put(DONE)
        outbox.close()


class Streamer:
    """Turns the steps of all choices into stream chunks."""

    def __init__(self, shape: Shape, outbox: Outbox) -> None:
        self._shape = shape
        self._outbox = outbox
        self._opened: set[int] = set()

    def emit(self, choice: Choice, text: str, logprobs: list[TokenLogprob] | None, finish: FinishReason | None) -> None:
        index = choice.index
        if index not in self._opened:
            self._opened.add(index)
            first = self._shape.first_chunk(index)
            if first:
                self._outbox.put(first)
        if logprobs is None and finish is None:
            if text:
                self._outbox.put(self._shape.text_chunk(index, text))
            return
        if text or logprobs or finish is not None:
            self._outbox.put(self._shape.chunk(index, text, logprobs, finish))
