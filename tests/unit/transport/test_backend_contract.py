"""The data-plane contract, the same for every backend: what a push does, and what a fence guarantees."""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
from backend_harness import BACKENDS, POISON, REGION_BYTES, TOKEN, WRITER, Backend, Pool

from transport.backends import connect
from transport.backends.base import LeaseWriter, Piece, PoolWriter, Run
from transport.backends.link import packets
from transport.backends.link.slots import split_token
from transport.backends.link.writer import LinkPoolWriter
from transport.errors import (
    AuthenticationFailed,
    GeometryMismatch,
    HawkError,
    LeaseRevoked,
    Overloaded,
    PushFailed,
    StaleGeneration,
    WorkerLost,
)
from transport.messages import Lease, Region, Writer

MAPPED = {"shm"}
"""Backends that promise `LeaseWriter.mapped`: the kernel stores in place there, and a fence waits for its chunks."""


@pytest.fixture(params=BACKENDS)
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    backend = BACKENDS[request.param](tmp_path)
    yield backend
    await backend.close()


@pytest.fixture
async def pool(backend: Backend) -> Pool:
    return await backend.pool()


async def join(pool: Pool, writer: Writer = WRITER, on_lost: Callable[[str], None] | None = None) -> PoolWriter:
    connected = await asyncio.to_thread(connect, pool.description, writer, TOKEN, on_lost=on_lost)
    assert await pool.events.wait() == ("writer_joined", writer)
    return connected


@pytest.fixture
async def writer(pool: Pool) -> AsyncIterator[PoolWriter]:
    connected = await join(pool)
    yield connected
    await asyncio.to_thread(connected.close)


def pattern(length: int, value: int = 7) -> np.ndarray:
    return np.full(length, value, np.uint8)


async def refused(writer: PoolWriter, lease: Lease) -> None:
    """The lease cannot be written: known when it is opened, or when its first write is on its way."""

    def push() -> None:
        opened = writer.open(lease)
        opened.write(pattern(10), [Run(0, 0, 0, 10)])
        opened.complete(10.0)

    with pytest.raises(LeaseRevoked, match=f"lease {lease.id}"):
        await asyncio.to_thread(push)


async def push(pool: Pool, lease: LeaseWriter, staging: np.ndarray, runs: list[Run]) -> None:
    """All of a lease's push, from its first write until it is acknowledged."""

    def write() -> None:
        lease.write(staging, runs)
        lease.complete(10.0)

    pushing = asyncio.create_task(asyncio.to_thread(write))
    event = await pool.events.wait()
    assert event[0] == "landed"
    pool.receiver.acknowledge(str(event[1]))
    await pushing


async def grant_soon(pool: Pool, lease_id: str) -> Lease:
    """A slot may need a moment after a fence."""
    for _ in range(200):
        try:
            return pool.grant(lease_id)
        except Overloaded:
            await asyncio.sleep(0.05)
    return pool.grant(lease_id)


async def fenced_soon(task: asyncio.Task[None]) -> bool:
    """Whether a fence returns within a time in which it would if nothing held it back."""
    done, _ = await asyncio.wait([task], timeout=0.2)
    return bool(done)


# ---- pushing ---------------------------------------------------------------------------------------


async def test_runs_land_where_they_say_and_nowhere_else(pool: Pool, writer: PoolWriter) -> None:
    staging = np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8)
    runs = [
        Run(0, 0, 5, 100),
        Run(1, 100, 0, 200_000),
        Run(0, 299_999, REGION_BYTES - 1, 1),
        Run(1, 7, 700_000, 40_000),
    ]
    expected = [np.full(REGION_BYTES, POISON, np.uint8) for _ in range(2)]
    for run in runs:
        expected[run.region][run.remote_offset :][: run.length] = staging[run.local_offset :][: run.length]
    lease = writer.open(pool.grant("a"))
    await asyncio.to_thread(lease.write, staging, runs)
    push = asyncio.create_task(asyncio.to_thread(lease.complete, 10.0))
    assert await pool.events.wait() == ("landed", "a")
    assert np.array_equal(pool.memory[0], expected[0])
    assert np.array_equal(pool.memory[1], expected[1])
    pool.receiver.acknowledge("a")
    await push


async def test_complete_waits_for_the_acknowledgement(pool: Pool, writer: PoolWriter) -> None:
    lease = writer.open(pool.grant("a"))
    push = asyncio.create_task(asyncio.to_thread(lease.complete, 10.0))
    assert await pool.events.wait() == ("landed", "a")
    assert not await fenced_soon(push)
    pool.receiver.acknowledge("a")
    await push


async def test_complete_without_acknowledgement_fails_in_time(pool: Pool, writer: PoolWriter) -> None:
    lease = writer.open(pool.grant("a"))
    with pytest.raises(PushFailed, match=r"did not acknowledge lease a within 0\.1 s"):
        await asyncio.to_thread(lease.complete, 0.1)


async def test_a_completed_lease_cannot_be_written(pool: Pool, writer: PoolWriter) -> None:
    lease = writer.open(pool.grant("a"))
    push = asyncio.create_task(asyncio.to_thread(lease.complete, 10.0))
    await pool.events.wait()
    pool.receiver.acknowledge("a")
    await push
    with pytest.raises(PushFailed, match="completed"):
        lease.write(pattern(10), [Run(0, 0, 0, 10)])
    assert (pool.memory[0] == POISON).all()


@pytest.mark.parametrize("backend", sorted(MAPPED), indirect=True)
async def test_stores_through_the_mapping_land(pool: Pool, writer: PoolWriter) -> None:
    lease = writer.open(pool.grant())
    assert lease.mapped is not None
    with lease.chunk():
        lease.mapped[1][10:20] = 3
    assert (pool.memory[1][10:20] == 3).all()


@pytest.mark.parametrize(
    "run",
    [
        Run(2, 0, 0, 1),
        Run(-1, 0, 0, 1),
        Run(0, 0, REGION_BYTES, 1),
        Run(0, 0, REGION_BYTES - 5, 6),
        Run(0, 0, -1, 1),
        Run(0, 95, 0, 6),
        Run(0, -1, 0, 1),
        Run(0, 0, 0, -1),
    ],
)
async def test_a_run_out_of_bounds_is_refused_by_name(pool: Pool, writer: PoolWriter, run: Run) -> None:
    lease = writer.open(pool.grant("a"))
    with pytest.raises(PushFailed, match=rf"run 1 of lease a .*region={run.region}, .*region {run.region} has"):
        lease.write(pattern(100), [Run(0, 0, 0, 1), run])
    assert all((region == POISON).all() for region in pool.memory)


async def test_an_announced_piece_is_in_place(pool: Pool, writer: PoolWriter) -> None:
    lease = writer.open(pool.grant("a"))
    pieces = [Piece(0, 32, 0, 1), Piece(32, 64, 2, 5, (0, (1 << 64) - 1)), Piece(64, 70, 0, 1, (7, 8))]

    def announce() -> None:
        for number, piece in enumerate(pieces):
            staging = lease.stage(100_000)
            staging[:] = number + 1
            lease.write(staging, [Run(number % 2, 0, number * 100_000, 100_000)])
            lease.announce(piece)
        lease.complete(10.0)

    pushing = asyncio.create_task(asyncio.to_thread(announce))
    for number, piece in enumerate(pieces):
        assert await pool.events.wait() == ("announced", "a", piece)
        assert (pool.memory[number % 2][number * 100_000 :][:100_000] == number + 1).all()
    assert await pool.events.wait() == ("landed", "a")
    pool.receiver.acknowledge("a")
    await pushing


async def test_case_33_a_buffer_may_be_filled_again_as_soon_as_its_write_has_returned(
    pool: Pool, writer: PoolWriter
) -> None:
    """The next chunk's bytes are never sent as this one's, by whatever is still under way."""
    length, count = 64 * 1024, REGION_BYTES // (64 * 1024)
    lease = writer.open(pool.grant("a"))
    buffer = pattern(length)

    def write() -> None:
        for number in range(count):
            for region in range(2):
                buffer[:] = 2 * number + region
                lease.write(buffer, [Run(region, 0, number * length, length)])
                buffer[:] = 0xFF
        lease.complete(10.0)

    pushing = asyncio.create_task(asyncio.to_thread(write))
    assert await pool.events.wait() == ("landed", "a")
    for region in range(2):
        expected = np.arange(region, 2 * count, 2, dtype=np.uint8)[:, None]
        assert (pool.memory[region].reshape(count, length) == expected).all()
    pool.receiver.acknowledge("a")
    await pushing


async def test_a_writer_waits_until_its_pieces_are_drained(pool: Pool, writer: PoolWriter) -> None:
    lease = writer.open(pool.grant("a"))
    await asyncio.to_thread(lease.announce, Piece(0, 32, 0, 0))
    await asyncio.to_thread(lease.announce, Piece(32, 64, 0, 0))
    await pool.events.wait()
    await pool.events.wait()
    waiting = asyncio.create_task(asyncio.to_thread(lease.wait_drained, 2, 10.0))
    pool.receiver.drained("a")
    await asyncio.to_thread(lease.wait_drained, 1, 10.0)
    assert not await fenced_soon(waiting)
    pool.receiver.drained("a")
    await asyncio.wait_for(waiting, 10)


async def test_pieces_that_are_not_drained_fail_in_time(pool: Pool, writer: PoolWriter) -> None:
    lease = writer.open(pool.grant("a"))
    await asyncio.to_thread(lease.announce, Piece(0, 32, 0, 0))
    with pytest.raises(PushFailed, match=r"did not empty piece 1 of lease a within 0\.1 s"):
        await asyncio.to_thread(lease.wait_drained, 1, 0.1)


async def test_case_22_a_fence_wakes_a_writer_that_waits_for_room(pool: Pool, writer: PoolWriter) -> None:
    lease = writer.open(pool.grant("a"))
    await asyncio.to_thread(lease.announce, Piece(0, 32, 0, 0))
    await pool.events.wait()
    waiting = asyncio.create_task(asyncio.to_thread(lease.wait_drained, 1, 10.0))
    assert not await fenced_soon(waiting)
    await asyncio.wait_for(pool.receiver.fence("a"), 10)
    with pytest.raises(LeaseRevoked):
        await waiting
    with pytest.raises(LeaseRevoked):
        lease.announce(Piece(32, 64, 0, 0))
    pool.receiver.drained("a")  # of a lease that is over: nothing to tell


async def test_case_10_an_abort_wakes_a_writer_that_waits_for_room(pool: Pool, writer: PoolWriter) -> None:
    lease = writer.open(pool.grant("a"))
    waiting = asyncio.create_task(asyncio.to_thread(lease.wait_drained, 1, 10.0))
    assert not await fenced_soon(waiting)
    lease.abort("client gone")
    with pytest.raises(PushFailed, match="client gone"):
        await waiting


async def test_case_22_abort_tells_the_reason_once(pool: Pool, writer: PoolWriter) -> None:
    lease = writer.open(pool.grant("a"))
    lease.abort("engine failed")
    lease.abort("again")
    assert await pool.events.wait() == ("push_failed", "a", "engine failed")
    with pytest.raises(PushFailed, match="engine failed"):
        lease.write(pattern(10), [Run(0, 0, 0, 10)])
    await pool.receiver.fence("a")
    assert pool.events.queue.empty()


@pytest.mark.parametrize("backend", sorted(MAPPED), indirect=True)
async def test_case_10_abort_from_another_thread_waits_for_the_open_chunk(pool: Pool, writer: PoolWriter) -> None:
    """An abort in the middle of the hand-off is deferred past it."""
    lease = writer.open(pool.grant("a"))
    with lease.chunk():
        await asyncio.to_thread(lease.abort, "client gone")
        fence = asyncio.create_task(pool.receiver.fence("a"))
        assert not await fenced_soon(fence)
    await asyncio.wait_for(fence, 10)


# ---- fencing ---------------------------------------------------------------------------------------


async def test_a_fenced_lease_is_refused(pool: Pool, writer: PoolWriter) -> None:
    lease = writer.open(pool.grant("a"))
    await asyncio.wait_for(pool.receiver.fence("a"), 10)

    def push() -> None:
        lease.write(pattern(10), [Run(0, 0, 0, 10)])
        lease.complete(10.0)

    with pytest.raises(LeaseRevoked, match="lease a was fenced by decode-0"):
        await asyncio.to_thread(push)
    with pytest.raises(LeaseRevoked), lease.chunk():
        pytest.fail("the chunk was opened")
    with pytest.raises(LeaseRevoked):
        lease.complete(1.0)
    assert (pool.memory[0] == POISON).all()


@pytest.mark.parametrize("backend", sorted(MAPPED), indirect=True)
async def test_case_09_a_fence_waits_for_the_open_chunk(pool: Pool, writer: PoolWriter) -> None:
    lease = writer.open(pool.grant("a"))
    with lease.chunk():
        fence = asyncio.create_task(pool.receiver.fence("a"))
        assert not await fenced_soon(fence)
    await asyncio.wait_for(fence, 10)


@pytest.mark.parametrize("backend", sorted(MAPPED), indirect=True)
async def test_fences_of_other_leases_do_not_wait(pool: Pool, writer: PoolWriter) -> None:
    busy, other = writer.open(pool.grant("busy")), writer.open(pool.grant("other"))
    with busy.chunk():
        await asyncio.wait_for(pool.receiver.fence("other"), 10)
        with pytest.raises(LeaseRevoked):
            other.write(pattern(1), [Run(0, 0, 0, 1)])


async def test_a_lease_that_was_never_opened_is_fenced(pool: Pool, writer: PoolWriter) -> None:
    lease = pool.grant("a")
    await asyncio.wait_for(pool.receiver.fence("a"), 10)
    await refused(writer, lease)
    assert (pool.memory[0] == POISON).all()


async def test_a_fence_is_idempotent(pool: Pool, writer: PoolWriter) -> None:
    writer.open(pool.grant("a"))
    for _ in range(2):
        await asyncio.wait_for(asyncio.gather(*(pool.receiver.fence("a") for _ in range(3))), 10)
    await asyncio.wait_for(pool.receiver.fence("never granted"), 10)


@pytest.mark.parametrize("backend", sorted(MAPPED), indirect=True)
async def test_one_cancelled_fence_does_not_end_the_others(pool: Pool, writer: PoolWriter) -> None:
    lease = writer.open(pool.grant("a"))
    with lease.chunk():
        fences = [asyncio.create_task(pool.receiver.fence("a")) for _ in range(3)]
        await asyncio.sleep(0)
        fences[0].cancel()
    await asyncio.wait_for(asyncio.gather(*fences[1:]), 10)


async def test_case_22_a_fence_after_landing_wakes_the_waiting_writer(pool: Pool, writer: PoolWriter) -> None:
    lease = writer.open(pool.grant("a"))
    push = asyncio.create_task(asyncio.to_thread(lease.complete, 10.0))
    await pool.events.wait()
    await asyncio.wait_for(pool.receiver.fence("a"), 10)
    with pytest.raises(LeaseRevoked):
        await push


async def test_a_fence_stops_a_long_write_between_chunks(backend: Backend) -> None:
    pool = await backend.pool(lengths=(16 << 20,))
    writer = await join(pool)
    lease = writer.open(pool.grant("a"))
    staging = pattern(16 << 20)
    started = threading.Event()

    def push() -> None:
        while True:
            started.set()
            lease.write(staging, [Run(0, 0, 0, len(staging))])

    task = asyncio.create_task(asyncio.to_thread(push))
    await asyncio.to_thread(started.wait)
    await asyncio.wait_for(pool.receiver.fence("a"), 10)
    pool.memory[0][:] = POISON
    with pytest.raises(LeaseRevoked):
        await task
    assert (pool.memory[0] == POISON).all()
    writer.close()


async def test_case_09_bytes_of_the_next_owner_survive_many_fences(pool: Pool, writer: PoolWriter) -> None:
    """Threads write as fast as they can while their leases are fenced; after a fence nothing changes."""
    region = pool.memory[0]
    area = REGION_BYTES // 4

    def hammer(lease: LeaseWriter, part: int) -> None:
        run = [Run(0, 0, part * area, area)]
        staging = pattern(area, part)
        try:
            while True:
                lease.write(staging, run)
        except LeaseRevoked:
            return

    async def owner(part: int) -> None:
        mine = region[part * area : (part + 1) * area]
        for turn in range(25):
            lease_id = f"{part}-{turn}"
            task = asyncio.create_task(asyncio.to_thread(hammer, writer.open(pool.grant(lease_id)), part))
            while (mine != part).any():
                await asyncio.sleep(0)
            await asyncio.wait_for(pool.receiver.fence(lease_id), 10)
            mine[:] = POISON
            await task
            assert (mine == POISON).all()

    await asyncio.gather(*(owner(part) for part in range(4)))


async def test_slots_come_back(backend: Backend) -> None:
    pool = await backend.pool(slots=2)
    writer = await join(pool)
    for turn in range(10):
        kept = writer.open(await grant_soon(pool, f"kept-{turn}"))
        await grant_soon(pool, f"fenced-{turn}")
        with pytest.raises(Overloaded):
            pool.grant("one too many")
        await asyncio.wait_for(pool.receiver.fence(f"fenced-{turn}"), 10)
        kept.abort("done")
        await pool.events.wait()
    writer.close()


# ---- who may write ---------------------------------------------------------------------------------


async def test_a_wrong_token_is_refused(pool: Pool) -> None:
    with pytest.raises(AuthenticationFailed):
        await asyncio.to_thread(connect, pool.description, WRITER, "wrong")
    assert pool.events.queue.empty()


async def test_case_19_another_generation_of_the_pool_is_refused_by_name(backend: Backend) -> None:
    before = await backend.pool(generation="d1")
    await before.receiver.close()
    after = await backend.pool(generation="d2")
    with pytest.raises(StaleGeneration, match="generation d2"):
        await asyncio.to_thread(connect, before.description, WRITER, TOKEN)
    writer = await join(after)
    with pytest.raises(StaleGeneration, match="generation d1"):
        writer.open(before.lease(after.receiver.grant("a", WRITER), "a"))
    writer.close()


async def test_case_19_what_a_writer_of_the_former_generation_sends_lands_nowhere(backend: Backend) -> None:
    """It is in the middle of a push when the receiver restarts over the same memory, at the same address."""
    before = await backend.pool(generation="d1")
    writer = await join(before)
    lease, old = writer.open(before.grant("a")), before.grant("old")
    staging, run = pattern(REGION_BYTES), [Run(0, 0, 0, REGION_BYTES)]
    started = threading.Event()

    def hammer() -> None:
        while True:
            lease.write(staging, run)
            started.set()

    task = asyncio.create_task(asyncio.to_thread(hammer))
    await asyncio.to_thread(started.wait, 10)
    after = await backend.restarted(before, "d2")
    after.memory[0][:] = POISON
    with pytest.raises((PushFailed, LeaseRevoked), match="decode-0"):
        await task
    again = await join(after)
    for stale in (old, before.lease(after.receiver.grant("b", WRITER), "b")):
        with pytest.raises(StaleGeneration, match="generation d1"):
            again.open(stale)
    await push(after, again.open(after.grant("c")), pattern(10, 9), [Run(0, 0, 0, 10)])
    assert (after.memory[0][:10] == 9).all()
    assert (after.memory[0][10:] == POISON).all()
    await asyncio.to_thread(again.close)
    await asyncio.to_thread(writer.close)


@pytest.mark.parametrize(
    "lengths", [(4096, 4096), (REGION_BYTES,), (REGION_BYTES,) * 3, (REGION_BYTES, REGION_BYTES // 2)], ids=str
)
async def test_case_27_regions_other_than_described_are_refused_at_the_handshake(
    pool: Pool, lengths: tuple[int, ...]
) -> None:
    """Number and lengths: before a byte is written, and with both values."""
    channels = tuple(Region(address=0, rkey=index, length=length) for index, length in enumerate(lengths))
    other = pool.description.model_copy(update={"channels": channels})
    words = rf"pool decode-0 hands out regions of .* bytes, its description says {re.escape(str(list(lengths)))}"
    with pytest.raises(GeometryMismatch, match=words):
        await asyncio.to_thread(connect, other, WRITER, TOKEN)
    writer = await asyncio.to_thread(connect, pool.description, WRITER, TOKEN)
    pushing = asyncio.create_task(asyncio.to_thread(writer.open(pool.grant("a")).complete, 10.0))
    while (event := await pool.events.wait())[0] in ("writer_joined", "writer_lost"):
        pass  # a backend may count the other one as joined until it has gone
    assert event == ("landed", "a")
    pool.receiver.acknowledge("a")
    await pushing
    assert all((region == POISON).all() for region in pool.memory)
    await asyncio.to_thread(writer.close)


RANKS = [Writer(worker=f"prefill-{worker}", generation=f"p{rank}") for worker in range(2) for rank in range(2)]


async def test_case_29_equal_slots_of_many_writers_are_kept_apart(pool: Pool) -> None:
    """Ranks of one worker, and equal ranks of two: all land at once, and are acknowledged in any order."""
    joined = [await join(pool, rank) for rank in RANKS]
    part = REGION_BYTES // len(RANKS)
    leases, pushes = {}, {}
    for number, (writer, rank) in enumerate(zip(joined, RANKS, strict=True)):
        granted = pool.grant(f"lease-{number}", rank)
        assert split_token(granted.slot)[0] == 0
        leases[granted.id] = (writer.open(granted), number)

    def run(lease: LeaseWriter, number: int) -> None:
        lease.write(pattern(part, number + 1), [Run(0, 0, number * part, part)])
        lease.complete(10.0)

    for name in random.Random(29).sample(sorted(leases), len(leases)):
        pushes[name] = asyncio.create_task(asyncio.to_thread(run, *leases[name]))
    for _ in range(len(leases)):
        event, name = await pool.events.wait()
        assert event == "landed"
        number = leases[str(name)][1]
        assert (pool.memory[0][number * part : (number + 1) * part] == number + 1).all()
    for name in random.Random(92).sample(sorted(leases), len(leases)):
        pool.receiver.acknowledge(name)
        await asyncio.wait_for(pushes.pop(name), 10)
        assert not any(task.done() for task in pushes.values())
    assert pool.events.queue.empty()
    for writer in joined:
        await asyncio.to_thread(writer.close)


async def test_case_29_a_writer_cannot_speak_for_anothers_lease(
    pool: Pool, writer: PoolWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not open it, nor say that it has landed or failed, although lease and slot are named as they are."""
    monkeypatch.setattr("transport.backends.link.writer.GRANT_WAIT_S", 0.1)
    other = await join(pool, RANKS[0])
    assert isinstance(other, LinkPoolWriter)
    granted = pool.grant("mine")
    mine, theirs = writer.open(granted), other.open(pool.grant("theirs", RANKS[0]))
    with pytest.raises(LeaseRevoked):
        other.open(granted)
    with other.changed:
        other.send(packets.Landed("mine", granted.slot, 10))
        other.send(packets.Aborted("mine", granted.slot, "forged"))
    await push(pool, theirs, pattern(10, 2), [Run(0, 0, 10, 10)])
    counters = pool.receiver.counters  # type: ignore[attr-defined]
    assert (counters["unknown_landed"], counters["unknown_aborts"]) == (1, 1)
    await push(pool, mine, pattern(10, 1), [Run(0, 0, 0, 10)])
    assert (pool.memory[0][:20] == np.repeat([1, 2], 10)).all()
    await asyncio.to_thread(other.close)


async def test_case_19_a_grant_needs_the_connected_writer(pool: Pool, writer: PoolWriter) -> None:
    with pytest.raises(WorkerLost, match=r"prefill-9 .* is not connected"):
        pool.grant(writer=Writer(worker="prefill-9", generation="p1"))
    with pytest.raises(WorkerLost, match="connected as generation p1"):
        pool.grant(writer=Writer(worker="prefill-0", generation="p0"))


async def test_a_forged_lease_cannot_be_opened(pool: Pool, writer: PoolWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.backends.link.writer.GRANT_WAIT_S", 0.1)
    for slot in (0, 1, 1 << 16, 5 | 9 << 16, 1 << 40):
        with pytest.raises(LeaseRevoked):
            writer.open(pool.lease(slot, "forged"))


async def test_a_lease_of_an_earlier_connection_is_dead(pool: Pool) -> None:
    first = await join(pool)
    old = pool.grant("old")
    await asyncio.to_thread(first.close)
    assert await pool.events.wait() == ("writer_lost", WRITER)
    second = await join(pool)
    pool.grant("new")
    with pytest.raises(LeaseRevoked):
        second.open(old)
    second.close()


# ---- losing each other -----------------------------------------------------------------------------


async def test_a_writer_that_goes_fences_its_leases(pool: Pool) -> None:
    writer = await join(pool)
    writer.open(pool.grant("a"))
    await asyncio.to_thread(writer.close)
    assert not writer.alive
    assert await pool.events.wait() == ("writer_lost", WRITER)
    await asyncio.wait_for(pool.receiver.fence("a"), 10)
    with pytest.raises(WorkerLost):
        pool.grant("b")


@pytest.mark.parametrize("backend", sorted(MAPPED), indirect=True)
async def test_closing_waits_for_the_open_chunk(pool: Pool) -> None:
    writer = await join(pool)
    lease = writer.open(pool.grant("a"))
    with lease.chunk():
        closing = asyncio.create_task(asyncio.to_thread(writer.close))
        fence = asyncio.create_task(pool.receiver.fence("a"))
        assert not await fenced_soon(fence)
    await asyncio.wait_for(fence, 10)
    await closing


async def test_case_18_and_20_a_restarted_receiver_is_noticed_and_reached_again(backend: Backend) -> None:
    before = await backend.pool(generation="d1")
    lost: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    writer = await join(before, on_lost=lambda reason: loop.call_soon_threadsafe(lost.put_nowait, reason))
    lease = writer.open(before.grant("a"))
    await before.receiver.close()
    assert await asyncio.wait_for(lost.get(), 10)
    assert not writer.alive
    with pytest.raises(PushFailed, match="decode-0"):
        lease.write(pattern(10), [Run(0, 0, 0, 10)])
    with pytest.raises(PushFailed):
        writer.open(before.lease(1 << 16, "b"))
    lease.abort("never raises")
    after = await backend.pool(generation="d2")
    again = await join(after)
    await push(after, again.open(after.grant("a")), pattern(10), [Run(0, 0, 0, 10)])
    assert (after.memory[0][:10] == 7).all()
    again.close()


@pytest.mark.parametrize("noticed", [True, False])
async def test_case_18_a_restarted_writer_is_served_by_the_receiver_that_stayed(
    pool: Pool, noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not the end of the writer's former life has been noticed when the next one comes."""
    monkeypatch.setattr("transport.backends.link.writer.GRANT_WAIT_S", 0.1)
    before, restarted = await join(pool), Writer(worker=WRITER.worker, generation="p2")
    old, unopened = before.open(pool.grant("old")), pool.grant("unopened")
    await asyncio.to_thread(old.write, pattern(10), [Run(0, 0, 0, 10)])
    if noticed:
        await asyncio.to_thread(before.close)
        assert await pool.events.wait() == ("writer_lost", WRITER)
    after = await join(pool, restarted)
    with pytest.raises(LeaseRevoked):
        after.open(unopened)
    await push(pool, after.open(pool.grant("first", restarted)), pattern(10, 1), [Run(1, 0, 0, 10)])
    if not noticed:
        await asyncio.to_thread(before.close)
        assert await pool.events.wait() == ("writer_lost", WRITER)
    await asyncio.wait_for(pool.receiver.fence("old"), 10)
    pool.memory[0][:] = POISON
    with pytest.raises(PushFailed):
        old.write(pattern(10), [Run(0, 0, 0, 10)])
    with pytest.raises(WorkerLost, match="connected as generation p2"):
        pool.grant("late")
    await push(pool, after.open(pool.grant("second", restarted)), pattern(10, 2), [Run(1, 0, 10, 10)])
    assert (pool.memory[0] == POISON).all()
    assert (pool.memory[1][:20] == np.repeat([1, 2], 10)).all()
    await asyncio.to_thread(after.close)


async def test_case_20_a_restarted_receiver_is_no_trouble_for_another(backend: Backend, tmp_path: Path) -> None:
    """One writing process, two receivers: a push to the second runs while the first restarts, twice."""
    neighbours = type(backend)(tmp_path)
    restarting, steady = await backend.pool(), await neighbours.pool(name="decode-1")
    lost: list[str] = []
    to_steady = await join(steady, on_lost=lost.append)
    for turn in range(2):
        writer = await join(restarting)
        broken, kept = writer.open(restarting.grant("a")), to_steady.open(steady.grant("a"))
        await asyncio.to_thread(kept.write, pattern(1000, turn), [Run(0, 0, 0, 1000)])
        await asyncio.to_thread(broken.write, pattern(1000), [Run(0, 0, 0, 1000)])
        restarting = await backend.restarted(restarting, f"d{turn + 2}")
        with pytest.raises(HawkError, match="decode-0") as failure:
            await asyncio.to_thread(broken.complete, 10.0)
        assert failure.value.retryable
        await push(steady, kept, pattern(1000, turn), [Run(0, 0, 1000, 1000)])
        assert (steady.memory[0][:2000] == turn).all()
        again = await join(restarting)
        await push(restarting, again.open(restarting.grant("b")), pattern(10, turn), [Run(0, 0, 0, 10)])
        await asyncio.to_thread(again.close)
        assert (await restarting.events.wait())[0] == "writer_lost"
        await asyncio.to_thread(writer.close)
    assert to_steady.alive
    assert not lost
    await asyncio.to_thread(to_steady.close)
    await neighbours.close()


async def test_connecting_to_nothing_fails(backend: Backend) -> None:
    pool = await backend.pool()
    await pool.receiver.close()
    with pytest.raises(PushFailed, match="cannot connect to pool decode-0"):
        await asyncio.to_thread(connect, pool.description, WRITER, TOKEN)


async def test_case_21_two_connections_of_one_writer_are_kept_apart(pool: Pool) -> None:
    first = await join(pool)
    first.open(pool.grant("old"))
    second = await join(pool)
    lease = second.open(pool.grant("new"))
    await asyncio.to_thread(first.close)
    event = await pool.events.wait()
    assert event[:2] == ("push_failed", "old")
    await push(pool, lease, pattern(10), [Run(0, 0, 0, 10)])
    second.close()
