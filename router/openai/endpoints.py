"""`/v1/chat/completions` and `/v1/completions` as ASGI apps: from the body to the answer, watching the client.

Plain ASGI, because a framework's request and response objects would cost more than the rest of a request.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json
from starlette.types import Message, Receive, Scope, Send

from router.admission import Gate
from router.detokenizer import Detokenizer
from router.dispatch import Dispatcher
from router.job import Job
from router.metrics import RouterMetrics
from router.openai.choice import Choice, Emit
from router.openai.errors import JSON_HEADERS, error_json, hawk_error
from router.openai.exchange import Exchange, Part, Streamer
from router.openai.rendering import Rendered, Renderer
from router.openai.schemas import ChatRequest, CompletionRequest, Generation, parse
from router.openai.shapes import ChatShape, CompletionShape, Shape
from router.outbox import Outbox
from router.stops import StopScanner
from router.tokenizer import Tokenizer
from transport.errors import InvalidRequest, ModelNotFound

SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


@dataclass(frozen=True)
class Services:
    """What the endpoints need of the rest of the router."""

    model_name: str
    max_choices: int
    tokenizer: Tokenizer
    renderer: Renderer
    gate: Gate
    dispatcher: Dispatcher
    metrics: RouterMetrics


class GenerationEndpoint:
    """An ASGI app. Whatever happens, the client gets an answer, and when it leaves, the workers are told at once."""

    def __init__(self, services: Services, kind: type[ChatRequest] | type[CompletionRequest]) -> None:
        self._services = services
        self._kind = kind
        self._name = "chat" if kind is ChatRequest else "completions"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics, started = self._services.metrics, time.perf_counter()
        answer = Answer(send)
        status = 499
        try:
            body = await read_body(receive)
            await while_connected(self._serve(body, answer, started), receive, answer)
            status = 200
        except ClientGone:
            metrics.aborts.inc()
        except Exception as raised:
            error = hawk_error(raised)
            metrics.errors.labels(error.code).inc()
            status, headers, content = error_json(error)
            if not answer.begun:
                await answer.send_all(status, headers, content)
        finally:
            metrics.requests.labels(self._name, str(status)).inc()
            metrics.duration.observe(time.perf_counter() - started)

    async def _serve(self, body: bytes, answer: Answer, started: float) -> None:
        request = parse(self._kind, load_json(body))
        services, metrics = self._services, self._services.metrics
        if request.model is not None and request.model != services.model_name:
            raise ModelNotFound(
                f"the model {request.model[:128]!r} does not exist here; {services.model_name!r} does", param="model"
            )
        async with services.gate.admit():
            prompts = await self._render(request)
            outbox = Outbox()
            exchange = self._exchange(request, prompts, outbox, started)
            metrics.prompt_tokens.inc(exchange.prompt_tokens)
            try:
                if request.stream:
                    await exchange.stream(answer.send, outbox, SSE_HEADERS, with_usage=request.include_usage)
                else:
                    content = json.dumps(await exchange.whole()).encode()
                    await answer.send_all(200, JSON_HEADERS, content)
            finally:
                metrics.completion_tokens.inc(exchange.completion_tokens)
                metrics.cached_tokens.inc(exchange.cached)

    async def _render(self, request: Generation) -> list[Rendered]:
        services = self._services
        if request.n > services.max_choices:
            raise InvalidRequest(f"n: at most {services.max_choices}, got {request.n}", param="n")
        before = services.tokenizer.calls
        try:
            if isinstance(request, ChatRequest):
                return await services.renderer.chat(request)
            assert isinstance(request, CompletionRequest)
            return await services.renderer.completion(request, services.max_choices // request.n)
        finally:
            services.metrics.tokenised.inc(services.tokenizer.calls - before)

    def _exchange(
        self, request: ChatRequest | CompletionRequest, prompts: list[Rendered], outbox: Outbox, started: float
    ) -> Exchange:
        services = self._services
        id = ("chatcmpl-" if isinstance(request, ChatRequest) else "cmpl-") + uuid.uuid4().hex
        shape = self._shape(id, request, prompts)
        emit = None
        if request.stream:
            emit = self._timed(Streamer(shape, outbox).emit, started)
        parts: list[Part] = []
        for prompt in prompts:
            max_tokens = services.renderer.max_tokens(prompt, request.limit)
            for i in range(request.n):
                sampling = services.renderer.sampling(request, max_tokens, i, request.num_logprobs)
                index = len(parts)
                choice = Choice(
                    index, self._text(request, prompt), want_logprobs=sampling.logprobs is not None, emit=emit
                )
                parts.append(Part(prompt, choice, Job(f"{id}.{index}", prompt.token_ids, sampling, choice)))
        return Exchange(services.dispatcher, shape, parts)

    def _shape(self, id: str, request: ChatRequest | CompletionRequest, prompts: list[Rendered]) -> Shape:
        services, created = self._services, int(time.time())
        if isinstance(request, ChatRequest):
            return ChatShape(id, created, services.model_name, services.tokenizer, usage_field=request.include_usage)
        echo = [prompt.text for prompt in prompts for _ in range(request.n)] if request.echo else None
        return CompletionShape(
            id, created, services.model_name, services.tokenizer, usage_field=request.include_usage, echo=echo
        )

    def _text(self, request: Generation, prompt: Rendered) -> Callable[[], tuple[Detokenizer, StopScanner | None]]:
        tokenizer, stops, skip = self._services.tokenizer, request.stops, request.skip_special_tokens

        def make() -> tuple[Detokenizer, StopScanner | None]:
            detokenizer = tokenizer.detokenizer(prompt.token_ids, skip_special_tokens=skip)
            return detokenizer, StopScanner(stops) if stops else None

        return make

    def _timed(self, emit: Emit, started: float) -> Emit:
        """`emit`, with the time to the first token observed."""
        seen = False

        def timed(*step: object) -> None:
            nonlocal seen
            if not seen:
                seen = True
                self._services.metrics.ttft.observe(time.perf_counter() - started)
            emit(*step)  # type: ignore[arg-type]

        return timed


class Answer:
    """The response: knows whether it has begun, and whether all of it was handed to the server."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = self.complete = False

    async def send(self, message: Message) -> None:
        self.begun = True
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True
        await self._send(message)

    async def send_all(self, status: int, headers: list[tuple[bytes, bytes]], content: bytes) -> None:
        length = (b"content-length", str(len(content)).encode())
        await self.send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
        await self.send({"type": "http.response.body", "body": content})


async def read_body(receive: Receive) -> bytes:
    """The whole body (its size was limited on the way in). Raises ClientGone."""
    chunks, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunks.append(message.get("body", b""))
        more = message.get("more_body", False)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def load_json(body: bytes) -> object:
    """Raises InvalidRequest for anything that is not JSON: NaN, infinities and half surrogates included."""
    try:
        value: object = from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    return value


async def while_connected(work: Coroutine[Any, Any, None], receive: Receive, answer: Answer) -> None:
    """Run `work` until it ends; cancel it and raise ClientGone as soon as the client disconnects."""
    running = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((running, watching), return_when=asyncio.FIRST_COMPLETED)
        if not running.done() and not answer.complete:  # a complete answer ends in a disconnect, too
            raise ClientGone
        await running
    finally:
        watching.cancel()
        if not running.done():
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
