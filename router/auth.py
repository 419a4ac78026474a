"""Who may call what: client keys on /v1, the cluster token on administration and metrics, probes for all."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from transport.auth import check_bearer
from transport.errors import AuthenticationFailed
from transport.http import error_response

OPEN = frozenset({"/health", "/ready"})


class RouterAuth:
    """ASGI middleware. Without `api_keys` every client may use /v1; with `metrics_public` everyone reads /metrics."""

    def __init__(self, app: ASGIApp, token: str, api_keys: Sequence[str], metrics_public: bool) -> None:
        self._app = app
        self._token = token
        self._keys = [key.encode() for key in api_keys]
        self._open = OPEN | ({"/metrics"} if metrics_public else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except AuthenticationFailed as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        path = scope["path"]
        if path in self._open:
            return
        if path in ("/workers", "/metrics"):
            check_bearer(_authorization(scope), self._token)
        elif self._keys and path.startswith("/v1/"):
            scheme, _, key = (_authorization(scope) or "").partition(" ")
            given = key.strip().encode("utf-8", "surrogateescape")
            known = [hmac.compare_digest(given, expected) for expected in self._keys]
            if scheme.lower() != "bearer" or not any(known):
                raise AuthenticationFailed("missing or wrong API key: send `Authorization: Bearer <key>`")


def _authorization(scope: Scope) -> str | None:
    header = next((value for name, value in scope["headers"] if name == b"authorization"), None)
    return None if header is None else header.decode("latin-1")
