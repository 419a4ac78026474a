"""What the router knows of each worker: its session, its load, and which pools are open between them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from transport.errors import HawkError, WorkerLost
from transport.messages import Hello, Message, PoolDescription, Status
from transport.prefix import root_hash
from transport.session.client import SessionClient

WorkerRole = Literal["prefill", "decode"]

#: seconds for which a worker is avoided after a failure; doubles with each one in a row
COOLDOWN_S, MAX_COOLDOWN_S = 0.5, 30.0


@dataclass(eq=False)
class Worker:
    """`refused` says why an attached worker is not used; `removing`: takes no new work and will be dropped."""

    url: str
    client: SessionClient | None = None
    hello: Hello | None = None
    status: Status | None = None
    error: HawkError | None = None
    refused: str | None = None
    removing: bool = False
    calls: int = 0
    failures: int = 0
    avoid_until: float = 0.0

    role: WorkerRole = "prefill"

    @property
    def up(self) -> bool:
        """Attached and accepted, whether or not it takes new work."""
        return self.hello is not None and self.refused is None

    @property
    def usable(self) -> bool:
        """Takes new work."""
        status = self.status
        return self.up and not self.removing and status is not None and status.ready and not status.draining

    @property
    def cooling(self) -> bool:
        """Failed a moment ago: used only if there is no other."""
        return self.failures > 0 and time.monotonic() < self.avoid_until

    @property
    def name(self) -> str:
        return self.hello.worker if self.hello is not None else self.url

    def send(self, message: Message) -> None:
        """Raises WorkerLost when there is no session."""
        if self.client is None or self.hello is None:
            raise WorkerLost(f"{self.role} worker at {self.url} is not connected")
        self.client.send(message)

    def failed(self) -> None:
        """The worker (never the client) failed a request."""
        self.failures += 1
        self.avoid_until = time.monotonic() + min(MAX_COOLDOWN_S, COOLDOWN_S * 2 ** (self.failures - 1))

    def succeeded(self) -> None:
        self.failures = 0

    def attached(self, hello: Hello) -> None:
        self.hello, self.error = hello, None
        self.failures = 0
        self.heard(hello.status)

    def detached(self, error: HawkError) -> None:
        self.hello, self.status, self.error, self.refused = None, None, error, None

    def heard(self, status: Status) -> None:
        self.status = status

    def state(self) -> str:
        if self.refused is not None:
            return "refused"
        if self.hello is None:
            return "down"
        if self.removing or (self.status is not None and self.status.draining):
            return "draining"
        return "ready" if self.usable else "not ready"

    def describe(self) -> dict[str, Any]:
        """The worker as `GET /workers` shows it."""
        error = self.error or (self.client.error if self.client is not None else None)
        reason = self.refused or (error.message if self.hello is None and error is not None else None)
        return {
            "role": self.role,
            "url": self.url,
            "state": self.state(),
            "reason": reason,
            "name": self.hello.worker if self.hello else None,
            "generation": self.hello.generation if self.hello else None,
            "model": self.hello.model.model_dump() if self.hello else None,
            "status": self.status.model_dump() if self.status else None,
            "requests": self.calls,
        }


@dataclass(eq=False)
class PrefillWorker(Worker):
    """`in_flight`: our prefills there; `outstanding`: their prompt tokens; `foreign`: those of other routers."""

    role: WorkerRole = "prefill"
    in_flight: int = 0
    outstanding: int = 0
    foreign: int = 0

    def heard(self, status: Status) -> None:
        super().heard(status)
        self.foreign = max(0, status.outstanding_tokens - self.outstanding)

    @property
    def load(self) -> int:
        return self.outstanding + self.foreign


@dataclass(eq=False)
class DecodeWorker(Worker):
    """`resident`: hashes of the blocks in its pool; `full`: refused a reservation and has not changed since."""

    role: WorkerRole = "decode"
    resident: set[bytes] = field(default_factory=set)
    full: bool = False
    reserved_since: int = 0
    root: bytes = b""

    def attached(self, hello: Hello) -> None:
        self.resident.clear()
        self.full = False
        if hello.pool is not None:
            self.root = root_hash(hello.pool.model.fingerprint, hello.pool.geometry.dtype)
        super().attached(hello)

    def heard(self, status: Status) -> None:
        super().heard(status)
        self.full = False
        self.reserved_since = 0

    @property
    def pool(self) -> PoolDescription:
        """Of an attached worker."""
        assert self.hello is not None
        assert self.hello.pool is not None
        return self.hello.pool

    @property
    def block_size(self) -> int:
        return self.pool.geometry.block_size

    @property
    def pool_tokens(self) -> int:
        """Tokens that fit into its whole pool."""
        blocks = self.status.total_blocks if self.status is not None else 0
        return (blocks or self.pool.geometry.num_blocks) * self.block_size

    @property
    def free_blocks(self) -> int:
        """By its last status, less what was reserved since."""
        return (self.status.free_blocks if self.status else 0) - self.reserved_since

    def resident_blocks(self, hashes: list[bytes]) -> int:
        """How many leading blocks it already holds."""
        count = 0
        for block in hashes:
            if block not in self.resident:
                break
            count += 1
        return count
