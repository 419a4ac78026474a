"""Data-plane backends under test: each gives a receiver with memory of its own, and a recorder of its events."""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from transport.backends.base import Piece, Receiver
from transport.backends.shm import ShmReceiver
from transport.geometry import KVGeometry
from transport.messages import Endpoint, Lease, ModelInfo, PoolDescription, Region, Writer

TOKEN = "a-cluster-token-of-some-length"
WRITER = Writer(worker="prefill-0", generation="p1")
REGION_BYTES = 1 << 20
POISON = 0xA5


@dataclass
class Events:
    """Records what a receiver tells; `wait` returns the next event, in order."""

    queue: asyncio.Queue[tuple[object, ...]] = field(default_factory=asyncio.Queue)

    def announced(self, lease_id: str, piece: Piece) -> None:
        self.queue.put_nowait(("announced", lease_id, piece))

    def landed(self, lease_id: str) -> None:
        self.queue.put_nowait(("landed", lease_id))

    def push_failed(self, lease_id: str, reason: str) -> None:
        self.queue.put_nowait(("push_failed", lease_id, reason))

    def writer_joined(self, writer: Writer) -> None:
        self.queue.put_nowait(("writer_joined", writer))

    def writer_lost(self, writer: Writer) -> None:
        self.queue.put_nowait(("writer_lost", writer))

    async def wait(self) -> tuple[object, ...]:
        return await asyncio.wait_for(self.queue.get(), 10)


Handed = tuple[Region, int, int]
"""A region, its descriptor, and where in that it begins."""


@dataclass
class Pool:
    """A running receiver, its description, its memory (uint8 per region) and its events."""

    receiver: Receiver
    description: PoolDescription
    memory: list[np.ndarray]
    events: Events
    handed: list[Handed]
    _ids: itertools.count = field(default_factory=lambda: itertools.count(1))

    def lease(self, slot: int, lease_id: str) -> Lease:
        return Lease(
            id=lease_id,
            worker=self.description.worker,
            generation=self.description.generation,
            block_ids=(0,),
            prompt_tokens=32,
            resident_tokens=0,
            ttl_s=30.0,
            slot=slot,
        )

    def grant(self, lease_id: str | None = None, writer: Writer = WRITER) -> Lease:
        lease_id = lease_id or f"lease-{next(self._ids)}"
        return self.lease(self.receiver.grant(lease_id, writer), lease_id)


class Backend:
    """Receivers over memfd regions, one after the other at the same address."""

    name: str

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._receivers: list[Receiver] = []
        self._fds: list[int] = []

    async def pool(
        self,
        *,
        name: str = "decode-0",
        generation: str = "d1",
        token: str = TOKEN,
        lengths: tuple[int, ...] = (REGION_BYTES, REGION_BYTES),
        slots: int = 16,
    ) -> Pool:
        regions, memory = [], []
        for index, length in enumerate(lengths):
            fd = os.memfd_create(f"region-{index}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, length)
            self._fds.append(fd)
            regions.append((Region(address=0, rkey=index, length=length), fd, 0))
            memory.append(np.frombuffer(mmap.mmap(fd, length), np.uint8))
            memory[-1][:] = POISON
        return await self._serve(name, generation, token, regions, memory, slots)

    async def restarted(self, pool: Pool, generation: str, *, slots: int = 16) -> Pool:
        """The receiver that comes after `pool`'s: another generation, with the same address and the same memory."""
        await pool.receiver.close()
        return await self._serve(pool.description.worker, generation, TOKEN, pool.handed, pool.memory, slots)

    async def _serve(
        self, name: str, generation: str, token: str, regions: list[Handed], memory: list[np.ndarray], slots: int
    ) -> Pool:
        events = Events()
        receiver = self.receiver(name, generation, token, regions, events, slots)
        self._receivers.append(receiver)
        await receiver.start()
        description = describe(name, generation, [region for region, _, _ in regions], receiver.endpoint)
        return Pool(receiver, description, memory, events, regions)

    def receiver(
        self, name: str, generation: str, token: str, regions: list[Handed], events: Events, slots: int
    ) -> Receiver:
        raise NotImplementedError

    async def close(self) -> None:
        for receiver in self._receivers:
            await receiver.close()
        for fd in self._fds:
            os.close(fd)


class ShmBackend(Backend):
    """A Unix socket in `directory`."""

    name = "shm"

    def receiver(
        self, name: str, generation: str, token: str, regions: list[Handed], events: Events, slots: int
    ) -> Receiver:
        path = str(self._directory / f"{name}.sock")
        return ShmReceiver(name, generation, token, regions, events, path, slots=slots)


class VerbsBackend(Backend):
    """A link on the address of the machine's first RDMA NIC."""

    name = "verbs"
    _port = 0

    def receiver(
        self, name: str, generation: str, token: str, regions: list[Handed], events: Events, slots: int
    ) -> Receiver:
        from transport.backends.verbs.receiver import VerbsReceiver

        receiver = VerbsReceiver(name, generation, token, regions, events, port=self._port, slots=slots)
        self._port = int(receiver.address.rpartition(":")[2])
        return receiver


class NixlBackend(Backend):
    """A link and UCX on the loopback interface."""

    name = "nixl"
    fence_wait_s = 5.0
    _port = 0

    def receiver(
        self, name: str, generation: str, token: str, regions: list[Handed], events: Events, slots: int
    ) -> Receiver:
        from transport.backends.nixl.receiver import NixlReceiver

        receiver = NixlReceiver(
            name, generation, token, regions, events, port=self._port, slots=slots, fence_wait_s=self.fence_wait_s
        )
        self._port = int(receiver.address.rpartition(":")[2])
        return receiver


BACKENDS: dict[str, type[Backend]] = {"shm": ShmBackend, "nixl": NixlBackend}
"""The backends that can run on this machine."""
if os.environ.get("HAWK_GUEST"):
    BACKENDS["verbs"] = VerbsBackend


def describe(name: str, generation: str, channels: list[Region], endpoint: Endpoint) -> PoolDescription:
    """A pool description whose geometry does not matter to the data plane."""
    return PoolDescription(
        worker=name,
        generation=generation,
        kv_path="hawk",
        geometry=KVGeometry(1, 1, 32, 32, 1, len(channels)),
        bases=(0, 0),
        channels=tuple(channels),
        endpoint=endpoint,
        model=ModelInfo(name="m", fingerprint="f", max_model_len=128, vocab_size=128),
    )
