"""Errors as clients see them: OpenAI error objects, with the right status, before or inside a stream."""

from __future__ import annotations

import json
import logging

from transport.errors import HawkError
from transport.http import error_payload

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
JSON_HEADERS = [(b"content-type", b"application/json")]


def hawk_error(error: BaseException) -> HawkError:
    """Anything else is a fault of ours: logged whole, shown without its insides."""
    if isinstance(error, HawkError):
        return error
    log.error("request failed", exc_info=error)
    return HawkError("internal error, see the log")


def http_status(error: HawkError) -> int:
    """A conflict between workers is not the client's: it becomes 502."""
    clients = error.type in ("invalid_request_error", "authentication_error")
    return error.status if clients or error.status >= 500 else 502


def error_json(error: HawkError) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """(status, headers, body) of an answer that is an error."""
    status, headers = http_status(error), list(JSON_HEADERS)
    if status == 503:
        headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return status, headers, json.dumps(error_payload(error)).encode()


def error_event(error: HawkError) -> bytes:
    """The server-sent event that ends a stream which failed."""
    return b"data: " + json.dumps(error_payload(error)).encode() + b"\n\n"
