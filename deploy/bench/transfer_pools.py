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
from typing import Any, Literal, get_args

import numpy as np

from decode_worker.staging import Slots
from transport.backends.base import Piece
from transport.backends.link.receiver import LinkReceiver
from transport.errors import ConfigurationError, HawkError
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
Transport = Literal["shm", "nixl", "verbs"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
_LEASES = 2
"""Slots per writer: one lease is written at a time."""
_PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class Setup:
    """What the process needs to make its pools. `geometry` is the NPU one; GPU pools keep bf16.

    `slots` and `slot_bytes`: what a lease of kv_path host has for staging. `nics`: as `VerbsReceiver` names them.
    `largest_write`: the GPU pool has room for two such writes, however little KV there is.
    """

    geometry: KVGeometry
    max_tokens: int
    directory: str
    token: str
    slots: int
    slot_bytes: int
    transport: Transport = "shm"
    nics: tuple[str, ...] = ()
    largest_write: int = 0

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
        least = 2 * self.largest_write if geometry.layout == "gpu" else 0
        return -(-max(least, geometry.num_tensors * geometry.bank_bytes) // _PAGE) * _PAGE

    def staging(self) -> Slots:
        """The slots of the one lease that is written; each holds 32 tokens of a tensor at least."""
        return Slots(0, self.slots, max(self.slot_bytes, linear_row_bytes(self.geometry, "bfloat16")))

    def staging_bytes(self) -> int:
        return -(-self.staging().length // _PAGE) * _PAGE

    def channels(self, path: str) -> tuple[Region, ...]:
        """The regions of the pool's channels, one behind the other in the memory that all pools share."""
        length = self.region_bytes(path)
        return tuple(Region(address=i * length, rkey=i, length=length) for i in range(self.of(path).num_channels))

    def memory_bytes(self) -> int:
        """Bytes of the memory that all pools share."""
        return max(self.region_bytes(path) * self.of(path).num_channels for path in PATHS)

    def views(self, path: str, memory: np.ndarray) -> list[np.ndarray]:
        """The pool's channels in the shared memory, uint8."""
        return [memory[region.address : region.address + region.length] for region in self.channels(path)]

    def description(self, path: str, endpoint: Endpoint) -> PoolDescription:
        _, kv_path = PATHS[path]
        staging = Region(address=0, rkey=0, length=self.staging_bytes()) if kv_path == "host" else None
        return PoolDescription(
            worker=path,
            generation="1",
            kv_path=kv_path,  # type: ignore[arg-type]
            geometry=self.of(path),
            bases=self.bases(path),
            channels=self.channels(path),
            staging=staging,
            staging_dtype="bfloat16" if staging else None,
            endpoint=endpoint,
            model=ModelInfo(name="bench", fingerprint="bench", max_model_len=self.max_tokens, vocab_size=1),
        )


class Process:
    """The child process, as its parent sees it: where its pools are, and their memory, mapped. `close` ends it.

    Raises ConfigurationError where the child cannot have the transport.
    """

    endpoints: dict[str, Endpoint]
    """Of the pool of each path."""

    def __init__(self, setup: Setup) -> None:
        # Forked, for importing all this anew costs an emulated guest ten seconds. UCX does not outlive a fork, and this
        # process may have used it before.
        context = multiprocessing.get_context("spawn" if setup.transport == "nixl" else "fork")
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=_main, args=(setup, far, self._pipe), daemon=True)
        self._process.start()
        far.close()
        try:
            fd, self.endpoints = self._receive("ready")
            self.memory = _map_of(self._process.pid, fd, setup.memory_bytes())
        except BaseException:
            self.close()
            raise

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
        if kind == "refused":
            raise ConfigurationError(value)
        if kind != expected:
            raise RuntimeError(f"receiving process: {value}")
        return value


def _main(setup: Setup, pipe: Connection, parents: Connection) -> None:
    parents.close()  # while it is open here, nobody sees the parent's end of it close
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
        self._fd, self._memory = _memory("hawk-bench-kv", setup.memory_bytes())
        self._staging_fd, self._staging = _memory("hawk-bench-staging", setup.staging_bytes())
        self._leases: dict[str, _Landing] = {}
        self._executor = ThreadPoolExecutor(1)
        self._receivers: dict[str, LinkReceiver] = {}

    async def serve(self) -> None:
        try:
            for path in PATHS:
                self._receivers[path] = self._receiver(path)
                await self._receivers[path].start()
        except HawkError as error:
            self._pipe.send(("refused", error.message))
            return
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pipe.fileno(), self._asked, stopped)
        endpoints = {path: receiver.endpoint for path, receiver in self._receivers.items()}
        self._pipe.send(("ready", (self._fd, endpoints)))
        await stopped.wait()
        loop.remove_reader(self._pipe.fileno())
        for receiver in self._receivers.values():
            await receiver.close()

    def _receiver(self, path: str) -> LinkReceiver:
        """Raises ConfigurationError."""
        setup = self._setup
        regions = [(region, self._fd, region.address) for region in setup.channels(path)]
        if PATHS[path][1] == "host":
            regions = [(Region(address=0, rkey=0, length=setup.staging_bytes()), self._staging_fd, 0)]
        what = (path, "1", setup.token, regions, self)
        if setup.transport == "shm":
            from transport.backends.shm import ShmReceiver

            return ShmReceiver(*what, f"{setup.directory}/{path}.sock", slots=_LEASES)
        if setup.transport == "nixl":
            from transport.backends.nixl.receiver import NixlReceiver

            return NixlReceiver(*what, slots=_LEASES)
        from transport.backends.verbs.receiver import VerbsReceiver

        return VerbsReceiver(*what, devices=setup.nics, slots=_LEASES)

    def _asked(self, stopped: asyncio.Event) -> None:
        try:
            path, lease_id, blocks = self._pipe.recv()
        except EOFError:
            stopped.set()
            return
        try:
            slot = self._receivers[path].grant(lease_id, WRITER)
        except HawkError as error:
            self._pipe.send(("failed", error.message))
            return
        self._leases[lease_id] = _Landing(path, blocks)
        self._pipe.send(("slot", slot))

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
        geometry, channels = self._setup.of(lease.path), self._setup.views(lease.path, self._memory)
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


def _map_of(pid: int | None, fd: int, length: int) -> np.ndarray:
    """The memory behind a descriptor of a child process, every page present."""
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = np.frombuffer(mmap.mmap(own, length), np.uint8)
    finally:
        os.close(own)
    memory[::_PAGE] = 0
    return memory
