"""Data-plane backends: each moves bytes one-sided from a prefill worker into a decode worker's regions."""

from __future__ import annotations

from transport.backends.base import OnLost, PoolWriter, WriterOptions
from transport.errors import ConfigurationError
from transport.messages import PoolDescription, Writer


def connect(
    pool: PoolDescription,
    writer: Writer,
    token: str,
    *,
    on_lost: OnLost | None = None,
    options: WriterOptions | None = None,
) -> PoolWriter:
    """Connect to a pool by the backend that its endpoint names; blocks for at most some seconds.

    `on_lost(reason)` is called once, in a thread of the backend, when the pool goes away later.
    Raises AuthenticationFailed, StaleGeneration, GeometryMismatch, ProtocolError, PushFailed (cannot connect),
    ConfigurationError (a backend that is not available here).
    """
    if pool.endpoint.backend == "shm":
        from transport.backends import shm

        return shm.connect(pool, writer, token, on_lost=on_lost)
    if pool.endpoint.backend == "verbs":
        from transport.backends.verbs import writer as verbs

        return verbs.connect(pool, writer, token, on_lost=on_lost, options=options)
    if pool.endpoint.backend == "nixl":
        from transport.backends.nixl import writer as nixl

        return nixl.connect(pool, writer, token, on_lost=on_lost, options=options)
    raise ConfigurationError(
        f"data-plane backend {pool.endpoint.backend!r} of pool {pool.worker} is not available here"
    )
