"""What a backend's receiver has per writer: its slots, and the power to stop it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from transport.backends.link.packets import Renewed

MAX_SLOTS = 1 << 16


def slot_token(slot: int, epoch: int) -> int:
    """The value of `Lease.slot`. Epochs are never used twice in the life of a receiver, so that a late lease of an
    earlier connection cannot be mistaken for the slot's present one."""
    return slot | epoch << 16


def split_token(token: int) -> tuple[int, int]:
    """(slot, epoch) of a `Lease.slot`."""
    return token & (MAX_SLOTS - 1), token >> 16


class Slots(Protocol):
    """One connection's slots; a lease holds one while it may be written.

    `shared`: writers read in shared memory which leases they may write, so that `Granted` need not tell them.
    `strict`: after `close` nothing that the writer does can land.
    `immediates`: what a writer announces counts only when as many immediates have arrived on the lease's slot.
    """

    shared: bool
    strict: bool
    immediates: bool

    @property
    def count(self) -> int: ...

    def offer(self) -> tuple[list[object], Sequence[int]]:
        """`Welcome.offer`, and the descriptors that go with it."""

    def setup(self, answer: list[object] | None) -> bool:
        """Called with None when the offer was sent, and with the writer's answer if that returned False.

        True: leases may be granted. Raises ProtocolError, PushFailed.
        """

    def take(self, epoch: int) -> int:
        """Open a slot → its token. Raises IndexError when none is free now."""

    def revoke(self, token: int) -> bool:
        """Stop the writer of the slot. True if no byte of it can land any more; else its `RevokeAck` tells."""

    def release(self, token: int) -> None:
        """The lease is over, and its writer is known to be done with the slot (or was stopped)."""

    def renewed(self, packet: Renewed) -> None:
        """The writer has rebuilt its end of a lane. Raises ProtocolError."""

    def close(self) -> None:
        """The connection is over. Idempotent."""
