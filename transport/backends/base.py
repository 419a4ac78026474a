"""The data-plane protocol: one-sided writes from a prefill worker into a decode worker's regions.

P side (synchronous, called from the pusher's thread): a `PoolWriter` per (P rank, pool), a `LeaseWriter`
per lease. D side (asyncio): one `Receiver` per pool. Every backend passes the same contract test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from transport.messages import Lease, Writer


@dataclass(frozen=True, slots=True)
class Run:
    """One write of the transfer plan: `length` bytes of the staging buffer into one region."""

    region: int
    """Index of the target: a channel, or (kv_path host/contiguous) 0 for the staging region."""
    local_offset: int
    remote_offset: int
    length: int


class LeaseWriter(Protocol):
    """Writes one lease. Not thread-safe: one thread at a time, but for `abort`."""

    @property
    def mapped(self) -> Sequence[np.ndarray] | None:
        """uint8 views of the target regions where the backend can store into them in place, else None.

        A caller that stores through them does so inside `chunk()`.
        """

    def chunk(self) -> AbstractContextManager[None]:
        """A bounded piece of writing (aim at a few ms). Raises LeaseRevoked if the lease was fenced.

        While a chunk is open a fence waits for it.
        """

    def write(self, staging: np.ndarray, runs: Sequence[Run]) -> None:
        """Write the runs out of `staging` (uint8, 1-D); returns once `staging` may be reused.

        Raises LeaseRevoked when fenced, PushFailed when the peer is gone or a run leaves its region.
        """

    def count(self, num_bytes: int) -> None:
        """Account for bytes stored through `mapped`; `write` does so itself."""

    def complete(self, timeout_s: float) -> None:
        """Say that everything was written and wait until D acknowledges. Raises LeaseRevoked, PushFailed."""

    def abort(self, reason: str) -> None:
        """Give up: D learns the reason and frees the lease. Never raises; idempotent; from any thread."""


class PoolWriter(Protocol):
    """The connection of one prefill process to one pool. Thread-safe."""

    @property
    def alive(self) -> bool: ...

    def open(self, lease: Lease) -> LeaseWriter:
        """Raises StaleGeneration, LeaseRevoked (unknown or fenced), PushFailed (peer gone)."""

    def close(self) -> None:
        """Disconnect; idempotent. Leases that are still open count as aborted."""


class ReceiverEvents(Protocol):
    """What a `Receiver` tells its owner; called in the event loop's thread."""

    def landed(self, lease_id: str) -> None:
        """The writer's last byte is in place (before the device barrier)."""

    def push_failed(self, lease_id: str, reason: str) -> None:
        """The writer gave up."""

    def writer_joined(self, writer: Writer) -> None: ...

    def writer_lost(self, writer: Writer) -> None:
        """The writer's connection broke: none of its leases will be written any more."""


class Receiver(Protocol):
    """D's end of the data plane. `grant`, `acknowledge` and `fence` are called in the event loop's thread."""

    async def start(self) -> None: ...

    def grant(self, lease_id: str, writer: Writer) -> int:
        """Open a slot for the lease on its writer's connection → `Lease.slot`.

        Raises WorkerLost if that writer is not connected (or is another generation), Overloaded if the
        connection has no free slot.
        """

    def acknowledge(self, lease_id: str) -> None:
        """Tell the writer that its push has landed; ends its right to write (the slot is free again)."""

    async def fence(self, lease_id: str) -> None:
        """Revoke; returns when no byte of this lease can land any more. Idempotent; unknown leases return.

        May wait as long as the writer lives and does not answer (a stopped process): then the blocks stay
        with the lease, which is what keeps the next owner's bytes intact.
        """

    async def close(self) -> None: ...


#: called once, in a thread of the backend, with the reason, when a pool's connection breaks
OnLost = Callable[[str], None]
