"""The worker's end of a session: accepts routers, answers their pings, hands their messages over in order."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.websockets import WebSocket, WebSocketDisconnect

from transport.errors import HawkError, ProtocolError
from transport.messages import (
    PROTOCOL_VERSION,
    Attach,
    ErrorInfo,
    Failed,
    Hello,
    Message,
    Ping,
    Pong,
    Status,
    Tokens,
)
from transport.session.frames import decode, encode
from transport.session.liveness import Liveness
from transport.session.outbox import DEFAULT_MAX_QUEUE_BYTES, Outbox

log = logging.getLogger(__name__)

CLOSE_PROTOCOL = 4000
CLOSE_VERSION = 4001
CLOSE_SILENT = 4002
CLOSE_SLOW = 4003
CLOSE_REPLACED = 4004
CLOSE_INTERNAL = 4005
_MAX_REASON_BYTES = 120
_INBOX_MESSAGES = 1024


class SessionHandler(Protocol):
    """What a worker does with its sessions. All calls come in the event loop's thread."""

    def hello(self) -> Hello:
        """Sent to each router that attaches."""

    def status(self) -> Status:
        """Sent with each Pong; must be cheap."""

    async def on_open(self, session: Session) -> None: ...

    async def on_message(self, session: Session, message: Message | Tokens) -> None:
        """Called in order per session. `Ping` comes too, already answered: it refreshes the router's leases.

        A HawkError (or any other exception) becomes `Failed` if the message names a request; otherwise it
        closes the session.
        """

    async def on_close(self, session: Session) -> None:
        """The router is gone: free all that this session had here. Called once after `on_open` was.

        The same router may have attached anew by then: what it has belongs to the session, not to its name.
        """


class Session:
    """One attached router."""

    _ids = itertools.count(1)

    def __init__(self, attach: Attach, max_queue_bytes: int = DEFAULT_MAX_QUEUE_BYTES) -> None:
        self.id = next(self._ids)
        self.router = attach.router
        self.generation = attach.generation
        self.outbox = Outbox(max_queue_bytes)
        self.ended: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()

    @property
    def open(self) -> bool:
        return not self.ended.done()

    def send(self, message: Message | Tokens) -> None:
        """Queue a message: never blocks, keeps the order, does nothing on an ended session.

        Call it in the event loop's thread. A router that does not read is dropped once the queue is full.
        """
        if self.open and not self.outbox.put(encode(message)):
            self.end(CLOSE_SLOW, f"router {self.router} does not read: {self.outbox.queued_bytes} bytes are waiting")

    def end(self, code: int, reason: str) -> None:
        """End the session; the first reason counts."""
        if not self.ended.done():
            self.ended.set_result((code, reason))

    def __repr__(self) -> str:
        return f"<session {self.id} of {self.router}/{self.generation}>"


class SessionServer:
    """All sessions of one worker."""

    def __init__(
        self,
        handler: SessionHandler,
        *,
        dead_after_s: float = 5.0,
        attach_timeout_s: float = 5.0,
        max_queue_bytes: int = DEFAULT_MAX_QUEUE_BYTES,
    ) -> None:
        self.handler = handler
        self.sessions: dict[int, Session] = {}
        self._dead_after_s = dead_after_s
        self._attach_timeout_s = attach_timeout_s
        self._max_queue_bytes = max_queue_bytes

    def broadcast(self, message: Message | Tokens) -> None:
        """Send to every attached router."""
        for session in list(self.sessions.values()):
            session.send(message)

    async def serve(self, websocket: WebSocket) -> None:
        """Run one session over an authenticated WebSocket; returns when it has ended."""
        await websocket.accept()
        try:
            attach = await asyncio.wait_for(self._attach(websocket), self._attach_timeout_s)
        except asyncio.TimeoutError:
            await _close(websocket, CLOSE_PROTOCOL, f"no Attach within {self._attach_timeout_s:g} s")
            return
        except ProtocolError as error:
            log.warning("session refused: %s", error)
            await _close(websocket, CLOSE_PROTOCOL, error.message)
            return
        except WebSocketDisconnect:
            return
        if attach.protocol != PROTOCOL_VERSION:
            reason = f"protocol mismatch: router speaks version {attach.protocol}, worker version {PROTOCOL_VERSION}"
            log.error("session of %s refused: %s", attach.router, reason)
            await _close(websocket, CLOSE_VERSION, reason)
            return
        session = Session(attach, self._max_queue_bytes)
        try:
            session.send(self.handler.hello())
        except Exception as error:
            log.exception("no Hello for %s", attach.router)
            await _close(websocket, CLOSE_INTERNAL, f"{type(error).__name__}: {error}")
            return
        self._replace(session)
        await self._run(session, websocket)

    async def _attach(self, websocket: WebSocket) -> Attach:
        message = decode(await _receive(websocket))
        if not isinstance(message, Attach):
            raise ProtocolError(f"the first message must be Attach, not {type(message).__name__}")
        return message

    def _replace(self, session: Session) -> None:
        """A router process has one session; when it comes back, the broken one before it is over."""
        for other in self.sessions.values():
            if (other.router, other.generation) == (session.router, session.generation):
                other.end(CLOSE_REPLACED, "the router attached anew")
        self.sessions[session.id] = session

    async def _run(self, session: Session, websocket: WebSocket) -> None:
        inbox: asyncio.Queue[Message | Tokens] = asyncio.Queue(_INBOX_MESSAGES)
        liveness = Liveness(self._dead_after_s)
        handling = asyncio.create_task(self._guard(session, lambda: self._handle(session, inbox)))
        tasks = [
            asyncio.create_task(self._guard(session, part))
            for part in (
                lambda: self._read(session, websocket, inbox, liveness),
                lambda: session.outbox.drain(websocket.send_bytes),
                lambda: self._watch(session, liveness),
            )
        ]
        code, reason = CLOSE_INTERNAL, "worker is shutting down"
        try:
            code, reason = await session.ended
        finally:
            session.end(code, reason)
            self.sessions.pop(session.id, None)
            log.info("%r ended: %s", session, reason)
            for task in (handling, *tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await _close(websocket, code, reason)  # not after the clean-up, which may have to wait for a fence
            await asyncio.gather(handling, return_exceptions=True)

    async def _guard(self, session: Session, part: Callable[[], Awaitable[None]]) -> None:
        """Whatever ends one part of a session ends the session, with the reason, and nothing else."""
        try:
            await part()
        except WebSocketDisconnect as gone:
            session.end(gone.code, " ".join(filter(None, ("connection closed:", str(gone.code), gone.reason))))
        except ProtocolError as error:
            session.end(CLOSE_PROTOCOL, error.message)
        except Exception as error:
            if session.open:
                log.exception("%r failed", session)
            session.end(CLOSE_INTERNAL, f"{type(error).__name__}: {error}")

    async def _read(
        self, session: Session, websocket: WebSocket, inbox: asyncio.Queue[Message | Tokens], liveness: Liveness
    ) -> None:
        while True:
            message = decode(await _receive(websocket))
            liveness.heard()
            if isinstance(message, Ping):
                session.send(Pong(seq=message.seq, status=self.handler.status()))
            await inbox.put(message)

    async def _handle(self, session: Session, inbox: asyncio.Queue[Message | Tokens]) -> None:
        try:
            await self.handler.on_open(session)
            while True:
                message = await inbox.get()
                try:
                    await self.handler.on_message(session, message)
                except Exception as error:
                    request_id = getattr(message, "request_id", None)
                    if request_id is None:
                        raise
                    if not isinstance(error, HawkError):
                        log.exception("%s of request %s failed", type(message).__name__, request_id)
                    session.send(Failed(request_id=request_id, error=ErrorInfo.of(error)))
        except Exception as error:
            log.exception("%r failed", session)
            session.end(CLOSE_INTERNAL, f"{type(error).__name__}: {error}")
        finally:
            # Shielded: the router's requests must be freed even while this task is being cancelled.
            await asyncio.shield(asyncio.ensure_future(self._closed(session)))

    async def _closed(self, session: Session) -> None:
        try:
            await self.handler.on_close(session)
        except Exception:
            log.exception("clean-up after %r failed", session)

    async def _watch(self, session: Session, liveness: Liveness) -> None:
        silence = await liveness.wait_until_dead()
        session.end(CLOSE_SILENT, f"no frame from router {session.router} for {silence:.1f} s")


async def _receive(websocket: WebSocket) -> bytes:
    event = await websocket.receive()
    if event["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(event.get("code", 1005), event.get("reason"))
    frame = event.get("bytes")
    if frame is None:
        raise ProtocolError("text frame: a session speaks binary frames only")
    assert isinstance(frame, bytes)
    return frame


async def _close(websocket: WebSocket, code: int, reason: str) -> None:
    """Say why, as far as the peer still listens; a peer that does not read cannot hold us up."""
    short = reason.encode()[:_MAX_REASON_BYTES].decode(errors="ignore")
    try:
        await asyncio.wait_for(websocket.close(code, short), 1.0)
    except Exception as error:
        log.debug("close frame not delivered: %s", error)
