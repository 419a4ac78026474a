"""One lease: its states, and all that its decode worker knows of it."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from decode_worker.coverage import Coverage
from decode_worker.staging import Slots
from transport.backends.base import Piece
from transport.messages import Decode, Message, Tokens, Writer


class Owner(Protocol):
    """The router session that a lease belongs to."""

    def send(self, message: Message | Tokens) -> None: ...

    def __hash__(self) -> int: ...


class LeaseState(str, Enum):
    RESERVED = "reserved"
    """Blocks taken, the writer may begin."""
    WRITING = "writing"
    """The writer has begun."""
    LANDED = "landed"
    """The KV is in place, behind the device's barrier."""
    DECODING = "decoding"
    """Handed to the scheduler."""
    FENCING = "fencing"
    """Ended; waits until nothing can touch its blocks."""
    FREED = "freed"


@dataclass(slots=True, eq=False)
class Inbound:
    """What a lease's writer has announced. `pieces`: kv_path host, those that are not in their blocks yet; else those
    whose checksum is still to be compared.

    `announced` counts all pieces, `placed` those that have left their slot; `placing`: a thread is at it.
    `landed`: the writer is done.
    """

    coverage: Coverage
    pieces: deque[Piece] = field(default_factory=deque)
    announced: int = 0
    placed: int = 0
    placing: bool = False
    landed: bool = False


@dataclass(slots=True, eq=False)
class LeaseRecord:
    """One lease as its decode worker sees it. Times are those of the table's clock, in seconds."""

    id: str
    request_id: str
    owner: Owner
    arrival: int
    """Order of reservation."""
    preemptions: int
    """How often its request was preempted before."""
    writer: Writer
    prompt_tokens: int
    resident_tokens: int
    block_hashes: tuple[bytes, ...]
    tail_tokens: tuple[int, ...]
    blocks: list[int]
    created: float
    deadline: float
    staging: Slots | None = None
    inbound: Inbound | None = None
    written: float = 0.0
    """When the writer's last byte was there."""
    state: LeaseState = LeaseState.RESERVED
    decode: Decode | None = None
    pins: int = 0
    granted: bool = False
    """The writer holds the right to write: only a fence, or its own completion, ends that."""


@dataclass(frozen=True)
class LeaseLimits:
    """`ttl_s`: life without a refresh. `max_hold_s`: longest time from reservation to decoding, however
    often refreshed. `watermark`: share of the pool that admission leaves for running requests to grow into.
    """

    ttl_s: float = 30.0
    max_hold_s: float = 300.0
    watermark: float = 0.02


@dataclass
class LeaseCounts:
    """Totals since the start; `ended` by the name of what ended the lease."""

    ended: Counter[str] = field(default_factory=Counter)
    fences: int = 0
    fence_errors: int = 0
    late: Counter[str] = field(default_factory=Counter)
    """Messages and events about leases that are no more, by kind."""
