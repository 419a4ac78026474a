"""The data-plane protocol: one-sided writes from a prefill worker into a decode worker's regions.

P side (synchronous, called from the pusher's thread): a `PoolWriter` per (P rank, pool), a `LeaseWriter`
per lease. D side (asyncio): one `Receiver` per pool. Every backend passes the same contract test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from transport.messages import Endpoint, Lease, Writer


@dataclass(frozen=True, slots=True)
class Run:
    """One write of the transfer plan: `length` bytes of the staging buffer into one region."""

    region: int
    """Index of the target: a channel, or (kv_path host/contiguous) 0 for the staging region."""
    local_offset: int
    remote_offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What an announcement speaks of: tokens [start, stop) of tensors [first_tensor, last_tensor) are in place.

    `digests`: xxh3_64 of the bytes that the piece's runs put into each region, in order of the runs (0 where there
    are none); empty where the pool asks for no checksums.
    """

    start: int
    stop: int
    first_tensor: int
    last_tensor: int
    digests: tuple[int, ...] = ()


class LeaseWriter(Protocol):
    """Writes one lease. Not thread-safe: one thread at a time, but for `abort`."""

    @property
    def mapped(self) -> Sequence[np.ndarray] | None:
        """uint8 views of the target regions where the backend can store into them in place, else None.

        A caller that stores through them does so inside `chunk()`.
        """

    def chunk(self) -> AbstractContextManager[None]:
        """A bounded piece of storing through `mapped` (aim at a few ms). Raises LeaseRevoked if the lease was fenced.

        While a chunk is open a fence waits for it.
        """

    def count(self, num_bytes: int) -> None:
        """Account for bytes stored through `mapped`; `write` does so itself."""

    def stage(self, num_bytes: int) -> np.ndarray:
        """uint8 buffer to fill and hand to one `write`, in memory that the backend sends from without a copy.

        It begins on a cache line. Waits while all such memory is under way. Raises LeaseRevoked, PushFailed.
        """

    def write(self, staging: np.ndarray, runs: Sequence[Run]) -> None:
        """Write the runs out of `staging` (uint8, 1-D).

        A buffer from `stage` belongs to the backend from now on, any other may be reused when this returns.
        Raises LeaseRevoked when fenced, PushFailed when the peer is gone or a run leaves its region.
        """

    def announce(self, piece: Piece) -> None:
        """Have D told of `piece` once all that was written before is in place. Raises LeaseRevoked, PushFailed."""

    def wait_drained(self, count: int, timeout_s: float) -> None:
        """Wait until D has taken `count` announced pieces out of their staging. Raises LeaseRevoked, PushFailed."""

    def complete(self, timeout_s: float) -> None:
        """Say that everything was written and wait until D acknowledges. Raises LeaseRevoked, PushFailed."""

    def abort(self, reason: str) -> None:
        """Give up: D learns the reason and frees the lease. Never raises; idempotent; from any thread."""


class PoolWriter(Protocol):
    """The connection of one prefill process to one pool. Thread-safe.

    `counters`: totals of bytes, writes, completions, revoked, aborts, failures by cause (`failed_…`).
    `nics`: (device, port) of the RDMA NICs that it sends by.
    """

    counters: Counter[str]
    nics: Sequence[tuple[str, int]]

    @property
    def alive(self) -> bool: ...

    def open(self, lease: Lease) -> LeaseWriter:
        """Raises StaleGeneration, LeaseRevoked (unknown or fenced), PushFailed (peer gone)."""

    def close(self) -> None:
        """Disconnect; idempotent. Leases that are still open count as aborted."""


class ReceiverEvents(Protocol):
    """What a `Receiver` tells its owner; called in the event loop's thread."""

    def announced(self, lease_id: str, piece: Piece) -> None:
        """The piece, and whatever the writer wrote before it, is in place; comes in the writer's order."""

    def landed(self, lease_id: str) -> None:
        """The writer's last byte is in place (before the device barrier)."""

    def push_failed(self, lease_id: str, reason: str) -> None:
        """The writer gave up."""

    def writer_joined(self, writer: Writer) -> None: ...

    def writer_lost(self, writer: Writer) -> None:
        """The writer's connection broke: none of its leases will be written any more."""


class Receiver(Protocol):
    """D's end of the data plane. All of it is called in the event loop's thread."""

    @property
    def endpoint(self) -> Endpoint:
        """Where writers reach it."""

    async def start(self) -> None: ...

    def ready(self) -> str | None:
        """None, or why nothing can be pushed now."""

    def grant(self, lease_id: str, writer: Writer) -> int:
        """Open a slot for the lease on its writer's connection → `Lease.slot`.

        Raises WorkerLost if that writer is not connected (or is another generation), Overloaded if the
        connection has no free slot.
        """

    def drained(self, lease_id: str) -> None:
        """One more announced piece was taken out of its staging: the writer may write there again."""

    def acknowledge(self, lease_id: str) -> None:
        """Tell the writer that its push has landed; ends its right to write (the slot is free again)."""

    async def fence(self, lease_id: str) -> None:
        """Revoke; returns when no byte of this lease can land any more. Idempotent; unknown leases return.

        May wait as long as the writer lives and does not answer (a stopped process): then the blocks stay
        with the lease, which is what keeps the next owner's bytes intact.
        """

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """What a writing process may choose, for backends that have a choice.

    `devices`: NICs to use, as `device[:port[:gid index]]`, empty for the one found. `staging_bytes`: memory that is
    registered for sending, shared by all pools of the process.
    """

    devices: tuple[str, ...] = ()
    staging_bytes: int = 64 * 1024 * 1024


#: called once, in a thread of the backend, with the reason, when a pool's connection breaks
OnLost = Callable[[str], None]
