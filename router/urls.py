"""Worker URLs, as they are set or posted."""

from __future__ import annotations

from urllib.parse import urlsplit


def worker_url(url: str) -> str:
    """The URL without a trailing slash. Raises ValueError unless it is http(s)://host:port with nothing after it."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{url[:200]!r} is not a worker URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError(f"{url[:200]!r} is not a worker URL like http://host:port")
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username or parts.password:
        raise ValueError(f"{url[:200]!r} must be a bare http://host:port")
    return url.rstrip("/")
