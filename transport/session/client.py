"""The router's end of a session: connects, attaches, pings, and reconnects until cancelled."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import websockets
from websockets.asyncio.client import ClientConnection, connect

from transport.auth import bearer
from transport.errors import AuthenticationFailed, HawkError, ProtocolError, WorkerLost
from transport.messages import PROTOCOL_VERSION, Attach, Hello, Message, Ping, Tokens
from transport.session.frames import DEFAULT_MAX_FRAME_BYTES, decode, encode
from transport.session.liveness import Liveness
from transport.session.outbox import DEFAULT_MAX_QUEUE_BYTES, Outbox

log = logging.getLogger(__name__)

SESSION_PATH = "/v1/session"

SLOW_TO_COME_UP = 10
"""Failed tries after which a worker that never answered is worth a warning."""

_Called = Awaitable[None] | None


class SessionClient:
    """One session to one worker, over as many connections as it takes. Used in one event loop's thread.

    Callbacks (plain or async, called one at a time, in the order of the wire):
    - `on_hello(hello)`: attached; a `generation` other than the last means that the worker was restarted and
      has forgotten everything;
    - `on_message(message)`: everything else, `Pong` (with the worker's status) included. An exception in it
      ends the connection, because a message half taken would otherwise be silently lost;
    - `on_down(error)`: an attached session broke: all that the worker held for this router is gone.
    """

    def __init__(
        self,
        url: str,
        token: str,
        router_name: str,
        generation: str,
        *,
        on_hello: Callable[[Hello], _Called],
        on_message: Callable[[Message | Tokens], _Called],
        on_down: Callable[[HawkError], _Called],
        ping_interval_s: float = 1.0,
        dead_after_s: float = 5.0,
        backoff_initial_s: float = 0.1,
        backoff_max_s: float = 5.0,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        max_queue_bytes: int = DEFAULT_MAX_QUEUE_BYTES,
    ) -> None:
        """`url` is the worker's base URL (http://host:port or ws://host:port)."""
        self.url = url
        self.hello: Hello | None = None
        self.error: HawkError | None = None
        self._address = session_url(url)
        self._token = token
        self._attach = Attach(protocol=PROTOCOL_VERSION, router=router_name, generation=generation)
        self._on_hello, self._on_message, self._on_down = on_hello, on_message, on_down
        self._ping_interval_s, self._dead_after_s = ping_interval_s, dead_after_s
        self._backoff_initial_s, self._backoff_max_s = backoff_initial_s, backoff_max_s
        self._max_frame_bytes, self._max_queue_bytes = max_frame_bytes, max_queue_bytes
        self._outbox: Outbox | None = None
        self._dropped: asyncio.Future[None] | None = None

    @property
    def connected(self) -> bool:
        """Attached, and not known to be broken. `hello` is then the worker's; else `error` says why not."""
        return self._outbox is not None

    def send(self, message: Message | Tokens) -> None:
        """Queue a message; never blocks. Raises WorkerLost when not connected or when the worker does not read."""
        if self._outbox is None:
            raise WorkerLost(f"worker at {self.url} is not connected: {self.error or 'never was'}")
        if not self._outbox.put(encode(message)):
            error = WorkerLost(f"worker at {self.url} does not read: {self._outbox.queued_bytes} bytes are waiting")
            self._drop(error)
            raise error

    async def run(self) -> None:
        """Keep the session up until cancelled; a broken or refused connection is tried again with backoff."""
        failures = 0
        while True:
            started = time.monotonic()
            error, was_up = await self._once()
            # A session that breaks as soon as it is up must not be retried in a tight loop.
            if was_up and time.monotonic() - started >= min(1.0, self._dead_after_s):
                failures = 0
            delay = min(self._backoff_max_s, self._backoff_initial_s * 2 ** min(failures, 16))
            log.log(
                _level(error, was_up, failures), "session to %s: %s; next try in at most %.1f s", self.url, error, delay
            )
            failures += 1
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))

    async def _once(self) -> tuple[HawkError, bool]:
        """One connection, from connecting to its end → (why it ended, whether it was attached)."""
        was_up = False
        try:
            async with connect(
                self._address,
                additional_headers={"Authorization": bearer(self._token)},
                compression=None,
                proxy=None,
                open_timeout=self._dead_after_s,
                close_timeout=1.0,
                ping_interval=None,
                max_size=self._max_frame_bytes,
            ) as connection:
                hello = await asyncio.wait_for(self._greet(connection), self._dead_after_s)
                was_up = True
                try:
                    await self._attached(connection, hello)
                    raise WorkerLost("session ended")
                except Exception as error:
                    # Before the connection is closed: with a dead peer that may take its whole timeout.
                    self.error = self._as_hawk_error(error)
                    await self._down(self.error)
                    raise self.error from error
        except Exception as error:
            self.error = self._as_hawk_error(error)
            return self.error, was_up
        finally:
            self._outbox = None
            self._dropped = None

    async def _greet(self, connection: ClientConnection) -> Hello:
        await connection.send(encode(self._attach))
        message = decode(_binary(await connection.recv()))
        if not isinstance(message, Hello):
            raise ProtocolError(f"the worker's first message must be Hello, not {type(message).__name__}")
        if message.protocol != PROTOCOL_VERSION:
            raise ProtocolError(
                f"protocol mismatch: router speaks version {PROTOCOL_VERSION}, worker version {message.protocol}"
            )
        return message

    async def _attached(self, connection: ClientConnection, hello: Hello) -> None:
        """Runs the session until one of its parts ends, and raises that part's error."""
        self.hello, self.error = hello, None
        self._outbox = Outbox(self._max_queue_bytes)
        self._dropped = asyncio.get_running_loop().create_future()
        liveness = Liveness(self._dead_after_s)
        tasks: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(part)
            for part in (
                self._read(connection, hello, liveness),
                self._outbox.drain(connection.send),
                self._ping(),
                self._watch(liveness),
            )
        ]
        tasks.append(self._dropped)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except WorkerLost:
            # A peer that is silent or does not read would not answer a close handshake either.
            connection.transport.abort()
            raise
        finally:
            self._outbox = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, connection: ClientConnection, hello: Hello, liveness: Liveness) -> None:
        await _call(self._on_hello, hello)
        while True:
            message = decode(_binary(await connection.recv()))
            liveness.heard()
            await _call(self._on_message, message)

    async def _ping(self) -> None:
        seq = 0
        while True:
            await asyncio.sleep(self._ping_interval_s)
            seq += 1
            self.send(Ping(seq=seq))

    async def _watch(self, liveness: Liveness) -> None:
        silence = await liveness.wait_until_dead()
        raise WorkerLost(f"no frame from the worker for {silence:.1f} s")

    def _drop(self, error: WorkerLost) -> None:
        self._outbox = None
        self.error = error
        if self._dropped is not None and not self._dropped.done():
            self._dropped.set_exception(error)

    async def _down(self, error: HawkError) -> None:
        try:
            await _call(self._on_down, error)
        except Exception:
            log.exception("on_down for %s failed", self.url)

    def _as_hawk_error(self, error: Exception) -> HawkError:
        if isinstance(error, HawkError):
            return error
        if isinstance(error, websockets.InvalidStatus):
            status = error.response.status_code
            if status in (401, 403):
                return AuthenticationFailed(f"worker at {self.url} refused the cluster token (HTTP {status})")
            return WorkerLost(f"worker at {self.url} answered HTTP {status} to the session request")
        if isinstance(error, websockets.ConnectionClosed):
            close = error.rcvd
            why = f"closed by the worker: {close.reason or close.code}" if close else "connection lost"
            return WorkerLost(f"worker at {self.url}: {why}")
        if isinstance(error, asyncio.TimeoutError):
            return WorkerLost(f"worker at {self.url} did not answer within {self._dead_after_s:g} s")
        if isinstance(error, (OSError, websockets.WebSocketException)):
            return WorkerLost(f"worker at {self.url}: {error}")
        log.error("session to %s failed", self.url, exc_info=error)
        return HawkError(f"session to {self.url} failed: {type(error).__name__}: {error}")


def _level(error: HawkError, was_up: bool, failures: int) -> int:
    """A worker that is still starting is no reason to warn; one that broke, refuses us or does not come up is: once."""
    if was_up or failures == SLOW_TO_COME_UP:
        return logging.WARNING
    if failures == 0:
        return logging.INFO if isinstance(error, WorkerLost) else logging.WARNING
    return logging.DEBUG


def session_url(url: str) -> str:
    """The session's WebSocket URL from a worker's base URL. Raises ValueError for another scheme."""
    scheme, separator, rest = url.rstrip("/").partition("://")
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if not separator or scheme not in schemes or not rest:
        raise ValueError(f"worker URL must look like http://host:port, got {url!r}")
    return f"{schemes[scheme]}://{rest}{SESSION_PATH}"


def _binary(frame: str | bytes) -> bytes:
    if isinstance(frame, str):
        raise ProtocolError("text frame: a session speaks binary frames only")
    return frame


async def _call(callback: Callable[[Any], _Called], argument: object) -> None:
    result = callback(argument)
    if inspect.isawaitable(result):
        await result
