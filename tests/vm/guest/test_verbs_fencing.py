"""Fencing over RDMA against real processes: stopped and killed in the middle of a push."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from backend_harness import Pool
from verbs_processes import PART, PARTS, RETRY_S, PatientBackend, Process, lane_of

from transport.errors import Overloaded
from transport.messages import Writer

STALE, NEXT_OWNER = 0x11, 0x22
LANES = 1
"""So that what is granted after a fence is on the lane that was fenced."""


@pytest.fixture
def stale() -> Iterator[Process]:
    process = Process(Writer(worker="stale", generation="p1"), STALE)
    yield process
    process.end()


@pytest.fixture
def following(stale: Process) -> Iterator[Process]:
    process = Process(Writer(worker="following", generation="p1"), NEXT_OWNER)
    yield process
    process.end()


@pytest.fixture
def restarted() -> Iterator[Process]:
    """The stale writer's next life."""
    process = Process(Writer(worker="stale", generation="p2"), NEXT_OWNER)
    yield process
    process.end()


@pytest.fixture
async def backend(
    stale: Process, following: Process, restarted: Process, tmp_path: Path
) -> AsyncIterator[PatientBackend]:
    """Made after the processes have been forked, so that they inherit nothing of it."""
    backend = PatientBackend(tmp_path)
    yield backend
    await backend.close()


@pytest.fixture
async def pool(backend: PatientBackend, stale: Process) -> Pool:
    pool = await backend.pool(lengths=(PART * PARTS,), slots=LANES)
    await stale.join(pool)
    return pool


async def fence(pool: Pool, lease_id: str) -> None:
    await asyncio.wait_for(pool.receiver.fence(lease_id), 10)


async def test_case_09_a_stopped_writer_changes_no_byte_of_the_next_owner(
    pool: Pool, stale: Process, following: Process
) -> None:
    """What it has posted goes on without it: only the NIC at this end can refuse that."""
    await stale.open(pool.grant("old", stale.writer))
    await stale.burst(pool)
    await fence(pool, "old")
    await following.join(pool)
    await following.open(pool.grant("new", following.writer))
    await following.fill(pool)
    await asyncio.sleep(RETRY_S)  # nothing tells of a write that is refused
    assert (pool.memory[0] == NEXT_OWNER).all()
    stale.signal(signal.SIGCONT)
    assert await stale.answer() == "lease_revoked"
    await stale.open(await lane_of(pool, "again", stale.writer))  # its lane is there again, and it has written nothing
    assert (pool.memory[0] == NEXT_OWNER).all()
    await stale.fill(pool)


async def test_case_09_a_running_writer_is_told_and_goes_on_with_another_lease(pool: Pool, stale: Process) -> None:
    await stale.open(pool.grant("old", stale.writer))
    await stale.push(pool)
    await fence(pool, "old")
    pool.memory[0][:] = NEXT_OWNER
    assert await stale.answer() == "lease_revoked"
    await stale.open(await lane_of(pool, "again", stale.writer))
    assert (pool.memory[0] == NEXT_OWNER).all()
    await stale.fill(pool)


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_killed_writer_has_written_its_last_byte_when_it_is_lost(
    pool: Pool, stale: Process, stopped: bool
) -> None:
    await stale.open(pool.grant("old", stale.writer))
    await (stale.burst(pool) if stopped else stale.push(pool))
    stale.signal(signal.SIGKILL)
    assert await pool.events.wait() == ("writer_lost", stale.writer)
    pool.memory[0][:] = NEXT_OWNER
    await asyncio.to_thread(stale.process.join)
    await fence(pool, "old")
    assert (pool.memory[0] == NEXT_OWNER).all()


async def test_case_18_a_killed_writer_comes_back_and_the_receiver_stays(
    pool: Pool, stale: Process, restarted: Process
) -> None:
    """It is killed in mid-push, and its next life is served at once: not a byte of the former comes in between."""
    await stale.open(pool.grant("old", stale.writer))
    await stale.push(pool)
    stale.signal(signal.SIGKILL)
    assert await pool.events.wait() == ("writer_lost", stale.writer)
    await restarted.join(pool)
    for number in range(3):
        await restarted.open(await lane_of(pool, f"new-{number}", restarted.writer))
        pool.memory[0][:] = 0
        await restarted.fill(pool)


async def test_case_19_what_a_stopped_writer_posted_for_the_former_generation_lands_nowhere(
    backend: PatientBackend, pool: Pool, stale: Process, following: Process
) -> None:
    """The receiver restarts over the same memory while the writer cannot hear of it."""
    await stale.open(pool.grant("old", stale.writer))
    await stale.burst(pool)
    after = await backend.restarted(pool, "d2", slots=LANES)
    await following.join(after)
    await following.open(after.grant("new", following.writer))
    await following.fill(after)
    await asyncio.sleep(RETRY_S)  # nothing tells of a write that is refused
    assert (after.memory[0] == NEXT_OWNER).all()
    stale.signal(signal.SIGCONT)
    assert await stale.answer() == "push_failed"
    assert await stale.ask("connect", pool.description.model_dump_json()) == "stale_generation"
    await stale.join(after)
    assert await stale.ask("open", pool.lease(1 << 16, "forged").model_dump_json()) == "stale_generation"
    assert (after.memory[0] == NEXT_OWNER).all()
    await stale.open(after.grant("again", stale.writer))
    await stale.fill(after)


async def test_a_stopped_writer_runs_out_of_lanes_and_has_them_again_when_it_goes_on(
    pool: Pool, stale: Process, following: Process
) -> None:
    """More rounds than a completion queue has room for queue pairs of a lane."""
    await following.join(pool)
    for number in range(6):
        lease = await lane_of(pool, f"old-{number}", stale.writer)
        await stale.stop()
        await fence(pool, lease.id)
        with pytest.raises(Overloaded, match=f"all {LANES} lease slots of stale"):
            pool.grant("too-early", stale.writer)
        stale.signal(signal.SIGCONT)
    await following.open(pool.grant("new", following.writer))  # others were never concerned
    await following.fill(pool)
    await stale.open(await lane_of(pool, "again", stale.writer))
    await stale.fill(pool)
