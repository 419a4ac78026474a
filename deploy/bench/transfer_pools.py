"""The receiving side of `hawk bench transfer`: a process with one pool per path, over the same memory.

The pools take turns, so they may share it: NPU layout as channels, GPU layout as one region, and the staging slots
of kv_path host.
"""

from __future__ import annotations

import asyncio
import mmap
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from decode_worker.staging import Slots
from transport.backends.base import Piece
from transport.backends.shm import ShmReceiver
from transport.geometry import KVGeometry
from transport.geometry.staging import linear_row_bytes
from transport.kernels import cpu
from transport.messages import Endpoint, ModelInfo, PoolDescription, Region, Writer

#: path → (layout of the pool, kv_path)
PATHS: dict[str, tuple[str, str]] = {
    "gg-host": ("gpu", "host"),
    "gn-host": ("npu", "host"),
    "gg-direct": ("gpu", "hawk"),
    "gn-hawk": ("npu", "hawk"),
}
WRITER = Writer(worker="bench-prefill", generation="1")
_PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class Setup:
    """What the process needs to make its pools. `geometry` is the NPU one; GPU pools keep bf16.

    `slots` and `slot_bytes`: what a lease of kv_path host has for staging.
    """

    geometry: KVGeometry
    max_tokens: int
    directory: str
    token: str
    slots: int
    slot_bytes: int

    def of(self, path: str) -> KVGeometry:
        """Geometry of the pool of `path`."""
        if PATHS[path][0] == "npu":
            return self.geometry
        return replace(self.geometry, layout="gpu", num_channels=1, dtype="bfloat16")

    def bases(self, path: str) -> tuple[int, ...]:
        return tuple(tensor * self.of(path).bank_bytes for tensor in range(self.geometry.num_tensors))

    def region_bytes(self, path: str) -> int:
        """Bytes of one channel, in whole pages."""
        geometry = self.of(path)
        return -(-geometry.num_tensors * geometry.bank_bytes // _PAGE) * _PAGE

    def staging(self) -> Slots:
        """The slots of the one lease that is written; each holds 32 tokens of a tensor at least."""
        return Slots(0, self.slots, max(self.slot_bytes, linear_row_bytes(self.geometry, "bfloat16")))

    def staging_bytes(self) -> int:
        return -(-self.staging().length // _PAGE) * _PAGE

    def description(self, path: str) -> PoolDescription:
        _, kv_path = PATHS[path]
        length, count = self.region_bytes(path), self.of(path).num_channels
        staging = Region(address=0, rkey=0, length=self.staging_bytes()) if kv_path == "host" else None
        return PoolDescription(
            worker=path,
            generation="1",
            kv_path=kv_path,  # type: ignore[arg-type]
            geometry=self.of(path),
            bases=self.bases(path),
            channels=tuple(Region(address=i * length, rkey=i, length=length) for i in range(count)),
            staging=staging,
            staging_dtype="bfloat16" if staging else None,
            endpoint=Endpoint(backend="shm", address=f"{self.directory}/{path}.sock"),
            model=ModelInfo(name="bench", fingerprint="bench", max_model_len=self.max_tokens, vocab_size=1),
        )


class Process:
    """The child process, as its parent sees it. `close` ends it."""

    def __init__(self, setup: Setup) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=_main, args=(setup, far), daemon=True)
        self._process.start()
        far.close()
        self._receive("ready")

    def grant(self, path: str, lease_id: str, blocks: Sequence[int]) -> int:
        """Open a slot for a lease of `blocks` → the slot."""
        self._pipe.send((path, lease_id, list(blocks)))
        return int(self._receive("slot"))

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()

    def _receive(self, expected: str) -> Any:
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the receiving process of the benchmark died; see its output above") from None
        if kind != expected:
            raise RuntimeError(f"receiving process: {value}")
        return value


def _main(setup: Setup, pipe: Connection) -> None:
    asyncio.run(_Pools(setup, pipe).serve())


@dataclass
class _Landing:
    """A lease that is written. Its announced pieces go from their slots into `blocks` one after the other."""

    path: str
    blocks: list[int]
    announced: int = 0
    landed: bool = False
    placing: set[asyncio.Future[int]] = field(default_factory=set)


class _Pools:
    """The child's event loop: grants what it is asked for, re-lays-out what is announced, acknowledges what landed."""

    def __init__(self, setup: Setup, pipe: Connection) -> None:
        self._setup, self._pipe = setup, pipe
        largest = max(setup.region_bytes(path) * setup.of(path).num_channels for path in PATHS)
        self._fd, self._memory = _memory("hawk-bench-kv", largest)
        self._staging_fd, self._staging = _memory("hawk-bench-staging", setup.staging_bytes())
        self._leases: dict[str, _Landing] = {}
        self._executor = ThreadPoolExecutor(1)
        self._receivers: dict[str, ShmReceiver] = {}

    async def serve(self) -> None:
        for path, (_, kv_path) in PATHS.items():
            pool = self._setup.description(path)
            regions = [(region, self._fd, region.address) for region in pool.channels]
            if kv_path == "host":
                assert pool.staging is not None
                regions = [(pool.staging, self._staging_fd, 0)]
            token = self._setup.token
            self._receivers[path] = ShmReceiver(path, "1", token, regions, self, pool.endpoint.address)
            await self._receivers[path].start()
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pipe.fileno(), self._asked, stopped)
        self._pipe.send(("ready", None))
        await stopped.wait()
        loop.remove_reader(self._pipe.fileno())
        for receiver in self._receivers.values():
            await receiver.close()

    def _asked(self, stopped: asyncio.Event) -> None:
        try:
            path, lease_id, blocks = self._pipe.recv()
        except EOFError:
            stopped.set()
            return
        self._leases[lease_id] = _Landing(path, blocks)
        self._pipe.send(("slot", self._receivers[path].grant(lease_id, WRITER)))

    # ---- ReceiverEvents

    def announced(self, lease_id: str, piece: Piece) -> None:
        lease = self._leases.get(lease_id)
        if lease is None or PATHS[lease.path][1] == "hawk":
            return
        at = self._setup.staging().of(lease.announced)
        lease.announced += 1
        place = asyncio.get_running_loop().run_in_executor(self._executor, self._place, lease, piece, at)
        lease.placing.add(place)
        place.add_done_callback(lambda done: self._placed(lease_id, lease, done))

    def landed(self, lease_id: str) -> None:
        self._leases[lease_id].landed = True
        self._acknowledge(lease_id)

    def push_failed(self, lease_id: str, reason: str) -> None:
        self._leases.pop(lease_id, None)

    def writer_joined(self, writer: Writer) -> None: ...

    def writer_lost(self, writer: Writer) -> None: ...

    # ---- kv_path host

    def _place(self, lease: _Landing, piece: Piece, at: int) -> int:
        geometry, length = self._setup.of(lease.path), self._setup.region_bytes(lease.path)
        channels = [self._memory[i * length : (i + 1) * length] for i in range(geometry.num_channels)]
        linear = self._staging[at : at + self._setup.staging().slot_bytes]
        tensors = range(piece.first_tensor, piece.last_tensor + 1)
        what = (geometry, lease.blocks, linear, "bfloat16", piece.start, piece.stop, tensors)
        return cpu.from_linear(channels, self._setup.bases(lease.path), *what)

    def _placed(self, lease_id: str, lease: _Landing, done: asyncio.Future[int]) -> None:
        done.result()  # a failure goes to the loop's handler, and its writer waits in vain
        lease.placing.discard(done)
        if lease_id in self._leases:
            self._receivers[lease.path].drained(lease_id)
            self._acknowledge(lease_id)

    def _acknowledge(self, lease_id: str) -> None:
        lease = self._leases[lease_id]
        if lease.landed and not lease.placing:
            del self._leases[lease_id]
            self._receivers[lease.path].acknowledge(lease_id)


def _memory(name: str, length: int) -> tuple[int, np.ndarray]:
    """A memfd and its mapping, every page present."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, length)
    memory = np.frombuffer(mmap.mmap(fd, length), np.uint8)
    memory[::_PAGE] = 0
    return fd, memory
