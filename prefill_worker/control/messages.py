"""What the service and the engine's processes say to each other, besides `transport.messages`.

Reused from there: `OpenPool`, `ClosePool`, `PoolOpened`, `PoolRefused`, `Cancel`, `Pushed` and `Failed`; their
`request_id` is the transfer id here. Both ends are always of one build, so nothing is versioned.
"""

from __future__ import annotations

from typing import Literal

from transport.geometry.floats import SourceDtype
from transport.messages import (
    Cancel,
    ClosePool,
    Failed,
    Message,
    Natural,
    OpenPool,
    PoolOpened,
    PoolRefused,
    Positive,
    Pushed,
    Writer,
)


class LocalKV(Message):
    """The engine's KV cache on one rank."""

    num_layers: Positive
    num_kv_heads: Positive
    head_dim: Positive
    block_size: Positive
    num_blocks: Positive
    dtype: SourceDtype


class Joined(Message):
    """Engine → service, first: one half of the connector is up. `kv` comes from workers."""

    part: Literal["scheduler", "worker"]
    rank: Natural
    pid: Positive
    kv: LocalKV | None = None


class Start(Message):
    """Service → engine, answer to `Joined`: all that pushing needs, the cluster token among it."""

    token: str
    writer: Writer
    fingerprint: str
    hold_ttl_s: float
    push_chunk_bytes: Positive
    push_threads: Positive
    rdma_devices: tuple[str, ...] = ()
    push_staging_bytes: Positive


class DataPlane(Message):
    """Engine → service, after each push: totals of the data plane over all connections of this process, by event."""

    counters: dict[str, Natural]


class Held(Message):
    """Engine's scheduler → service: finished requests whose blocks a push still holds."""

    requests: Natural
    blocks: Natural


MESSAGES: dict[str, type[Message]] = {
    cls.__name__: cls
    for cls in (Joined, Start, Held, DataPlane, OpenPool, ClosePool, PoolOpened, PoolRefused, Cancel, Pushed, Failed)
}
