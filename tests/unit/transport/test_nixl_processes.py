"""Fencing over NIXL against real processes: stopped, killed, forked and ended in the middle of a push."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from backend_harness import POISON, TOKEN, WRITER, NixlBackend, Pool
from nixl_ends import receive, write
from peer_process import PeerProcess

from transport.backends import connect
from transport.backends.base import PoolWriter, Run
from transport.errors import PushFailed
from transport.messages import Lease, PoolDescription

STALE = 0x11
NEXT_OWNER = 0x22
REFUSED = {"lease_revoked", "push_failed"}

STRICT, LAX = "tcp", "tcp,sm"
"""UCX transports by which the receiver, or only the writer itself, can stop the writer."""


@pytest.fixture(params=[STRICT])
def transports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("UCX_TLS", request.param)
    return str(request.param)


class Impatient(NixlBackend):
    """Waits a moment for what a fenced writer says."""

    fence_wait_s = 0.1


@pytest.fixture
async def pool(transports: str, tmp_path: Path) -> AsyncIterator[Pool]:
    backend = Impatient(tmp_path)
    yield await backend.pool(lengths=(16 << 20,))
    await backend.close()


@pytest.fixture
async def writer(pool: Pool) -> AsyncIterator[PeerProcess]:
    end = PeerProcess(write, pool.description.model_dump_json(), STALE)
    try:
        assert await end.answer() == "ok"
        assert await pool.events.wait() == ("writer_joined", WRITER)
        assert await end.ask("open", pool.grant("a").model_dump_json()) == "ok"
        yield end
    finally:
        end.end()


async def pushing(pool: Pool, writer: PeerProcess) -> None:
    """The writer is in the middle of a push, and has been round once."""
    assert await writer.ask("push") == "ok"
    while (pool.memory[0] == POISON).any():
        await asyncio.sleep(0.001)


async def test_case_09_a_writer_stopped_while_it_pushes_is_cut_off(pool: Pool, writer: PeerProcess) -> None:
    """The receiver need not wait for it: what the writer still has under way lands nowhere once it goes on."""
    await pushing(pool, writer)
    await writer.stopped()
    await asyncio.wait_for(pool.receiver.fence("a"), 10)
    assert await pool.events.wait() == ("writer_lost", WRITER)
    assert pool.receiver.counters["writers_cut_off"] == 1
    pool.memory[0][:] = NEXT_OWNER
    writer.signal(signal.SIGCONT)
    assert await writer.answer() in REFUSED
    assert (pool.memory[0] == NEXT_OWNER).all()


@pytest.mark.parametrize("transports", [LAX], indirect=True)
async def test_case_09_a_writer_that_stores_by_itself_is_waited_for(pool: Pool, writer: PeerProcess) -> None:
    await pushing(pool, writer)
    await writer.stopped()
    fence = asyncio.create_task(pool.receiver.fence("a"))
    done, _ = await asyncio.wait([fence], timeout=4 * Impatient.fence_wait_s)
    assert not done
    writer.signal(signal.SIGCONT)
    await asyncio.wait_for(fence, 10)
    pool.memory[0][:] = NEXT_OWNER
    assert await writer.answer() == "lease_revoked"
    assert (pool.memory[0] == NEXT_OWNER).all()


@pytest.mark.parametrize("transports", [STRICT, LAX], indirect=True)
async def test_a_running_writer_is_fenced_by_its_word(pool: Pool, writer: PeerProcess) -> None:
    await pushing(pool, writer)
    await asyncio.wait_for(pool.receiver.fence("a"), 10)
    pool.memory[0][:] = NEXT_OWNER
    assert await writer.answer() == "lease_revoked"
    assert pool.receiver.counters["fence_acks"] == 1
    assert (pool.memory[0] == NEXT_OWNER).all()


@pytest.mark.parametrize("transports", [STRICT, LAX], indirect=True)
@pytest.mark.parametrize("stopped", [False, True])
async def test_a_killed_writer_ends_the_fence(pool: Pool, writer: PeerProcess, stopped: bool) -> None:
    await pushing(pool, writer)
    if stopped:
        await writer.stopped()
    fence = asyncio.create_task(pool.receiver.fence("a"))
    writer.signal(signal.SIGKILL)
    assert await pool.events.wait() == ("writer_lost", WRITER)
    await asyncio.wait_for(fence, 10)
    pool.memory[0][:] = NEXT_OWNER
    writer.process.join()
    assert (pool.memory[0] == NEXT_OWNER).all()


async def test_a_process_that_just_ends_ends_well(pool: Pool, writer: PeerProcess) -> None:
    """Neither UCX's threads nor its libraries crash on the way out."""
    writer.pipe.send(("return",))
    assert await pool.events.wait() == ("writer_lost", WRITER)
    await asyncio.to_thread(writer.process.join)
    assert writer.process.exitcode == 0


# ---- the receiver's death --------------------------------------------------------------------------


@pytest.fixture
async def receiver(transports: str, tmp_path: Path) -> AsyncIterator[PeerProcess]:
    end = PeerProcess(receive, str(tmp_path), 16 << 20)
    yield end
    end.end()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_receiver_that_dies_or_stops_fails_the_push(
    receiver: PeerProcess, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr("transport.backends.nixl.writer._STALL_S", 0.5)
    pool = PoolDescription.model_validate_json(await receiver.answer())
    lost: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    writer = await asyncio.to_thread(
        connect, pool, WRITER, TOKEN, on_lost=lambda reason: loop.call_soon_threadsafe(lost.put_nowait, reason)
    )
    lease = writer.open(Lease.model_validate_json(await receiver.answer()))
    staging = np.full(16 << 20, STALE, np.uint8)

    def push() -> None:
        while True:
            lease.write(staging, [Run(0, 0, 0, len(staging))])

    task = asyncio.create_task(asyncio.to_thread(push))
    while not writer.counters["writes"]:
        await asyncio.sleep(0.001)
    receiver.signal(number)
    with pytest.raises(PushFailed, match="decode-0"):
        await task
    assert await asyncio.wait_for(lost.get(), 10)
    assert not writer.alive
    await asyncio.to_thread(writer.close)


# ---- forks -----------------------------------------------------------------------------------------


async def test_a_forked_child_neither_writes_nor_keeps_the_connection(pool: Pool) -> None:
    writer: PoolWriter = await asyncio.to_thread(connect, pool.description, WRITER, TOKEN)
    await pool.events.wait()
    lease = writer.open(pool.grant("a"))
    staging = np.full(1000, STALE, np.uint8)
    inside, outside = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(outside)
        os.read(inside, 1)
        try:
            lease.write(staging, [Run(0, 0, 0, len(staging))])
        except PushFailed:
            os._exit(0)
        os._exit(1)
    os.close(inside)
    try:
        await asyncio.to_thread(lease.write, staging, [Run(0, 0, 5000, len(staging))])  # the parent goes on
        await asyncio.to_thread(writer.close)
        assert await pool.events.wait() == ("writer_lost", WRITER)  # although the child lives
    finally:
        os.write(outside, b"x")
        os.close(outside)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert (pool.memory[0][5000:6000] == STALE).all()
    assert (pool.memory[0][:1000] == POISON).all()
