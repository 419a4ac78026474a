"""Stand-ins for what surrounds a push and the service: a data plane in memory, sessions, an engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from prefill_worker.control.messages import LocalKV
from prefill_worker.engine import Handover
from prefill_worker.push.pieces import Pages
from prefill_worker.sampling import Sampled
from transport.backends.base import Run
from transport.errors import LeaseRevoked, PushFailed
from transport.geometry import KVGeometry
from transport.geometry.pages import PageLayout
from transport.kernels import cpu
from transport.kernels.source import Source, aligned_bytes
from transport.messages import (
    Endpoint,
    Lease,
    Message,
    ModelInfo,
    PoolDescription,
    Region,
    Sampling,
    Writer,
)

GEOMETRY = KVGeometry(2, 2, 32, block_size=32, num_blocks=32, num_channels=3, dtype="float32")
LAYOUT = PageLayout(2, 32, block_size=64, packing="vec", dtype="float32")
KV = LocalKV(num_layers=2, num_kv_heads=2, head_dim=32, block_size=64, num_blocks=16, dtype="float32")
MODEL = ModelInfo(name="m", fingerprint="f", max_model_len=512, vocab_size=1000)
WRITER = Writer(worker="p0", generation="g")


def pages(seed: int = 0) -> Pages:
    """16 blocks of 64 tokens in each of two layers."""
    rng = np.random.default_rng(seed)
    layers = [rng.standard_normal((16, 2, 64, 64), np.float32) for _ in range(2)]
    return Pages(Source(layers, LAYOUT), cpu)


def pool_of(worker: str = "d0", generation: str = "g0", **changes: Any) -> PoolDescription:
    size = GEOMETRY.bank_bytes
    return PoolDescription(
        **{
            "worker": worker,
            "generation": generation,
            "kv_path": "hawk",
            "geometry": GEOMETRY,
            "bases": tuple(size * i for i in range(GEOMETRY.num_tensors)),
            "channels": tuple(Region(address=0, rkey=0, length=size * GEOMETRY.num_tensors) for _ in range(3)),
            "endpoint": Endpoint(backend="shm", address="/nowhere"),
            "model": MODEL,
        }
        | changes
    )


def lease_of(prompt_tokens: int = 100, lease_id: str = "l0", **changes: Any) -> Lease:
    blocks = -(-prompt_tokens // GEOMETRY.block_size)
    return Lease(
        **{
            "id": lease_id,
            "worker": "d0",
            "generation": "g0",
            "block_ids": tuple(range(blocks)),
            "prompt_tokens": prompt_tokens,
            "resident_tokens": 0,
            "ttl_s": 5.0,
            "slot": 1,
        }
        | changes
    )


class MemoryLease:
    """A `LeaseWriter` into plain arrays. Gates let a test stop the pushing thread where it wants.

    `revoked` makes the next chunk fail as a fence would; `chunk_gate` and `ack_gate` are open by default.
    """

    def __init__(self, pool: MemoryPool, lease: Lease) -> None:
        self.pool = pool
        self.lease = lease
        self.log: list[str] = []
        self.aborted: str | None = None
        self.revoked = False
        self.in_chunk = threading.Event()
        self.completing = threading.Event()
        self.chunk_gate = threading.Event()
        self.chunk_gate.set()
        self.ack_gate = threading.Event()
        self.ack_gate.set()
        self.bytes = 0

    @property
    def mapped(self) -> Sequence[np.ndarray] | None:
        return self.pool.memory if self.pool.maps else None

    @contextlib.contextmanager
    def chunk(self) -> Iterator[None]:
        self._check()
        self.log.append("chunk")
        self.in_chunk.set()
        assert self.chunk_gate.wait(10)
        yield
        self.in_chunk.clear()

    def stage(self, num_bytes: int) -> np.ndarray:
        return aligned_bytes(num_bytes)

    def write(self, staging: np.ndarray, runs: Sequence[Run]) -> None:
        with self.chunk():
            for run in runs:
                target = self.pool.memory[run.region]
                target[run.remote_offset : run.remote_offset + run.length] = staging[
                    run.local_offset : run.local_offset + run.length
                ]

    def count(self, num_bytes: int) -> None:
        self.bytes += num_bytes

    def complete(self, timeout_s: float) -> None:
        self._check()
        self.log.append("complete")
        self.completing.set()
        if not self.ack_gate.wait(timeout_s):
            raise PushFailed(f"not acknowledged within {timeout_s:g} s")
        self._check()

    def abort(self, reason: str) -> None:
        if self.aborted is None:
            self.aborted = reason
            self.log.append("abort")
            self.ack_gate.set()

    def _check(self) -> None:
        if self.revoked:
            raise LeaseRevoked(f"lease {self.lease.id} was fenced")
        if self.aborted is not None:
            raise PushFailed("aborted")


class MemoryPool:
    """A `PoolWriter`; `prepare` sees each lease before it is handed to the push."""

    def __init__(self, pool: PoolDescription, maps: bool = True) -> None:
        self.pool = pool
        self.maps = maps
        self.memory = [np.full(region.length, 0xA5, np.uint8) for region in pool.channels]
        self.leases: dict[str, MemoryLease] = {}
        self.prepare: Callable[[MemoryLease], None] = lambda lease: None
        self.opened = threading.Event()
        self.alive = True
        self.counters: Counter[str] = Counter()
        self.nics: list[tuple[str, int]] = []

    def open(self, lease: Lease) -> MemoryLease:
        writer = self.leases[lease.id] = MemoryLease(self, lease)
        self.prepare(writer)
        self.opened.set()
        return writer

    def close(self) -> None:
        self.alive = False


class Reports(list[Message]):
    """Collects messages from any thread; `wait` blocks for the n-th."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def __call__(self, message: Message) -> None:
        with self._changed:
            self.append(message)
            self._changed.notify_all()

    def wait(self, count: int = 1) -> Message:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self) >= count, 10), f"only {list(self)}"
            return self[count - 1]


class FakeSession:
    """As much of a `Session` as the service uses."""

    def __init__(self, session_id: int = 1, router: str = "r0") -> None:
        self.id = session_id
        self.router = router
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)


class FakeControl:
    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)


class FakeEngine:
    """Each request waits until the test lets it go: `finish(n, sampled or error)`."""

    def __init__(self) -> None:
        self.failed = False
        self.calls: list[tuple[str, tuple[int, ...], Sampling, Handover | None]] = []
        self.results: list[asyncio.Future[Sampled]] = []
        self.cancelled: list[str] = []

    async def prefill(
        self, request_id: str, token_ids: tuple[int, ...], sampling: Sampling, handover: Handover | None
    ) -> Sampled:
        self.calls.append((request_id, token_ids, sampling, handover))
        result: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        self.results.append(result)
        try:
            return await result
        except asyncio.CancelledError:
            self.cancelled.append(request_id)
            raise


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)
