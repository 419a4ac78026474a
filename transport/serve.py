"""Runs a role's app under uvicorn: one loop, graceful shutdown, a clear word when the port is taken."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from transport.errors import ConfigurationError
from transport.session.frames import DEFAULT_MAX_FRAME_BYTES

log = logging.getLogger(__name__)

Drain = Callable[[], Awaitable[None]]


def bind(host: str, port: int, *, unread_timeout_s: float = 60.0) -> socket.socket:
    """A listening socket (port 0: any free one). Raises ConfigurationError if the address cannot be had.

    `unread_timeout_s`: connections whose peer does not take what was sent for so long are reset, so that a
    peer that stopped reading cannot keep its socket and buffers for ever.
    """
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(info[0], socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Inherited by accepted connections. asyncio sets it only on sockets made with an explicit protocol;
            # without it a second small frame waits for the peer's delayed acknowledgement (40 ms).
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(unread_timeout_s * 1000))
            sock.bind(info[4])
            sock.listen(1024)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"port {port} on {host} is taken: stop the process that listens there, or set another `port`"
            ) from error
        raise ConfigurationError(f"cannot listen on {host} port {port}: {error}") from error
    sock.setblocking(False)
    return sock


class _Server(uvicorn.Server):
    """uvicorn's server, but for signals: the first one drains and then stops, the second one stops at once.

    uvicorn itself raises the signal again after serving, which would kill the role before its own clean-up.
    """

    def __init__(self, config: uvicorn.Config, drain: Drain | None, grace_s: float) -> None:
        super().__init__(config)
        self._drain = drain
        self._grace_s = grace_s
        self._stopping: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        handled = []
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread
                loop.add_signal_handler(number, self.stop)
                handled.append(number)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        if self._stopping is not None:
            self.should_exit = self.force_exit = True
            return
        self._stopping = asyncio.get_running_loop().create_task(self._stop())

    async def _stop(self) -> None:
        try:
            if self._drain is not None:
                log.info("draining, at most %.0f s", self._grace_s)
                await asyncio.wait_for(self._drain(), self._grace_s)
        except asyncio.TimeoutError:
            log.warning("still busy after %.0f s: stopping anyway", self._grace_s)
        except Exception:
            log.exception("drain failed: stopping anyway")
        finally:
            self.should_exit = True


async def serve(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    sock: socket.socket | None = None,
    drain: Drain | None = None,
    grace_s: float = 30.0,
    max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
    on_started: Callable[[int], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM (or cancelled), then run `drain` for at most `grace_s`, and return.

    `on_started(port)` is called once connections are accepted. `sock`: from `bind`, instead of host and port.
    """
    listener = sock if sock is not None else bind(host, port)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        ws_max_size=max_frame_bytes,
        ws_ping_interval=None,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=5,
        lifespan="on",
    )
    # "WebSocket accepted", "Started server process": the roles log what matters themselves.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    server = _Server(config, drain, grace_s)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        while not server.started and not serving.done():
            await asyncio.wait([serving], timeout=0.01)
        if server.started and on_started is not None:
            on_started(listener.getsockname()[1])
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving
        raise
    finally:
        listener.close()


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a role's main coroutine, on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)
