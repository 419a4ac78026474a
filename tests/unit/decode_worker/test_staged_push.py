"""Whole pushes into a decode worker that stages or checks them: what is decoded, what comes back.

Over shared memory; in a guest with an RDMA device also over verbs.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decode_fakes import WRITER, Bench, Router

from decode_worker.engines.scripted import continuation, row_value
from decode_worker.npu.base import Buffer, DmaMapping
from decode_worker.npu.emulated import EmulatedNpu
from decode_worker.pool import KVPool
from decode_worker.relayout import Target
from prefill_worker.control.messages import LocalKV
from prefill_worker.push.pieces import Pages, PieceWriter
from prefill_worker.push.pools import Pools
from prefill_worker.push.push import BlockRange, Limits, Push
from transport.backends import connect
from transport.backends.base import OnLost, Piece, PoolWriter, ReceiverEvents
from transport.backends.link.receiver import LinkReceiver
from transport.backends.shm import ShmReceiver
from transport.geometry.pages import PageLayout
from transport.kernels import cpu
from transport.kernels.source import Source
from transport.messages import Cancel, Failed, Lease, Message, PoolDescription, PoolRefused, Pushed

TOKEN = "a-cluster-token-of-some-length"
ROW = 32 * 32 * 4
"""Bytes of a tile row of one tensor in a slot, and in the pool."""
PROMPT = [(7 * i) % 90 for i in range(300)]
LAYOUT = PageLayout(1, 32, 16, "LBHNC", "plain", "float32")
KV = LocalKV(num_layers=1, num_kv_heads=1, head_dim=32, block_size=16, num_blocks=64, dtype="float32")


class Unreachable(EmulatedNpu):
    """An NPU whose memory neither peers nor the host can address."""

    def map_buffer_dma(self, buffer: Buffer) -> list[DmaMapping]:
        raise NotImplementedError("no peer-to-peer on this device")

    def host_channels(self) -> None:  # type: ignore[override]
        return None


def pages_of(prompt: list[int]) -> Pages:
    """The prompt's KV as a prefill worker has it: what the scripted engine would have stored, in GPU pages."""
    count = -(-len(prompt) // LAYOUT.block_size)
    pages = np.zeros((count, 1, LAYOUT.block_size, 64), np.float32)
    for position, token in enumerate(prompt):
        pages[position // LAYOUT.block_size, 0, position % LAYOUT.block_size, 0] = row_value(token, position)
    return Pages(Source([pages], LAYOUT), cpu)


class Rig:
    """A decode worker on its real data plane, and a prefill worker's pools. `gate` holds what D's threads do with
    pieces, one per release, until it is opened; `entered` counts those that came to it."""

    def __init__(self, bench: Bench, pools: Pools, writers: list[PoolWriter]) -> None:
        self.bench, self.pools, self.writers = bench, pools, writers
        self.reports: asyncio.Queue[Message] = asyncio.Queue()
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.pushes: list[Push] = []

    @property
    def table(self) -> list[int]:
        return list(range(64))

    def push(self, lease: Lease, prompt: list[int], *, ttl_s: float = 10.0, chunk_bytes: int = 1 << 20) -> Push:
        loop = asyncio.get_running_loop()
        limits = Limits(ttl_s, chunk_bytes, threading.Semaphore(1))

        def report(message: Message) -> None:
            loop.call_soon_threadsafe(self.reports.put_nowait, message)

        self.pushes.append(Push("t", lease, self.pools, pages_of(prompt), limits, report))
        return self.pushes[-1]

    def whole(self, lease: Lease, prompt: list[int], **options: Any) -> Push:
        """Push all of it in one range."""
        push = self.push(lease, prompt, **options)
        push.add(BlockRange(lease.resident_tokens, len(prompt), self.table, True))
        return push

    async def reported(self) -> Message:
        return await asyncio.wait_for(self.reports.get(), 10)

    def hold_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        relayout = self.bench.worker._arrivals._relayout
        place = relayout.place

        def held(target: Target, number: int, piece: Piece) -> None:
            self.entered.release()
            assert self.gate.acquire(timeout=10)
            place(target, number, piece)

        monkeypatch.setattr(relayout, "place", held)

    async def until_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=10)

    def open_gate(self) -> None:
        self.gate.release(1000)

    async def assert_all_back(self) -> None:
        await self.bench.idle()
        assert self.bench.pool.blocks.held == 0
        assert self.bench.pool.staging is None or self.bench.pool.staging.free == self.bench.pool.staging.size

    async def assert_decodes(self, router: Router, lease: Lease, name: str, prompt: list[int]) -> None:
        await self.bench.decode(router, lease, name, 5)
        assert await router.ended(name) == "length"
        assert router.tokens(name) == continuation(prompt, 5, 7)


MakeReceiver = Callable[[KVPool, ReceiverEvents], LinkReceiver]


@pytest.fixture(params=["shm", "verbs"] if os.environ.get("HAWK_GUEST") else ["shm"])
def plane(request: pytest.FixtureRequest, tmp_path: Path) -> MakeReceiver:
    """The data plane: how to make the decode worker's receiver."""

    def shm(pool: KVPool, events: ReceiverEvents) -> LinkReceiver:
        return ShmReceiver("d0", "gen", TOKEN, pool.handed_out(), events, str(tmp_path / "d0.sock"))

    def verbs(pool: KVPool, events: ReceiverEvents) -> LinkReceiver:
        from transport.backends.verbs.receiver import VerbsReceiver

        return VerbsReceiver("d0", "gen", TOKEN, pool.handed_out(), events, slots=4)

    return {"shm": shm, "verbs": verbs}[request.param]


@asynccontextmanager
async def rig_of(plane: MakeReceiver, **options: Any) -> AsyncIterator[Rig]:
    writers: list[PoolWriter] = []

    def dial(pool: PoolDescription, on_lost: OnLost) -> PoolWriter:
        writers.append(connect(pool, WRITER, TOKEN, on_lost=on_lost))
        return writers[-1]

    async with Bench(make_receiver=plane, **options) as bench:
        rig = Rig(bench, Pools(KV, "f", dial, lambda message: None), writers)
        await asyncio.to_thread(rig.pools.add, bench.worker.description)
        async with asyncio.timeout(10):
            while WRITER not in bench.worker.receiver.writers:
                await asyncio.sleep(0)
        try:
            yield rig
        finally:
            rig.open_gate()
            for push in rig.pushes:
                push.cancel("the test is over")
                await asyncio.to_thread(push.join, 10)
            await asyncio.to_thread(rig.pools.close)


PATHS = [
    ("hawk", True),
    ("relay", False),
    ("relay", True),
    ("host", False),
    ("host", True),
    ("contiguous", False),
    ("contiguous", True),
]


@pytest.mark.parametrize(("kv_path", "checksum"), PATHS)
@pytest.mark.parametrize("length", [5, 64, 300])
async def test_what_was_pushed_is_what_is_decoded(
    plane: MakeReceiver, kv_path: str, checksum: bool, length: int
) -> None:
    """In pieces of one tile row of one tensor: 20 of them through three slots for the longest."""
    prompt = PROMPT[:length]
    async with rig_of(plane, kv_path=kv_path, checksum=checksum, channels=7, slot_bytes=ROW) as rig:
        router = await rig.bench.router()
        for name in ("first", "again"):  # the second finds whole blocks resident
            lease = await rig.bench.reserve(router, name, prompt)
            assert lease.resident_tokens == (0 if name == "first" else length // 32 * 32)
            rig.whole(lease, prompt, chunk_bytes=ROW)
            assert isinstance(await rig.reported(), Pushed)
            await rig.assert_decodes(router, lease, name, prompt)
        pieces = 2 * (-(-length // 32)) + 2 * bool(length % 32)
        announced = pieces if checksum or kv_path == "host" else 0
        assert rig.bench.metric("hawk_decode_announced_pieces_total") == announced
        await rig.assert_all_back()


OTHER_LAYOUTS = [
    ({"num_layers": 2}, "num_layers 1, ours is 2"),
    ({"num_kv_heads": 2}, "num_kv_heads 1, ours is 2"),
    ({"head_dim": 64}, "head_dim 32, ours is 64"),
    ({"dtype": "bfloat16"}, "stages float32, our KV is bfloat16"),
]


@pytest.mark.parametrize(("other", "words"), OTHER_LAYOUTS, ids=[next(iter(other)) for other, _ in OTHER_LAYOUTS])
async def test_case_27_a_prefill_worker_of_another_layout_is_refused_before_it_connects(
    plane: MakeReceiver, other: dict[str, Any], words: str
) -> None:
    """As a rank of other tensor parallelism would be: with both values, and nothing of the decode worker's touched."""
    reports: list[Message] = []
    async with Bench(make_receiver=plane, kv_path="host") as bench:
        kv = KV.model_copy(update=other)
        pools = Pools(kv, "f", lambda pool, on_lost: connect(pool, WRITER, TOKEN, on_lost=on_lost), reports.append)
        await asyncio.to_thread(pools.add, bench.worker.description)
        (refused,) = reports
        assert isinstance(refused, PoolRefused)
        assert refused.error.code == "geometry_mismatch"
        assert words in refused.error.message
        assert not refused.error.error().retryable
        assert not bench.worker.receiver.counters["writers_joined"]
        assert bench.worker.receiver.writers == []


@pytest.mark.parametrize("checksum", [False, True])
async def test_the_host_path_serves_a_device_that_nobody_else_can_address(plane: MakeReceiver, checksum: bool) -> None:
    device = Unreachable(8, 8 << 20)
    async with rig_of(plane, kv_path="host", checksum=checksum, device=device, slot_bytes=3 * ROW) as rig:
        router = await rig.bench.router()
        lease = await rig.bench.reserve(router, "r", PROMPT)
        rig.whole(lease, PROMPT)
        await rig.assert_decodes(router, lease, "r", PROMPT)
        assert device.barriers == 1
        await rig.assert_all_back()


async def test_a_writer_is_never_more_than_its_slots_ahead(
    plane: MakeReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig_of(plane, kv_path="host", slot_bytes=ROW) as rig:
        rig.hold_pieces(monkeypatch)
        router = await rig.bench.router()
        lease = await rig.bench.reserve(router, "r", PROMPT)
        rig.whole(lease, PROMPT)
        for turn in range(20):
            await rig.until_entered()
            inbound = rig.bench.worker.leases.get(lease.id).inbound
            assert inbound.announced <= turn + lease.staging_slots
            rig.gate.release()
        await rig.assert_decodes(router, lease, "r", PROMPT)
        await rig.assert_all_back()


async def test_case_22_a_slow_decode_worker_costs_a_push_one_ttl_and_both_are_told(
    plane: MakeReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig_of(plane, kv_path="host", slot_bytes=ROW) as rig:
        rig.hold_pieces(monkeypatch)
        router = await rig.bench.router()
        lease = await rig.bench.reserve(router, "r", PROMPT)
        rig.whole(lease, PROMPT, ttl_s=0.05)
        failed = await rig.reported()
        assert isinstance(failed, Failed)
        assert "did not empty piece 1 of lease" in failed.error.message
        assert await router.ended("r") == "push_failed"
        rig.open_gate()
        await rig.assert_all_back()


async def cancelled_by_the_prefill_worker(rig: Rig, router: Router) -> None:
    rig.pushes[0].cancel("client gone")


async def cancelled_by_the_router(rig: Rig, router: Router) -> None:
    await rig.bench.worker.on_message(router, Cancel(request_id="r"))


async def writer_died(rig: Rig, router: Router) -> None:
    await asyncio.to_thread(rig.writers[0].close)
    await router.ended("r")


async def router_died(rig: Rig, router: Router) -> None:
    await rig.bench.worker.on_close(router)


@pytest.mark.parametrize(
    "end",
    [cancelled_by_the_prefill_worker, cancelled_by_the_router, writer_died, router_died],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("checksum", [False, True])
async def test_a_push_that_ends_in_the_middle_gives_every_slot_and_block_back(
    plane: MakeReceiver, monkeypatch: pytest.MonkeyPatch, end: Callable[[Rig, Router], Any], checksum: bool
) -> None:
    """While one piece is being moved into the blocks, two wait in their slots, and the writer waits for a slot."""
    async with rig_of(plane, kv_path="host", checksum=checksum, slot_bytes=ROW) as rig:
        rig.hold_pieces(monkeypatch)
        router = await rig.bench.router()
        lease = await rig.bench.reserve(router, "r", PROMPT)
        rig.whole(lease, PROMPT)
        await rig.until_entered()
        await end(rig, router)
        await asyncio.to_thread(rig.pushes[0].join, 10)
        assert rig.pushes[0].released
        assert rig.bench.pool.blocks.held == len(lease.block_ids)  # a thread is at work in them
        assert rig.bench.pool.staging.free < rig.bench.pool.staging.size
        rig.open_gate()
        await rig.assert_all_back()
        assert not rig.entered.acquire(blocking=False)  # the other pieces were let lie


async def test_case_22_a_lease_that_expires_in_the_middle_gives_every_slot_and_block_back(
    plane: MakeReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig_of(plane, kv_path="host", slot_bytes=ROW) as rig:
        rig.hold_pieces(monkeypatch)
        router = await rig.bench.router()
        rig.whole(await rig.bench.reserve(router, "r", PROMPT), PROMPT)
        await rig.until_entered()
        leases = rig.bench.worker.leases
        now = leases._clock()
        monkeypatch.setattr(leases, "_clock", lambda: now + 31)  # the TTL is 30 s
        leases.reap()
        assert await router.ended("r") == "lease_expired"
        failed = await rig.reported()
        assert isinstance(failed, Failed)
        assert failed.error.code == "lease_revoked"
        rig.open_gate()
        await rig.assert_all_back()


@pytest.mark.parametrize(("kv_path", "checksum"), [("host", False), ("host", True), ("hawk", True)])
async def test_a_preempted_prefill_is_pushed_again_from_the_start(
    plane: MakeReceiver, kv_path: str, checksum: bool
) -> None:
    """Other KV the second time, in other steps: nothing of the first time may be left, and nothing be missing."""
    async with rig_of(plane, kv_path=kv_path, checksum=checksum, slot_bytes=ROW) as rig:
        router = await rig.bench.router()
        lease = await rig.bench.reserve(router, "r", PROMPT, shared=False)
        push = rig.push(lease, PROMPT, chunk_bytes=ROW)
        layer = push._pages.source.layers[0]
        final = layer.copy()
        layer += 1.0
        push.add(BlockRange(0, 224, rig.table, False))
        async with asyncio.timeout(10):
            while (inbound := rig.bench.worker.leases.get(lease.id).inbound) is None or inbound.announced < 14:
                await asyncio.sleep(0.001)
        await asyncio.to_thread(push.rewind)
        layer[:] = final
        push.add(BlockRange(0, 96, rig.table, False))
        push.add(BlockRange(96, 300, rig.table, True))
        await rig.assert_decodes(router, lease, "r", PROMPT)
        await rig.assert_all_back()


@pytest.mark.parametrize(("kv_path", "checksum"), PATHS)
async def test_case_33_pages_are_read_from_when_they_are_handed_over_until_they_are_given_back(
    plane: MakeReceiver, kv_path: str, checksum: bool
) -> None:
    """Chunked prefill: what the engine has not written yet, and what it writes after the push, is on no wire."""
    async with rig_of(plane, kv_path=kv_path, checksum=checksum, slot_bytes=ROW) as rig:
        router = await rig.bench.router()
        lease = await rig.bench.reserve(router, "r", PROMPT)
        push = rig.push(lease, PROMPT, chunk_bytes=ROW)
        pages = push._pages.source.layers[0]
        final = pages.copy()
        pages[:] = np.nan
        chunks = [0, 96, 128, 256, 300]
        for start, stop in itertools.pairwise(chunks):
            first = start // LAYOUT.block_size
            pages[first : -(-stop // LAYOUT.block_size)] = final[first : -(-stop // LAYOUT.block_size)]
            assert not push.released
            push.add(BlockRange(start, stop, rig.table, stop == 300))
            async with asyncio.timeout(10):  # until it is read, the next chunk's pages are not what they will be
                while push._bytes < stop // 32 * 2 * ROW:
                    await asyncio.sleep(0.001)
        assert isinstance(await rig.reported(), Pushed)
        assert push.released
        pages[:] = np.nan
        await rig.assert_decodes(router, lease, "r", PROMPT)
        await rig.assert_all_back()


# ---- checksums


@pytest.mark.parametrize("kv_path", ["hawk", "relay", "contiguous"])
async def test_case_35_a_byte_that_changed_before_landing_is_caught_before_the_first_token(
    plane: MakeReceiver, monkeypatch: pytest.MonkeyPatch, kv_path: str
) -> None:
    """The same request, tried again, gives the right tokens: nothing of the bad blocks is shared."""
    async with rig_of(plane, kv_path=kv_path, checksum=True, channels=7) as rig:
        router = await rig.bench.router()
        worker, landed = rig.bench.worker, rig.bench.worker.landed

        def flip_and_land(lease_id: str) -> None:
            monkeypatch.setattr(worker, "landed", landed)
            if kv_path in ("hawk", "relay"):
                block = worker.leases.get(lease_id).blocks[3]
                channel, offset = rig.bench.geometry.locate(rig.bench.geometry.page_index(block, 0, 0, 0))
                mirror = rig.bench.pool.mirror
                channels = mirror.channels if mirror is not None else rig.bench.device.host_channels()
                channels[channel][rig.bench.pool.bases[1] + offset + 5] ^= 1
            else:
                rig.bench.pool.staging_memory[ROW + 5] ^= 1
            landed(lease_id)

        monkeypatch.setattr(worker, "landed", flip_and_land)
        lease = await rig.bench.reserve(router, "bad", PROMPT)
        await rig.bench.decode(router, lease, "bad", 5)
        rig.whole(lease, PROMPT)
        assert await router.ended("bad") == "checksum_mismatch"
        (failed,) = router.of(Failed, "bad")
        assert failed.error.error().retryable
        where = "staging memory" if kv_path == "contiguous" else "channel"
        assert f"lease {lease.id}: {where}" in failed.error.message
        assert "tokens [0, 300)" in failed.error.message
        assert router.tokens("bad") == []
        assert rig.bench.metric("hawk_decode_checksum_failures_total") == 1
        lease = await rig.bench.reserve(router, "again", PROMPT)
        assert lease.resident_tokens == 0
        rig.whole(lease, PROMPT)
        await rig.assert_decodes(router, lease, "again", PROMPT)
        await rig.assert_all_back()


async def test_case_35_a_byte_that_changed_in_its_slot_is_caught_before_it_is_moved(
    plane: MakeReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig_of(plane, kv_path="host", checksum=True, slot_bytes=ROW) as rig:
        rig.hold_pieces(monkeypatch)
        router = await rig.bench.router()
        lease = await rig.bench.reserve(router, "bad", PROMPT)
        await rig.bench.decode(router, lease, "bad", 5)
        rig.whole(lease, PROMPT)
        for _ in range(4):
            await rig.until_entered()
            rig.gate.release()
        await rig.until_entered()
        rig.bench.pool.staging_memory[lease.staging_offset + 4 % 3 * ROW] ^= 0x80
        rig.gate.release()
        assert await router.ended("bad") == "checksum_mismatch"
        (failed,) = router.of(Failed, "bad")
        assert "staging memory does not hold what prefill worker p0 sent for tokens [64, 96) of tensors 0…0" in (
            failed.error.message
        )
        rig.open_gate()
        lease = await rig.bench.reserve(router, "again", PROMPT)
        rig.whole(lease, PROMPT)
        await rig.assert_decodes(router, lease, "again", PROMPT)
        await rig.assert_all_back()


async def test_with_checksums_nothing_is_stored_in_place(plane: MakeReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig_of(plane, checksum=True) as rig:
        staged = []
        real = PieceWriter._staged
        monkeypatch.setattr(PieceWriter, "_staged", lambda pieces, *what: staged.append(what) or real(pieces, *what))
        router = await rig.bench.router()
        lease = await rig.bench.reserve(router, "r", PROMPT)
        rig.whole(lease, PROMPT)
        await rig.assert_decodes(router, lease, "r", PROMPT)
        assert len(staged) == 1
