"""HTTP base of every role: errors in one shape, token check, body limit, probes, metrics, the session endpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transport.auth import check_bearer
from transport.errors import AuthenticationFailed, BodyTimeout, HawkError, PayloadTooLarge
from transport.messages import Role
from transport.serve import bind, run, serve
from transport.session.client import SESSION_PATH
from transport.session.server import SessionHandler, SessionServer
from transport.settings import BaseRoleSettings

__all__ = [
    "BodyLimit",
    "TokenAuth",
    "add_probes",
    "bind",
    "error_body",
    "error_payload",
    "error_response",
    "install_error_handlers",
    "json_response",
    "run",
    "secure",
    "serve",
    "worker_app",
]

_MAX_MESSAGE_CHARS = 2000
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: PayloadTooLarge.code}


# ---- errors ----------------------------------------------------------------------------------------


def error_body(message: str, type: str, code: str, param: str | None = None) -> dict[str, Any]:
    """The one shape of an error: OpenAI's."""
    return {"error": {"message": message[:_MAX_MESSAGE_CHARS], "type": type, "code": code, "param": param}}


def error_payload(error: HawkError) -> dict[str, Any]:
    """`error_body` of a HawkError; also what an SSE error event carries."""
    return error_body(error.message, error.type, error.code, error.param)


def json_response(status: int, body: object, headers: Mapping[str, str] | None = None) -> Response:
    """ASCII JSON, so that lone surrogates echoed out of a request cannot break the answer."""
    return Response(json.dumps(body).encode(), status, headers, media_type="application/json")


def error_response(error: HawkError) -> Response:
    """The HTTP answer for a HawkError."""
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    return json_response(error.status, error_payload(error), headers)


def install_error_handlers(app: FastAPI) -> None:
    """Every error of `app` leaves in the one JSON shape: HawkError, bad input (400), 404, 405, and 500."""

    async def hawk_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HawkError)
        return error_response(error)

    async def bad_input(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        if first["type"] == "json_invalid":
            detail = (first.get("ctx") or {}).get("error", "")
            return json_response(
                400, error_body(f"the body is not valid JSON: {detail}", "invalid_request_error", "invalid_json")
            )
        message = f"{where}: {first['msg']}" if where else str(first["msg"])
        return json_response(400, error_body(message, "invalid_request_error", "invalid_request", where or None))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        code = _HTTP_CODES.get(error.status_code, "http_error")
        message = f"{error.detail}: {request.method} {request.url.path}"
        return json_response(error.status_code, error_body(message, kind, code), error.headers)

    async def internal(request: Request, error: Exception) -> Response:
        return json_response(500, error_body("internal error, see the log", "server_error", HawkError.code))

    app.add_exception_handler(HawkError, hawk_error)
    app.add_exception_handler(RequestValidationError, bad_input)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, internal)


# ---- middleware ------------------------------------------------------------------------------------


class BodyLimit:
    """Reads each request's body before the app runs; answers 413 as soon as it is over the limit, 408 if it takes
    longer than `timeout_s` seconds.

    Reading it here costs no copy that JSON parsing would not make, and holds for chunked bodies too.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            whole = await asyncio.wait_for(self._read(scope, receive), self._timeout_s)
        except asyncio.TimeoutError:
            late = BodyTimeout(f"the request body did not arrive within {self._timeout_s:g} s")
            await error_response(late)(scope, receive, send)
            return
        except PayloadTooLarge as error:
            await error_response(error)(scope, receive, send)
            return
        if whole is None:
            return
        body: Message | None = {"type": "http.request", "body": whole, "more_body": False}

        async def replay() -> Message:
            nonlocal body
            if body is not None:
                event, body = body, None
                return event
            return await receive()

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body, None if the client has left. Raises PayloadTooLarge."""
        error = PayloadTooLarge(f"the request body is over the limit of {self._max_bytes} bytes")
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._max_bytes:
                raise error
        chunks, size, more = [], 0, True
        while more:
            event = await receive()
            if event["type"] == "http.disconnect":
                return None
            chunk = event.get("body", b"")
            size += len(chunk)
            if size > self._max_bytes:
                raise error
            chunks.append(chunk)
            more = event.get("more_body", False)
        return b"".join(chunks)


class TokenAuth:
    """Refuses HTTP requests (401) and WebSockets (403, before accept) without the token, but for `open_paths`."""

    def __init__(self, app: ASGIApp, token: str, open_paths: frozenset[str]) -> None:
        self._app = app
        self._token = token
        self._open = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        header = next((value for name, value in scope["headers"] if name == b"authorization"), None)
        try:
            check_bearer(header.decode("latin-1") if header is not None else None, self._token)
        except AuthenticationFailed as error:
            if scope["type"] == "http":
                await error_response(error)(scope, receive, send)
            else:  # before accept: becomes HTTP 403
                await send({"type": "websocket.close", "code": 1008, "reason": error.message})
            return
        await self._app(scope, receive, send)


# ---- probes and metrics ----------------------------------------------------------------------------


def add_probes(app: FastAPI, ready: Callable[[], str | None], registry: CollectorRegistry) -> None:
    """`/health` (the process answers), `/ready` (503 with the reason that `ready` returns), `/metrics`."""

    @app.get("/health")
    async def health() -> Response:
        return json_response(200, {"status": "ok"})

    @app.get("/ready")
    async def is_ready() -> Response:
        reason = ready()
        if reason is None:
            return json_response(200, {"status": "ready"})
        return json_response(503, error_body(reason, "overloaded_error", "not_ready"))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def worker_app(
    role: Role,
    settings: BaseRoleSettings,
    handler: SessionHandler,
    *,
    info: Callable[[], Mapping[str, Any]],
    ready: Callable[[], str | None],
    registry: CollectorRegistry,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    """The app of a worker: `/v1/session`, `/v1/info`, `/health`, `/ready`, `/metrics`.

    `info()` is the JSON of `/v1/info`; `ready()` returns None, or why the worker is not ready. The sessions
    are at `app.state.sessions` (a `SessionServer`).
    """
    app = FastAPI(title=f"hawk {role}", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    sessions = SessionServer(handler, dead_after_s=settings.dead_after_s, max_queue_bytes=settings.max_queue_bytes)
    app.state.sessions = sessions
    install_error_handlers(app)
    add_probes(app, ready, registry)

    @app.get("/v1/info")
    async def get_info() -> Response:
        return json_response(200, dict(info()))

    app.add_api_websocket_route(SESSION_PATH, sessions.serve)
    secure(app, settings)
    return app


def secure(app: FastAPI, settings: BaseRoleSettings) -> None:
    """Body limit and token check (the token is checked first); call it once, last."""
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)
    open_paths = {"/health", "/ready"} | ({"/metrics"} if settings.metrics_public else set())
    app.add_middleware(TokenAuth, token=settings.secret, open_paths=frozenset(open_paths))
