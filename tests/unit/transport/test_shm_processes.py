"""Fencing against real processes: stopped, killed and forked in the middle of a push."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import shm_writer_process
from backend_harness import POISON, TOKEN, WRITER, Pool, ShmBackend
from peer_process import PeerProcess

from transport.backends import connect

STALE = 0x11
NEXT_OWNER = 0x22


class WriterProcess(PeerProcess):
    """A writer in a process of its own."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(shm_writer_process.main, pool.description.model_dump_json(), WRITER, TOKEN, STALE)


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[ShmBackend]:
    backend = ShmBackend(tmp_path)
    yield backend
    await backend.close()


@pytest.fixture
async def pool(backend: ShmBackend) -> Pool:
    return await backend.pool(lengths=(16 << 20,))


@pytest.fixture
async def writer(pool: Pool) -> AsyncIterator[WriterProcess]:
    process = WriterProcess(pool)
    try:
        assert await process.answer() == "ok"
        assert await pool.events.wait() == ("writer_joined", WRITER)
        assert await process.ask("open", pool.grant("a").model_dump_json()) == "ok"
        yield process
    finally:
        process.end()


async def holds(fence: asyncio.Task[None]) -> bool:
    done, _ = await asyncio.wait([fence], timeout=0.3)
    return not done


async def test_case_09_a_stopped_writer_keeps_its_blocks_until_it_goes_on(pool: Pool, writer: WriterProcess) -> None:
    """The fence outlasts the stop; what the writer still stores comes before the fence returns, nothing after."""
    assert await writer.ask("half") == "ok"
    await writer.stopped()
    fence = asyncio.create_task(pool.receiver.fence("a"))
    assert await holds(fence)
    writer.signal(signal.SIGCONT)
    assert await holds(fence)  # the chunk is still open
    assert await writer.ask("rest") == "ok"
    await asyncio.wait_for(fence, 10)
    assert (pool.memory[0] == STALE).all()
    pool.memory[0][:] = NEXT_OWNER
    assert await writer.ask("half") == "lease_revoked"
    assert (pool.memory[0] == NEXT_OWNER).all()


async def test_case_09_a_writer_stopped_while_it_pushes_spares_the_next_owner(
    pool: Pool, writer: WriterProcess
) -> None:
    assert await writer.ask("push") == "ok"
    while (pool.memory[0] == POISON).any():
        await asyncio.sleep(0.001)
    await writer.stopped()
    fence = asyncio.create_task(pool.receiver.fence("a"))
    assert await holds(fence)
    writer.signal(signal.SIGCONT)
    await asyncio.wait_for(fence, 10)
    pool.memory[0][:] = NEXT_OWNER
    assert await writer.answer() == "lease_revoked"
    assert (pool.memory[0] == NEXT_OWNER).all()


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_killed_writer_ends_the_fence(pool: Pool, writer: WriterProcess, stopped: bool) -> None:
    assert await writer.ask("push") == "ok"
    if stopped:
        await writer.stopped()
        fence = asyncio.create_task(pool.receiver.fence("a"))
        assert await holds(fence)
    writer.signal(signal.SIGKILL)
    assert await pool.events.wait() == ("writer_lost", WRITER)
    await asyncio.wait_for(fence if stopped else pool.receiver.fence("a"), 10)
    pool.memory[0][:] = NEXT_OWNER
    writer.process.join()
    assert (pool.memory[0] == NEXT_OWNER).all()


async def test_many_fences_of_a_stopped_writer_do_not_block_the_receiver(backend: ShmBackend) -> None:
    """More revocations than the socket takes: they queue, and other writers are served meanwhile."""
    pool = await backend.pool(slots=2048)
    writer = WriterProcess(pool)
    try:
        assert await writer.answer() == "ok"
        await pool.events.wait()
        await writer.stopped()
        leases = [pool.grant() for _ in range(2048)]
        fences = [asyncio.create_task(pool.receiver.fence(lease.id)) for lease in leases]
        await asyncio.sleep(0)
        writer.signal(signal.SIGCONT)
        await asyncio.wait_for(asyncio.gather(*fences), 30)
        assert pool.receiver.counters["fence_acks"] == 2048
    finally:
        writer.end()


async def test_a_forked_child_neither_writes_nor_keeps_the_connection(pool: Pool) -> None:
    connected = await asyncio.to_thread(connect, pool.description, WRITER, TOKEN)
    await pool.events.wait()
    lease = connected.open(pool.grant("a"))
    assert lease.mapped is not None
    inside, outside = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(outside)
        os.read(inside, 1)
        faulthandler.disable()
        lease.mapped[0][:] = np.uint8(STALE)  # not mapped here: dies of SIGSEGV
        os._exit(0)
    os.close(inside)
    try:
        await asyncio.to_thread(connected.close)
        assert await pool.events.wait() == ("writer_lost", WRITER)  # although the child lives
    finally:
        os.write(outside, b"x")
        os.close(outside)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGSEGV
    assert (pool.memory[0] == POISON).all()
