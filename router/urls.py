"""Worker URLs, as they are set or posted."""

from __future__ import annotations

import re
from ipaddress import IPv6Address

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_URL = re.compile(rf"https?://(?:(?P<name>{_LABEL}(?:\.{_LABEL})*)|\[(?P<v6>[0-9a-f:.]+)\])(?::(?P<port>\d{{1,5}}))?")


def worker_url(url: str) -> str:
    """The URL in lower case, without a trailing slash.

    Raises ValueError unless it is http(s)://host:port with nothing before, between or after.
    """
    plain = url.lower().removesuffix("/")
    match = _URL.fullmatch(plain) if plain.isascii() else None
    if match is None or len(match["name"] or "") > 253:
        raise ValueError(f"{url[:200]!r} is not a worker URL: it must be a bare http://host:port")
    if match["port"] is not None and not 0 < int(match["port"]) < 1 << 16:
        raise ValueError(f"{url[:200]!r} is not a worker URL: its port must be from 1 to 65535")
    if match["v6"] is not None:
        try:
            IPv6Address(match["v6"])
        except ValueError as error:
            raise ValueError(f"{url[:200]!r} is not a worker URL: {error}") from None
    return plain
