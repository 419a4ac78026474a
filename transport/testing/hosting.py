"""Runs a fake worker's session server on a port of this process, and lets it die as a killed process would."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Generator

import uvicorn
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from transport.http import worker_app
from transport.serve import bind
from transport.settings import BaseRoleSettings
from transport.testing.worker import FakeWorker


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # signals are the test's business


class Hosted:
    """One life of a fake worker at `url`."""

    def __init__(self, worker: FakeWorker, token: str, port: int = 0) -> None:
        listener = bind("127.0.0.1", port)
        self.port: int = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        settings = BaseRoleSettings.model_validate({"name": worker.name, "port": self.port, "token": SecretStr(token)})
        app = worker_app(
            worker.role,
            settings,
            worker,
            info=dict,
            ready=lambda: None if worker.ready else "not ready",
            registry=CollectorRegistry(),
        )
        config = uvicorn.Config(
            app, log_config=None, ws_ping_interval=None, ws_per_message_deflate=False, timeout_graceful_shutdown=1
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        self._listener = listener

    async def kill(self) -> None:
        """Every connection is reset, nothing is said, and the port is free again."""
        for server in getattr(self._server, "servers", ()):
            server.close()  # first, or a peer attaches again before the rest has stopped
        for connection in list(self._server.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()
        await self.stop()

    async def stop(self) -> None:
        self._server.should_exit = True
        await self._serving
        self._listener.close()


@contextlib.asynccontextmanager
async def hosted(worker: FakeWorker, token: str, port: int = 0) -> AsyncIterator[Hosted]:
    """A fake worker that listens while the context lasts (unless it is killed in it)."""
    host = Hosted(worker, token, port)
    try:
        yield host
    finally:
        await host.stop()
