"""Test doubles around a decode worker: a data plane driven by hand, a router's session, and a prefill worker."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from decode_worker.blocks import BlockPool
from decode_worker.engines.scripted import ScriptedEngine
from decode_worker.lease import LeaseLimits
from decode_worker.leases import LeaseTable
from decode_worker.metrics import DecodeMetrics
from decode_worker.npu.emulated import EmulatedNpu
from decode_worker.pool import KVPool
from decode_worker.worker import DecodeWorker, WorkerLimits
from transport import prefix
from transport.backends.base import Receiver, ReceiverEvents
from transport.errors import WorkerLost
from transport.geometry import KVGeometry
from transport.messages import (
    Decode,
    Endpoint,
    Failed,
    Lease,
    ModelInfo,
    PreemptedNotice,
    Reserve,
    Reserved,
    Sampling,
    Status,
    Tokens,
    Writer,
)

BLOCK = 32
WRITER = Writer(worker="p0", generation="g1")
MODEL = ModelInfo(name="scripted", fingerprint="f", max_model_len=512, vocab_size=97)
ROOT = prefix.root_hash("f", "float32")


class FakeReceiver:
    """A data plane with one connected writer. `hold` keeps every fence from returning until `let_go`."""

    def __init__(self, address: str = "nowhere") -> None:
        self.endpoint = Endpoint(backend="shm", address=address)
        self.writers = {WRITER}
        self.slots = 1 << 30
        self.open: dict[str, Writer] = {}
        self.acknowledged: list[str] = []
        self.emptied: Counter[str] = Counter()
        self.hold = False
        self.fail_fences = 0
        self._released = asyncio.Event()

    async def start(self) -> None: ...

    async def close(self) -> None:
        self.let_go()

    def grant(self, lease_id: str, writer: Writer) -> int:
        if writer not in self.writers:
            raise WorkerLost(f"{writer.worker} is not connected")
        self.open[lease_id] = writer
        return len(self.open)

    def drained(self, lease_id: str) -> None:
        self.emptied[lease_id] += 1

    def acknowledge(self, lease_id: str) -> None:
        del self.open[lease_id]
        self.acknowledged.append(lease_id)

    def ready(self) -> str | None:
        return None

    async def fence(self, lease_id: str) -> None:
        if self.fail_fences:
            self.fail_fences -= 1
            raise OSError("fence failed")
        if self.hold and lease_id in self.open:
            await self._released.wait()
        self.open.pop(lease_id, None)

    def let_go(self) -> None:
        self.hold = False
        self._released.set()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Router:
    """A session's far end: keeps what was sent, by kind."""

    messages: list = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, message) -> None:
        self.messages.append(message)
        self.arrived.set()

    def of(self, kind, request_id: str | None = None) -> list:
        found = [m for m in self.messages if isinstance(m, kind)]
        return found if request_id is None else [m for m in found if m.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        return [t for i in self.items(request_id) for t in i.token_ids]

    def items(self, request_id: str) -> list:
        return [i for m in self.of(Tokens) for i in m.items if i.request_id == request_id]

    def finish(self, request_id: str) -> str | None:
        return next((i.finish_reason for i in self.items(request_id) if i.finish_reason), None)

    def outcome(self, request_id: str):
        """The terminal message's essence, None while there is none."""
        for failed in self.of(Failed, request_id):
            return failed.error.code
        if self.of(PreemptedNotice, request_id):
            return "preempted"
        return self.finish(request_id)

    async def until(self, check, timeout: float = 5.0):
        """Wait, message by message, until `check()` is true."""

        async def wait():
            while not (found := check()):
                self.arrived.clear()
                await self.arrived.wait()
            return found

        return await asyncio.wait_for(wait(), timeout)

    async def ended(self, request_id: str):
        return await self.until(lambda: self.outcome(request_id))


def reserve(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    writer: Writer = WRITER,
    shared: bool = True,
    preemptions: int = 0,
) -> Reserve:
    hashes = prefix.block_hashes(prompt, BLOCK, ROOT) if shared else []
    return Reserve(
        request_id=request_id,
        prompt_tokens=len(prompt),
        max_tokens=max_tokens,
        block_hashes=tuple(hashes),
        tail_tokens=tuple(prompt[len(hashes) * BLOCK :]) if shared else (),
        writer=writer,
        preemptions=preemptions,
    )


def table(num_blocks: int = 16, *, limits: LeaseLimits | None = None, clock=None, **more):
    """(lease table, its receiver, clock, list of (request id, error code) that failed)."""
    receiver, clock, failed = FakeReceiver(), clock or Clock(), []
    leases = LeaseTable(
        BlockPool(num_blocks),
        receiver,
        worker="d0",
        generation="gen",
        block_size=BLOCK,
        max_model_len=512,
        limits=limits or LeaseLimits(ttl_s=30, max_hold_s=100, watermark=0),
        on_failed=lambda lease, error: failed.append((lease.request_id, error.code)),
        on_free=lambda: None,
        clock=clock,
        **more,
    )
    return leases, receiver, clock, failed


class Bench:
    """A decode worker with a scripted engine on an emulated NPU; the test plays router and prefill worker."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        max_batch: int = 8,
        limits: LeaseLimits | None = None,
        eos: Sequence[int] = (),
        channels: int = 8,
        kv_path: str = "hawk",
        staging_size: int = 1 << 20,
        slot_bytes: int = 1 << 16,
        checksum: bool = False,
        relayout_threads: int = 1,
        device: EmulatedNpu | None = None,
        model: ModelInfo = MODEL,
        make_receiver: Callable[[KVPool, ReceiverEvents], Receiver] | None = None,
        address: str = "/nowhere",
    ) -> None:
        self.geometry = KVGeometry(1, 1, 32, BLOCK, num_blocks, channels, "float32")
        self.device = device or EmulatedNpu(channels, 8 << 20)
        self.pool = KVPool(
            self.device,
            self.geometry,
            kv_path=kv_path,
            staging_size=staging_size,
            source_dtype="float32",
            slot_bytes=slot_bytes,
            checksum=checksum,
        )
        memory = EmulatedNpu.host_channels(self.device)  # whatever the device says: the engine is the test's own
        self.engine = ScriptedEngine(memory, self.geometry, self.pool.bases, MODEL.vocab_size)
        self.receiver = FakeReceiver(address)
        self.registry = CollectorRegistry()
        self.events: deque[ReceiverEvents] = deque()

        def receiver(events: ReceiverEvents) -> Receiver:
            return self.receiver if make_receiver is None else make_receiver(self.pool, events)

        self.worker = DecodeWorker(
            name="d0",
            generation="gen",
            model=model,
            eos_ids=frozenset(eos),
            pool=self.pool,
            engine=self.engine,
            make_receiver=receiver,
            metrics=DecodeMetrics(self.registry),
            limits=WorkerLimits(
                max_batch=max_batch,
                status_interval_s=0.001,
                relayout_threads=relayout_threads,
                leases=limits or LeaseLimits(ttl_s=30, max_hold_s=100, watermark=0),
            ),
        )
        self.running: asyncio.Task | None = None

    async def __aenter__(self) -> Bench:
        await self.worker.start()
        self.running = asyncio.create_task(self.worker.run())
        return self

    async def __aexit__(self, *error) -> None:
        self.running.cancel()
        if self.engine.gate is not None:
            self.engine.gate.release(1000)
        await asyncio.gather(self.running, return_exceptions=True)
        await self.worker.close()
        self.device.close()

    async def router(self) -> Router:
        router = Router()
        await self.worker.on_open(router)
        return router

    async def reserve(
        self, router: Router, request_id: str, prompt: Sequence[int], max_tokens: int = 8, **more
    ) -> Lease:
        await self.worker.on_message(router, reserve(request_id, prompt, max_tokens, **more))
        return router.of(Reserved, request_id)[-1].lease

    def push(self, lease: Lease, prompt: Sequence[int]) -> None:
        """What a prefill worker's push leaves behind: the rows that are not resident yet; then `landed`."""
        for position in range(lease.resident_tokens, len(prompt)):
            self.engine.store(lease.block_ids, position, prompt[position])
        self.worker.landed(lease.id)

    async def decode(
        self, router: Router, lease: Lease, request_id: str, token: int, *, generated: int = 1, **sampling
    ) -> None:
        sampling = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | sampling
        await self.worker.on_message(
            router,
            Decode(
                request_id=request_id,
                lease_id=lease.id,
                token_id=token,
                generated=generated,
                sampling=Sampling(**sampling),
            ),
        )

    async def serve(self, router: Router, request_id: str, prompt: Sequence[int], token: int = 5, **sampling) -> Lease:
        """Reserve, push and start decoding; does not wait for the tokens."""
        lease = await self.reserve(router, request_id, prompt, sampling.get("max_tokens", 8))
        self.push(lease, prompt)
        await self.decode(router, lease, request_id, token, **sampling)
        return lease

    async def idle(self) -> None:
        """Wait until every lease is back."""

        async def wait():
            while len(self.worker.leases):
                self.worker._empty.clear()
                await self.worker._empty.wait()

        await asyncio.wait_for(wait(), 5)

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


def statuses(router: Router) -> list[Status]:
    return router.of(Status)
