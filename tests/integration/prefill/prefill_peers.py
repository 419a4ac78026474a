"""What a prefill worker talks to, in the test's process: a router's session, and decode workers' pools."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import psutil

from decode_worker.npu.emulated import EmulatedNpu
from decode_worker.pool import KVPool, PoolPath
from decode_worker.relayout import Relayout, Target
from decode_worker.staging import Slots
from transport.backends.base import Piece
from transport.backends.shm import ShmReceiver
from transport.generation import new_generation
from transport.geometry import KVGeometry
from transport.geometry.floats import SourceDtype
from transport.kernels.reference import read_kv
from transport.messages import (
    Endpoint,
    Failed,
    Hello,
    Lease,
    Message,
    OpenPool,
    PoolDescription,
    PoolOpened,
    Prefill,
    Prefilled,
    Pushed,
    Sampling,
    Writer,
)
from transport.model import kv_shape, model_info
from transport.session.client import SessionClient

TOKEN = "prefill-integration-token"
ROOT = Path(__file__).parents[3]
HOST = Path(__file__).with_name("prefill_host.py")
NAME = "p0"
POISON = 0xA5
DEAD_AFTER_S = 60.0
"""The tests compare megabytes in the event loop's thread."""

M = TypeVar("M", bound=Message)


class Worker:
    """One real prefill worker process."""

    def __init__(self, directory: Path, model: Path, **settings: object) -> None:
        self.model = model
        self.directory = directory
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        values = {"name": NAME, "port": self.port, "model": model, "threads": 1, "max_model_len": 1024}
        values |= {"dead_after_s": DEAD_AFTER_S} | settings
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in values.items()]
        self.log = directory / "prefill.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HOST), str(directory), *flags],
                cwd=directory,
                env={**os.environ, "PYTHONPATH": str(ROOT), "HAWK_TOKEN": TOKEN},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def get(self, path: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return httpx.get(self.url + path, headers=headers, timeout=10, trust_env=False)

    def metric(self, name: str, **labels: str) -> float:
        """Sum over the samples of `hawk_prefill_NAME` with these labels; 0 if there are none yet."""
        from prometheus_client.parser import text_string_to_metric_families

        return sum(
            sample.value
            for family in text_string_to_metric_families(self.get("/metrics").text)
            for sample in family.samples
            if sample.name == f"hawk_prefill_{name}" and labels.items() <= sample.labels.items()
        )

    async def until_ready(self, timeout_s: float = 120) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.tail()
            with contextlib.suppress(httpx.TransportError):
                return self.get("/ready").status_code == 200
            return False

        await eventually(ready, timeout_s, 0.2)

    async def until_nothing_held(self, timeout_s: float = 5) -> None:
        """All blocks are back in the engine, without new traffic."""
        await eventually(lambda: self.metric("held_blocks") == 0, timeout_s)
        await eventually(lambda: self.metric("pushing_requests") == 0, timeout_s)

    def saved_pages(self, lease: Lease) -> tuple[np.ndarray, str]:
        """(pages [L, blocks, H, N, 2D] of the request's block table, packing)."""
        with np.load(self.directory / f"{lease.id}.npz") as saved:
            return saved["pages"], str(saved["packing"])

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(10)


async def eventually(check: Any, timeout_s: float = 10, every_s: float = 0.02) -> None:
    """Poll for state that only another process knows."""
    async with asyncio.timeout(timeout_s):
        while not check():
            await asyncio.sleep(every_s)


class Decode:
    """A decode worker's pool on an emulated NPU, and its data plane; it acknowledges what lands unless told not to.

    kv_path host: pieces are moved into the blocks as they are announced; relay and contiguous: all that landed, by
    `read`.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        directory: Path,
        *,
        kv_path: PoolPath = "hawk",
        source_dtype: SourceDtype | None = None,
        checksum: bool = False,
        **geometry: Any,
    ) -> None:
        self.name = name
        self.generation = new_generation()
        shape = kv_shape(model)
        options = {"block_size": 32, "num_blocks": 128, "num_channels": 8, "dtype": "float32"} | geometry
        self.geometry = KVGeometry(shape.num_layers, shape.num_kv_heads, shape.head_dim, **options)
        self.device = EmulatedNpu(self.geometry.num_channels, 1 << 30, name=name)
        self.pool = KVPool(
            self.device,
            self.geometry,
            kv_path=kv_path,
            staging_size=1 << 27,
            source_dtype=source_dtype or self.geometry.dtype,  # type: ignore[arg-type]
            checksum=checksum,
        )
        self.relayout = Relayout(self.pool)
        self.targets: dict[str, Target] = {}
        self.pieces: dict[str, list[Piece]] = {}
        self.address = str(directory / f"{name}.sock")
        self.receiver = ShmReceiver(name, self.generation, TOKEN, self.pool.handed_out(), self, self.address)
        self.model = model_info(model, "m", 1024)
        self.acknowledges = True
        self.joined: dict[Writer, asyncio.Event] = {}
        self.ends: dict[str, asyncio.Future[str]] = {}
        self._ids = itertools.count()
        self._next_block = 0

    @property
    def description(self) -> PoolDescription:
        endpoint = Endpoint(backend="shm", address=self.address)
        return self.pool.description(self.name, self.generation, endpoint, self.model)

    def lease(self, writer: Writer, prompt_tokens: int, *, resident_tokens: int = 0, grant: bool = True) -> Lease:
        """Blocks that lie apart, in falling order: nothing may depend on them being neighbours."""
        count = -(-prompt_tokens // self.geometry.block_size)
        if self._next_block + 2 * count > self.geometry.num_blocks:
            self._next_block = 0
        first, self._next_block = self._next_block, self._next_block + 2 * count
        lease_id = f"{self.name}-{self.generation}-{next(self._ids)}"
        self.ends[lease_id] = asyncio.get_running_loop().create_future()
        slots: Slots | None = None
        if self.pool.staging is not None:
            slots = self.pool.staging.take(*self.pool.staging_room(prompt_tokens, resident_tokens))
        blocks = tuple(range(first + 2 * count - 1, first, -2))
        self.targets[lease_id] = Target(lease_id, writer.worker, blocks, prompt_tokens, resident_tokens, slots)
        self.pieces[lease_id] = []
        return Lease(
            id=lease_id,
            worker=self.name,
            generation=self.generation,
            block_ids=blocks,
            prompt_tokens=prompt_tokens,
            resident_tokens=resident_tokens,
            ttl_s=30,
            slot=self.receiver.grant(lease_id, writer) if grant else 0,
            staging_offset=slots.offset if slots else None,
            staging_slots=slots.count if slots else 0,
            staging_slot_bytes=slots.slot_bytes if slots else 0,
        )

    def read(self, lease: Lease) -> tuple[np.ndarray, np.ndarray]:
        """K and V of the prompt, float32 [L, T, H, D], as a decode engine would see them."""
        if self.pool.kv_path == "contiguous":
            self.relayout.scatter(self.targets[lease.id])
        if self.pool.kv_path == "relay":
            self.relayout.relay(self.targets[lease.id], lambda: True)
        channels = self.device.host_channels()
        assert channels is not None
        return read_kv(channels, self.pool.bases, self.geometry, lease.block_ids, lease.prompt_tokens)

    def poison(self) -> None:
        for channel in self.device.host_channels() or ():
            channel[: max(self.pool.bases) + self.geometry.bank_bytes] = POISON

    # ---- ReceiverEvents

    def announced(self, lease_id: str, piece: Piece) -> None:
        pieces = self.pieces[lease_id]
        if self.pool.kv_path == "host":
            self.relayout.place(self.targets[lease_id], len(pieces), piece)
            self.receiver.drained(lease_id)
        pieces.append(piece)

    def landed(self, lease_id: str) -> None:
        if self.pool.checksum and self.pool.kv_path != "host":
            self.relayout.check(self.targets[lease_id], self.pieces[lease_id])
        self.ends[lease_id].set_result("landed")
        if self.acknowledges:
            self.receiver.acknowledge(lease_id)

    def push_failed(self, lease_id: str, reason: str) -> None:
        self.ends[lease_id].set_result(f"failed: {reason}")

    def writer_joined(self, writer: Writer) -> None:
        self.joined.setdefault(writer, asyncio.Event()).set()

    def writer_lost(self, writer: Writer) -> None:
        self.joined.pop(writer, None)
        for end in self.ends.values():
            if not end.done():
                end.set_result("writer lost")


class Router:
    """A router's session to one prefill worker; `answer` waits for messages about one request."""

    def __init__(self, worker: Worker, name: str = "r0") -> None:
        self.messages: list[Message] = []
        self._changed = asyncio.Condition()
        self.client = SessionClient(
            worker.url,
            TOKEN,
            name,
            new_generation(),
            on_hello=self._hello,
            on_message=self._message,
            on_down=lambda error: None,
            ping_interval_s=0.1,
            dead_after_s=DEAD_AFTER_S,
        )
        self.hello: Hello | None = None
        self._ids = itertools.count()
        self._task: asyncio.Task[None] | None = None

    @property
    def writer(self) -> Writer:
        assert self.hello is not None
        return Writer(worker=self.hello.worker, generation=self.hello.generation)

    async def attach(self) -> None:
        self._task = asyncio.create_task(self.client.run())
        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(lambda: self.hello is not None)

    async def detach(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def open(self, decode: Decode) -> PoolOpened:
        self.send(OpenPool(pool=decode.description))
        opened = await self.expect(PoolOpened, worker=decode.name, generation=decode.generation)
        await asyncio.wait_for(decode.joined.setdefault(self.writer, asyncio.Event()).wait(), 10)
        return opened

    def send(self, message: Message) -> None:
        self.client.send(message)

    def prefill(self, tokens: list[int], lease: Lease | None = None, **sampling: Any) -> str:
        """Send a Prefill (greedy unless told otherwise) → its request id."""
        request_id = f"q{next(self._ids)}"
        options = {"max_tokens": 16, "temperature": 0.0} | sampling
        self.send(Prefill(request_id=request_id, token_ids=tuple(tokens), sampling=Sampling(**options), lease=lease))
        return request_id

    async def expect(self, kind: type[M], *, timeout_s: float = 60, **fields: Any) -> M:
        """The first message of that type with these fields, come or still to come; a `Failed` of the request raises."""

        def matches(message: Message) -> bool:
            return isinstance(message, kind) and all(getattr(message, k) == v for k, v in fields.items())

        def failure(message: Message) -> bool:
            return isinstance(message, Failed) and message.request_id == fields.get("request_id", object())

        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: any(matches(m) or failure(m) for m in self.messages))
        found = next(m for m in self.messages if matches(m) or failure(m))
        if isinstance(found, Failed) and kind is not Failed:
            raise found.error.error()
        assert isinstance(found, kind)
        return found

    async def hand_over(self, tokens: list[int], lease: Lease, **sampling: Any) -> tuple[Prefilled, Pushed]:
        request_id = self.prefill(tokens, lease, **sampling)
        prefilled = await self.expect(Prefilled, request_id=request_id)
        return prefilled, await self.expect(Pushed, request_id=request_id)

    async def _hello(self, hello: Hello) -> None:
        async with self._changed:
            self.hello = hello
            self._changed.notify_all()

    async def _message(self, message: Message) -> None:
        async with self._changed:
            self.messages.append(message)
            self._changed.notify_all()


@contextlib.asynccontextmanager
async def router_of(worker: Worker, name: str = "r0") -> AsyncIterator[Router]:
    router = Router(worker, name)
    await router.attach()
    try:
        yield router
    finally:
        await router.detach()


@contextlib.asynccontextmanager
async def decode_of(name: str, model: Path, directory: Path, **options: Any) -> AsyncIterator[Decode]:
    decode = Decode(name, model, directory, **options)
    await decode.receiver.start()
    try:
        yield decode
    finally:
        await decode.receiver.close()


def tokens_of(seed: int, count: int, vocab: int = 49152) -> list[int]:
    """A prompt nobody else has."""
    return np.random.default_rng(seed).integers(100, vocab, count).tolist()
