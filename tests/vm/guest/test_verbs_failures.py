"""What becomes of a push over RDMA when something fails: an error on both ends that names it, and a pool that works on.

Fencing has tests of its own, and so has what happens to NICs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from backend_harness import POISON, REGION_BYTES, WRITER, Pool
from verbs_pool import (
    LIMIT_S,
    QuickBackend,
    all_lanes_work,
    connect_to,
    fails,
    filled,
    grant_soon,
    join,
    push,
    write_all,
)

from transport.backends.base import Piece, Run
from transport.backends.link.slots import split_token
from transport.backends.verbs import credit, hw_counters, lease, slots
from transport.backends.verbs.writer import VerbsPoolWriter
from transport.errors import HawkError, PushFailed
from transport.messages import Lease, PoolDescription, Writer

LANES = 2


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    backend = QuickBackend(tmp_path)
    yield await backend.pool(slots=LANES)
    await backend.close()


@pytest.fixture
async def writer(pool: Pool) -> AsyncIterator[VerbsPoolWriter]:
    connected = await join(pool)
    yield connected
    await asyncio.to_thread(connected.close)


# ---- what the writer gets wrong


def another_rkey(region: tuple[int, int]) -> tuple[int, int]:
    address, rkey = region
    return address, rkey ^ 0x5500


def past_the_end(region: tuple[int, int]) -> tuple[int, int]:
    address, rkey = region
    return address + REGION_BYTES - 100, rkey


@pytest.mark.parametrize("tampered", [another_rkey, past_the_end])
async def test_case_22_a_write_that_the_nic_refuses_is_named_on_both_ends_and_harms_no_other_lease(
    pool: Pool, writer: VerbsPoolWriter, tampered: Callable[[tuple[int, int]], tuple[int, int]]
) -> None:
    bad, good = writer.open(pool.grant("bad")), writer.open(pool.grant("good"))
    lane = writer._lanes.lanes[bad.slot]
    right = lane.regions
    lane.regions = [tampered(region) for region in right]
    message = await fails(lambda: write_all(bad, filled(4096, 1)))
    assert "lease bad failed: NIC of decode-0: status 10, remote access error" in message
    assert "a wrong or revoked rkey, or outside the region" in message
    bad.abort("the write was refused")
    event = await pool.events.wait()
    assert event[:2] == ("push_failed", "bad")
    assert "refuse" in str(event[2])
    assert all((region == POISON).all() for region in pool.memory)
    assert writer.counters["failed_wc_10"] == 1
    lane.regions = right
    await push(pool, good, 2)
    await all_lanes_work(pool, writer, LANES)
    assert writer.counters["lanes_rebuilt"] == 1
    assert writer.alive


async def test_case_29_leases_on_equal_lanes_of_two_writers_are_kept_apart(pool: Pool, writer: VerbsPoolWriter) -> None:
    another = Writer(worker="prefill-1", generation="q1")
    second = await join(pool, another)
    try:
        granted = pool.grant("first"), pool.grant("second", another)
        assert [split_token(lease.slot)[0] for lease in granted] == [0, 0]
        mine, theirs = writer.open(granted[0]), second.open(granted[1])
        theirs.write(filled(4096, 9), [Run(1, 0, 0, 4096)])
        await push(pool, mine, 8)  # "landed" is of this one, and the other's fence leaves it alone
        await pool.receiver.fence("second")
        pool.memory[1][:] = POISON
        await all_lanes_work(pool, writer, LANES)
        assert (pool.memory[1] == POISON).all()
    finally:
        await asyncio.to_thread(second.close)


async def test_two_pushes_at_once_both_get_on(pool: Pool, writer: VerbsPoolWriter) -> None:
    """Each goes through its second half only when the other has gone through its first."""
    halves = [threading.Event(), threading.Event()]
    half, piece = REGION_BYTES // 2, 64 * 1024

    def run(number: int) -> None:
        opened = writer.open(granted[number])
        for offset in range(0, REGION_BYTES, piece):
            if offset == half:
                halves[number].set()
                assert halves[1 - number].wait(LIMIT_S)
            opened.write(filled(piece, number + 1), [Run(number, 0, offset, piece)])
        opened.complete(LIMIT_S)

    granted = [pool.grant("a"), pool.grant("b")]
    pushing = asyncio.gather(*(asyncio.to_thread(run, number) for number in range(2)))
    for _ in range(2):
        event = await pool.events.wait()
        assert event[0] == "landed"
        pool.receiver.acknowledge(str(event[1]))
    await pushing
    for number in range(2):
        assert (pool.memory[number] == number + 1).all()


# ---- a receiver that is busy


def announce_many(opened: lease.VerbsLeaseWriter, count: int) -> None:
    for number in range(count):
        opened.announce(Piece(number, number + 1, 0, 0))


async def test_announcements_wait_while_the_receivers_loop_is_busy(pool: Pool, writer: VerbsPoolWriter) -> None:
    count = 3 * credit.RECEIVES
    opened = writer.open(pool.grant("a"))
    told_to_wait = hw_counters.read("rxe0", 1)["rcvd_rnr_err"]
    pushing = threading.Thread(target=announce_many, args=(opened, count))
    pushing.start()
    with writer.changed:  # this thread is the receiver's: nothing is taken meanwhile
        assert writer.changed.wait_for(
            lambda: opened._marks == credit.RECEIVES and opened._lane.pair.room == opened._lane.pair.send_depth, LIMIT_S
        )
    for number in range(count):
        assert await pool.events.wait() == ("announced", "a", Piece(number, number + 1, 0, 0))
    await asyncio.to_thread(pushing.join)
    assert hw_counters.read("rxe0", 1)["rcvd_rnr_err"] == told_to_wait
    await push(pool, opened, 3)


async def test_a_receiver_that_takes_no_announcement_fails_the_push_in_time(
    pool: Pool, writer: VerbsPoolWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "STALL_S", 0.2)
    opened = writer.open(pool.grant("a"))
    failures: list[HawkError] = []

    def run() -> None:
        try:
            announce_many(opened, credit.RECEIVES + 1)
        except HawkError as error:
            failures.append(error)

    pushing = threading.Thread(target=run)
    pushing.start()
    pushing.join(LIMIT_S)  # in the receiver's loop
    assert "lease a stalled: the receiver has taken no announcement for 0.2 s" in str(failures)
    assert writer.counters["failed_stalled"] == 1
    opened.abort("stalled")
    while (event := await pool.events.wait())[0] == "announced":
        pass
    assert event == ("push_failed", "a", "stalled")
    await all_lanes_work(pool, writer, LANES)


async def test_more_immediates_than_receives_are_refused_by_name(
    pool: Pool, writer: VerbsPoolWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the limit on announcements is for."""
    monkeypatch.setattr(lease, "RECEIVES", 1000)
    opened = writer.open(pool.grant("a"))
    failures: list[HawkError] = []

    def run() -> None:
        try:
            announce_many(opened, credit.RECEIVES + 1)
            opened.complete(LIMIT_S)
        except HawkError as error:
            failures.append(error)

    pushing = threading.Thread(target=run)
    pushing.start()
    pushing.join(LIMIT_S)
    assert "status 13, receiver not ready" in str(failures)
    opened.abort("not ready")
    while (await pool.events.wait())[0] == "announced":
        pass
    await all_lanes_work(pool, writer, LANES)


async def test_a_lane_that_takes_no_more_receives_costs_no_other_lane_its_arrivals(
    pool: Pool, writer: VerbsPoolWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both arrive in one batch of completions."""
    bad, good = writer.open(pool.grant("bad")), writer.open(pool.grant("good"))
    [connection] = pool.receiver._connections  # type: ignore[attr-defined]
    pair = connection.slots._lanes[bad.slot].pair

    def refuse(count: int) -> None:
        raise PushFailed("the queue pair is broken")

    monkeypatch.setattr(pair, "post_receives", refuse)
    piece = Piece(0, 1, 0, 0)
    for opened in (bad, good):  # in the receiver's thread, which sees nothing of it meanwhile
        opened.announce(piece)
        with writer.changed:
            assert writer.changed.wait_for(lambda lane=opened._lane: lane.pair.room == lane.pair.send_depth, LIMIT_S)
    failed = ("push_failed", "bad", f"lane {bad.slot}: the queue pair is broken")
    awaited = {failed, ("announced", "good", piece)}
    while awaited:
        awaited.discard(await pool.events.wait())
    await push(pool, good, 7)
    await all_lanes_work(pool, writer, LANES)


# ---- a peer that dies


class Receiving:
    """A decode process reduced to its receiver, forked off: it grants "a" and "b", and acknowledges what lands."""

    def __init__(self, directory: Path, generation: str = "d1") -> None:
        inside, outside = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                asyncio.run(self._serve(directory, generation, outside))
            finally:
                os._exit(1)
        os.close(outside)
        self._words = os.fdopen(inside)
        self.description = PoolDescription.model_validate_json(self._words.readline())

    @staticmethod
    async def _serve(directory: Path, generation: str, outside: int) -> None:
        pool = await QuickBackend(directory).pool(generation=generation, slots=LANES)
        os.write(outside, pool.description.model_dump_json().encode() + b"\n")
        while True:
            event = await pool.events.queue.get()
            if event[0] == "writer_joined":
                for name in "ab":
                    os.write(outside, pool.grant(name).model_dump_json().encode() + b"\n")
            elif event[0] == "landed":
                pool.receiver.acknowledge(str(event[1]))
            elif event[0] == "push_failed":
                os.write(outside, f"{event[1]}: {event[2]}\n".encode())

    def lease(self) -> Lease:
        return Lease.model_validate_json(self._words.readline())

    def word(self) -> str:
        return self._words.readline()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def stop(self) -> None:
        self.signal(signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._words.close()


def keep_writing(opened: lease.VerbsLeaseWriter, begun: threading.Event, failures: list[str]) -> None:
    data = filled(64 * 1024, 5)
    try:
        while True:
            opened.write(data, [Run(0, 0, 0, len(data))])
            begun.set()
    except HawkError as error:
        failures.append(f"{error.code}: {error}")


def test_case_20_a_killed_receiver_ends_the_push_is_reported_and_its_successor_is_used(tmp_path: Path) -> None:
    receiving, successor = Receiving(tmp_path), Receiving(tmp_path, "d2")
    lost: list[str] = []
    gone, begun = threading.Event(), threading.Event()
    try:
        connected = connect_to(receiving.description, on_lost=lambda reason: (lost.append(reason), gone.set()))
        opened = connected.open(receiving.lease())
        failures: list[str] = []
        pushing = threading.Thread(target=keep_writing, args=(opened, begun, failures))
        pushing.start()
        assert begun.wait(LIMIT_S)
    finally:
        receiving.end()
    pushing.join(LIMIT_S)
    assert gone.wait(LIMIT_S)
    [failure] = failures
    assert failure.startswith("push_failed: the connection to pool decode-0 is over")
    assert len(lost) == 1
    with pytest.raises(PushFailed, match="cannot connect"):
        connect_to(receiving.description)
    try:
        again = connect_to(successor.description)
        for _ in "ab":
            write_all(again.open(successor.lease()), filled(4096, 6))
        again.close()
    finally:
        successor.end()
    connected.close()


def test_a_stopped_receiver_ends_the_push_in_time_and_learns_of_it_when_it_goes_on(tmp_path: Path) -> None:
    receiving = Receiving(tmp_path)
    try:
        connected = connect_to(receiving.description)
        first, second = (connected.open(receiving.lease()) for _ in "ab")
        receiving.stop()
        first.write(filled(4096, 5), [Run(0, 0, 0, 4096)])
        with pytest.raises(PushFailed, match=r"pool decode-0 did not acknowledge lease a within 0\.2 s"):
            first.complete(0.2)
        second.write(filled(4096, 6), [Run(0, 0, 0, 4096)])
        second.abort("the receiver is too slow")
        receiving.signal(signal.SIGCONT)
        assert receiving.word() == "b: the receiver is too slow\n"
        assert connected.alive
        connected.close()
    finally:
        receiving.end()


async def test_a_link_that_breaks_fails_the_push_and_stops_its_writes(pool: Pool) -> None:
    lost: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    writer = await join(pool, on_lost=lambda reason: loop.call_soon_threadsafe(lost.put_nowait, reason))
    opened = writer.open(pool.grant("a"))
    [connection] = pool.receiver._connections  # type: ignore[attr-defined]
    connection.close()
    assert await pool.events.wait() == ("writer_lost", WRITER)
    pool.memory[0][:] = 0x77  # the next owner's
    assert "connection to pool decode-0 is over" in await fails(lambda: write_all(opened, filled(4096, 1)))
    assert "closed it, or died" in await asyncio.wait_for(lost.get(), LIMIT_S)
    await asyncio.to_thread(writer.close)
    assert (pool.memory[0] == 0x77).all()


# ---- lanes


async def test_lanes_come_back_although_the_completion_queue_has_no_room_at_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The room of a fenced queue pair is free when its completions are drained; the new one waits for that."""
    monkeypatch.setattr(slots, "SPARE", 2)
    backend = QuickBackend(tmp_path)
    pool = await backend.pool(slots=1)
    writer = await join(pool)
    for number in range(8):
        opened = await asyncio.to_thread(writer.open, await grant_soon(pool, f"fenced-{number}"))
        opened.write(filled(4096, number), [Run(0, 0, 0, 4096)])
        await pool.receiver.fence(f"fenced-{number}")
    await push(pool, await asyncio.to_thread(writer.open, await grant_soon(pool, "last")), 0x44)
    assert writer.counters["lanes_rebuilt"] == 8
    await asyncio.to_thread(writer.close)
    await backend.close()
