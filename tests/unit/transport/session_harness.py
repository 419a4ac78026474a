"""A worker with a recording session handler, served by uvicorn on a free port of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import ClassVar

from prometheus_client import CollectorRegistry

from transport.auth import bearer
from transport.http import bind, serve, worker_app
from transport.messages import PROTOCOL_VERSION, Attach, Hello, Message, ModelInfo, Status, Tokens
from transport.session.client import SessionClient
from transport.session.server import Session
from transport.settings import BaseRoleSettings, load

TOKEN = "a-cluster-token-of-some-length"
FAST = {"ping_interval_s": 0.05, "dead_after_s": 1.0, "backoff_initial_s": 0.01, "backoff_max_s": 0.05}
HEADERS = {"Authorization": bearer(TOKEN)}
ATTACH = Attach(protocol=PROTOCOL_VERSION, router="router-0", generation="r1")


class PrefillSettings(BaseRoleSettings):
    """A worker of the tests."""

    role: ClassVar[str] = "prefill"


def settings(**values: object) -> PrefillSettings:
    return load(PrefillSettings, env={"HAWK_TOKEN": TOKEN}, overrides={"name": "prefill-0", **values})


class Recorder:
    """A handler that records its calls; `react` is called with each message."""

    def __init__(self, generation: str = "p1") -> None:
        self.generation = generation
        self.events: asyncio.Queue[tuple[str, Session, object]] = asyncio.Queue()
        self.react: Callable[[Session, Message | Tokens], object] = lambda session, message: None

    def status(self) -> Status:
        return Status(ready=True, running=3)

    def hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            role="prefill",
            worker="prefill-0",
            generation=self.generation,
            model=ModelInfo(name="m", fingerprint="f", max_model_len=2048, vocab_size=100),
            status=self.status(),
        )

    async def on_open(self, session: Session) -> None:
        self.events.put_nowait(("open", session, None))

    async def on_message(self, session: Session, message: Message | Tokens) -> None:
        self.events.put_nowait(("message", session, message))
        result = self.react(session, message)
        if asyncio.iscoroutine(result):
            await result

    async def on_close(self, session: Session) -> None:
        self.events.put_nowait(("close", session, None))

    async def expect(self, kind: str) -> tuple[Session, object]:
        """The next event of this kind; pings in between are passed over."""
        while True:
            got, session, message = await asyncio.wait_for(self.events.get(), 10)
            if got == kind and type(message).__name__ != "Ping":
                return session, message


@contextlib.asynccontextmanager
async def worker(
    handler: Recorder, sock: socket.socket | None = None, ready: str | None = None, **values: object
) -> AsyncIterator[str]:
    """Serve a worker → its base URL."""
    sock = sock or bind("127.0.0.1", 0)
    configured = settings(**values)
    app = worker_app(
        "prefill",
        configured,
        handler,
        info=lambda: {"worker": "prefill-0"},
        ready=lambda: ready,
        registry=CollectorRegistry(),
    )

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("a bug with a secret in it")

    @app.post("/echo")
    async def echo(body: dict[str, int]) -> dict[str, int]:
        return body

    started = asyncio.Event()
    port = sock.getsockname()[1]
    serving = asyncio.create_task(
        serve(
            app,
            "",
            0,
            sock=sock,
            max_frame_bytes=configured.max_frame_bytes,
            on_started=lambda _: started.set(),
        )
    )
    await started.wait()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


class Router:
    """A `SessionClient` that records what it gets."""

    def __init__(self, url: str, token: str = TOKEN, **options: object) -> None:
        self.events: asyncio.Queue[tuple[str, object]] = asyncio.Queue()
        self.client = SessionClient(
            url,
            token,
            ATTACH.router,
            ATTACH.generation,
            on_hello=lambda hello: self.events.put_nowait(("hello", hello)),
            on_message=lambda message: self.events.put_nowait(("message", message)),
            on_down=lambda error: self.events.put_nowait(("down", error)),
            **{
                "ping_interval_s": 0.05,
                "dead_after_s": 1.0,
                "backoff_initial_s": 0.01,
                "backoff_max_s": 0.05,
                **options,
            },
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Router:
        self._task = asyncio.create_task(self.client.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def expect(self, kind: str) -> object:
        """The next event of this kind; pongs in between are passed over."""
        while True:
            got, value = await asyncio.wait_for(self.events.get(), 10)
            if got == kind and type(value).__name__ != "Pong":
                return value
