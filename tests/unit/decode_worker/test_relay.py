"""kv_path relay: writers fill host memory of the pool's shape, D copies what has landed to the device."""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from decode_fakes import Bench, Router
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.mirror import Mirror
from decode_worker.npu.base import Buffer, DmaMapping
from decode_worker.npu.emulated import EmulatedNpu
from decode_worker.pool import KVPool
from decode_worker.relayout import Relayout, Target
from transport.backends.base import Piece
from transport.geometry import KVGeometry
from transport.geometry.plan import plan
from transport.geometry.staging import execute
from transport.messages import Cancel, Endpoint, Failed, Lease, ModelInfo

POISON = 0xA5
PROMPT = [3, 1, 4, 1, 5] * 20
MODEL = ModelInfo(name="m", fingerprint="f", max_model_len=512, vocab_size=10)


class Unreachable(EmulatedNpu):
    """An NPU whose memory neither peers nor the host can address. `writes`: (bank, address, length) of all writes."""

    def __init__(self, *size: int) -> None:
        super().__init__(*size)
        self.writes: list[tuple[int, int, int]] = []

    def map_buffer_dma(self, buffer: Buffer) -> list[DmaMapping]:
        raise NotImplementedError("no peer-to-peer on this device")

    def host_channels(self) -> None:  # type: ignore[override]
        return None

    def write(self, bank: int, address: int, data: np.ndarray) -> None:
        self.writes.append((bank, address, data.nbytes))
        super().write(bank, address, data)


def pool_on(device: EmulatedNpu, geometry: KVGeometry, kv_path: str) -> KVPool:
    device.allocate(8, 64 * 77)  # as something else may lie in front
    pool = KVPool(device, geometry, kv_path=kv_path)  # type: ignore[arg-type]
    for channel in EmulatedNpu.host_channels(device):
        channel[:] = POISON
    return pool


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([32, 64]),
    block_size=st.sampled_from([32, 64]),
    channels=st.integers(1, 8),
    dtype=st.sampled_from(["float32", "bfloat16", "bfp8_b"]),
    prompt=st.integers(1, 300),
    resident=st.integers(0, 3),
    data=st.data(),
)
def test_after_the_relay_the_device_holds_what_hawk_would_have_written(
    heads: int,
    head_dim: int,
    block_size: int,
    channels: int,
    dtype: str,
    prompt: int,
    resident: int,
    data: st.DataObject,
) -> None:
    """Every byte of every bank, the untouched ones too; the writer has the same description both times."""
    geometry = KVGeometry(1, heads, head_dim, block_size, 12, channels, dtype)  # type: ignore[arg-type]
    blocks = data.draw(st.permutations(range(12)))[: -(-prompt // block_size)]
    start = min(resident * block_size, prompt // block_size * block_size)
    memories = []
    for kv_path, make in (("hawk", EmulatedNpu), ("relay", Unreachable)):
        device = make(channels, 1 << 21)
        pool = pool_on(device, geometry, kv_path)
        described = pool.description("d0", "g", Endpoint(backend="shm", address="/x"), MODEL)
        assert described.kv_path == "hawk"
        if start < prompt:
            write(pool, described.bases, blocks, start, prompt)
        if pool.mirror is not None:
            target = Target("l", "p0", blocks, prompt, start, None)
            copied = Relayout(pool).relay(target, lambda: True)
            assert copied == sum(length for _, _, length in device.writes)
        memories.append([channel.copy() for channel in EmulatedNpu.host_channels(device)])
        pool.close()
        device.close()
    for direct, relayed in zip(*memories, strict=True):
        assert np.array_equal(direct, relayed)


def write(pool: KVPool, bases: Sequence[int], blocks: Sequence[int], start: int, stop: int) -> None:
    """What a prefill worker's push does, by the description that it has: the plan, on the regions it was handed."""
    regions = [
        np.frombuffer(mmap.mmap(fd, region.length, offset=offset), np.uint8) for region, fd, offset in pool.handed_out()
    ]
    runs = plan(pool.geometry, bases, blocks, start, stop)
    staging = np.random.default_rng(5).integers(0, 256, sum(run.length for run in runs), dtype=np.uint8)
    execute(regions, staging, runs)


def test_the_mirror_is_as_small_as_the_pools_span() -> None:
    device = Unreachable(8, 1 << 21)
    geometry = KVGeometry(2, 1, 32, 32, 16, 8, "bfloat16")
    device.allocate(8, 1 << 20)
    pool = KVPool(device, geometry, kv_path="relay")
    assert [region.length for region, _, _ in pool.handed_out()] == [4 * geometry.bank_bytes] * 8
    assert pool.bases[0] == 1 << 20
    pool.close()
    assert all(bank.used == 1 << 20 for bank in device.memory_view())
    pool.mirror.close()  # once more does nothing


async def begin(bench: Bench, name: str = "r") -> tuple[Router, Lease]:
    router = await bench.router()
    return router, await bench.reserve(router, name, PROMPT)


class Held:
    """A device whose writes wait for `gate`, one release each; `entered` counts those that wait."""

    def __init__(self, device: Unreachable, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.gate = threading.Semaphore(0), threading.Semaphore(0)
        self.at_once = self.most = 0
        self._lock = threading.Lock()
        write = device.write

        def held(*what: object) -> None:
            with self._lock:
                self.at_once += 1
                self.most = max(self.most, self.at_once)
            self.entered.release()
            assert self.gate.acquire(timeout=10)
            write(*what)
            with self._lock:
                self.at_once -= 1

        monkeypatch.setattr(device, "write", held)

    async def until_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=10)

    def open(self) -> None:
        self.gate.release(10_000)


async def test_decoding_waits_for_the_copy_and_the_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Unreachable(8, 8 << 20)
    async with Bench(kv_path="relay", device=device) as bench:
        held = Held(device, monkeypatch)
        router, lease = await begin(bench)
        await bench.decode(router, lease, "r", 5)
        bench.worker.landed(lease.id)
        await held.until_entered()
        assert bench.receiver.acknowledged == [lease.id]  # the writer may go: host memory is ours
        assert (device.barriers, bench.engine.steps) == (0, 0)
        held.open()
        assert await router.ended("r") == "length"
        assert device.barriers == 1
        assert bench.metric("hawk_decode_relayed_bytes_total") == 8 * bench.geometry.page_bytes
        await bench.idle()


async def cancelled(bench: Bench, router: Router, lease: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.worker.on_message(router, Cancel(request_id="r"))


async def router_died(bench: Bench, router: Router, lease: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.worker.on_close(router)


async def expired(bench: Bench, router: Router, lease: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    now = bench.worker.leases._clock()
    monkeypatch.setattr(bench.worker.leases, "_clock", lambda: now + 31)  # the TTL is 30 s
    bench.worker.leases.reap()


ENDS: list[Callable] = [cancelled, router_died, expired]


@pytest.mark.parametrize("end", ENDS, ids=lambda f: f.__name__)
async def test_a_lease_that_ends_during_its_copy_keeps_its_blocks_until_the_copy_has_stopped(
    monkeypatch: pytest.MonkeyPatch, end: Callable
) -> None:
    device = Unreachable(8, 8 << 20)
    async with Bench(kv_path="relay", device=device) as bench:
        held = Held(device, monkeypatch)
        router, lease = await begin(bench)
        bench.worker.landed(lease.id)
        await held.until_entered()
        await end(bench, router, lease, monkeypatch)
        await asyncio.sleep(0.02)
        assert bench.pool.blocks.held == len(lease.block_ids)
        held.open()
        await bench.idle()
        assert bench.pool.blocks.held == 0
        assert len(device.writes) == 1  # the one that was under way; the others were let lie
        assert bench.pool.blocks.resident() == []
        assert device.barriers == 0


async def test_blocks_of_an_aborted_lease_are_never_copied() -> None:
    """Before the writer was done, and after it: while its copy waits for a thread."""
    device = Unreachable(8, 8 << 20)
    async with Bench(kv_path="relay", device=device) as bench:
        router, lease = await begin(bench)
        bench.worker.push_failed(lease.id, "it was stopped")
        bench.worker.landed(lease.id)
        assert await router.ended("r") == "push_failed"
        await bench.idle()
        gate, entered = threading.Event(), threading.Event()
        bench.worker._arrivals._executor.submit(lambda: (entered.set(), gate.wait(10)))
        assert await asyncio.to_thread(entered.wait, 10)
        _, lease = await begin(bench)
        bench.worker.landed(lease.id)
        await bench.worker.on_message(bench.worker.leases.get(lease.id).owner, Cancel(request_id="r"))
        gate.set()
        await bench.idle()
        assert device.writes == []
        assert bench.pool.blocks.held == 0


@pytest.mark.parametrize("threads", [1, 2])
async def test_no_more_leases_are_copied_at_once_than_there_are_threads(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    device = Unreachable(8, 8 << 20)
    async with Bench(kv_path="relay", device=device, relayout_threads=threads) as bench:
        held = Held(device, monkeypatch)
        router = await bench.router()
        for number in range(5):
            prompt = [number, *PROMPT]
            lease = await bench.reserve(router, str(number), prompt)
            await bench.decode(router, lease, str(number), 5)
            bench.worker.landed(lease.id)
        for _ in range(threads):
            await held.until_entered()
        await asyncio.sleep(0.02)
        assert held.most == threads
        held.open()
        for number in range(5):
            assert await router.ended(str(number)) == "length"
        assert held.most == threads
        await bench.idle()


async def test_a_device_that_fails_a_write_fails_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Unreachable(8, 8 << 20)
    async with Bench(kv_path="relay", device=device) as bench:

        def broken(*what: object) -> None:
            raise RuntimeError("the card fell off the bus")

        monkeypatch.setattr(device, "write", broken)
        router, lease = await begin(bench)
        bench.worker.landed(lease.id)
        assert await router.ended("r") == "internal_error"
        (failed,) = router.of(Failed, "r")
        assert "fell off the bus" in failed.error.message
        await bench.idle()
        assert bench.pool.blocks.held == 0


async def test_with_checksums_what_is_in_host_memory_is_compared_before_it_is_copied() -> None:
    device = Unreachable(8, 8 << 20)
    async with Bench(kv_path="relay", checksum=True, device=device) as bench:
        router, lease = await begin(bench)
        digests = (1,) * 8
        bench.worker.announced(lease.id, Piece(0, 100, 0, 1, digests))
        bench.worker.landed(lease.id)
        assert await router.ended("r") == "checksum_mismatch"
        await bench.idle()
        assert device.writes == []


def test_the_copy_stops_where_it_is_told_to() -> None:
    device = Unreachable(4, 1 << 20)
    geometry = KVGeometry(1, 2, 32, 32, 8, 4, "bfloat16")
    buffers = [device.allocate_tensor((8, 2, 32, 32), "bfloat16") for _ in range(2)]
    mirror = Mirror(geometry, [buffer.address for buffer in buffers])
    answers = iter([True, True, False])  # each channel that has any has three pages in a row
    assert mirror.copy_to(device, [0, 2, 4], 0, 96, go_on=lambda: next(answers)) == 2 * 3 * geometry.page_bytes
    assert len(device.writes) == 2
    assert mirror.copy_to(device, [0, 2, 4], 96, 96) == 0
    mirror.close()
    device.close()
