"""Processes that fork while they write over RDMA: a child shares the NIC's handles, and must do nothing with them."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from backend_harness import POISON, TOKEN, WRITER, Pool, VerbsBackend

from transport.backends import connect
from transport.backends.base import LeaseWriter, PoolWriter, Run
from transport.errors import HawkError
from transport.messages import Lease, Writer

HERE = Path(__file__).parent
LENGTH = 4096
VALUE = 0x33
OTHER = Writer(worker="other", generation="p1")


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    backend = VerbsBackend(tmp_path)
    yield await backend.pool(lengths=(1 << 20,), slots=2)
    await backend.close()


@pytest.fixture
async def writer(pool: Pool) -> AsyncIterator[PoolWriter]:
    connected = await asyncio.to_thread(connect, pool.description, WRITER, TOKEN)
    assert await pool.events.wait() == ("writer_joined", WRITER)
    yield connected
    await asyncio.to_thread(connected.close)


def data() -> np.ndarray:
    return np.full(LENGTH, VALUE, np.uint8)


async def finish(pool: Pool, lease: LeaseWriter) -> None:
    """Push through a lease until it is acknowledged."""

    def push() -> None:
        lease.write(data(), [Run(0, 0, 0, LENGTH)])
        lease.complete(30.0)

    pushing = asyncio.create_task(asyncio.to_thread(push))
    event = await pool.events.wait()
    assert event[0] == "landed", event
    pool.receiver.acknowledge(str(event[1]))
    await pushing
    assert (pool.memory[0][:LENGTH] == VALUE).all()


def in_child(pipe: Connection, lease: LeaseWriter) -> None:
    """Tries to write, says what came of it, and waits for leave to end."""
    try:
        lease.write(data(), [Run(0, 0, LENGTH, LENGTH)])
        pipe.send("wrote")
    except HawkError as error:
        pipe.send(error.code)
    pipe.recv()


@contextmanager
def forked(lease: LeaseWriter) -> Iterator[tuple[int, Connection]]:
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=in_child, args=(theirs, lease), daemon=True)
    child.start()
    assert child.pid is not None
    try:
        yield child.pid, ours
    finally:
        ours.send("end")
        child.join()
        assert child.exitcode == 0


async def test_a_child_that_closes_all_it_has_takes_nothing_from_its_parent() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(HERE / "forking_process.py"),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[2])},
    )
    _, said = await process.communicate()
    assert process.returncode == 0, said.decode()
    assert said == b""  # the end of the child's interpreter was quiet, too


async def test_a_child_cannot_write_and_its_parent_can(pool: Pool, writer: PoolWriter) -> None:
    lease = writer.open(pool.grant("a"))
    with forked(lease) as (_, pipe):
        assert await asyncio.to_thread(pipe.recv) == "push_failed"
        await finish(pool, lease)
        assert (pool.memory[0][LENGTH : 2 * LENGTH] == POISON).all()


async def test_a_child_keeps_neither_the_connection_nor_the_nic(pool: Pool, writer: PoolWriter) -> None:
    lease = writer.open(pool.grant("a"))
    with forked(lease) as (pid, pipe):
        await asyncio.to_thread(pipe.recv)
        await asyncio.to_thread(writer.close)
        assert await pool.events.wait() == ("writer_lost", WRITER)  # although the child lives
        held = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        assert held
        assert not [name for name in held if "infiniband" in name]


def connect_anew(pipe: Connection, pool: Pool) -> None:
    """A child that is a writer by itself."""
    connected = connect(pool.description, OTHER, TOKEN)
    lease = connected.open(Lease.model_validate_json(pipe.recv()))
    lease.write(data(), [Run(0, 0, LENGTH, LENGTH)])
    lease.complete(30.0)
    connected.close()
    pipe.send("done")


async def test_a_child_may_open_the_nic_for_itself(pool: Pool, writer: PoolWriter) -> None:
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=connect_anew, args=(theirs, pool), daemon=True)
    child.start()
    try:
        assert await pool.events.wait() == ("writer_joined", OTHER)
        ours.send(pool.grant("child's", OTHER).model_dump_json())
        assert await pool.events.wait() == ("landed", "child's")
        pool.receiver.acknowledge("child's")
        assert await asyncio.to_thread(ours.recv) == "done"
        assert (pool.memory[0][LENGTH : 2 * LENGTH] == VALUE).all()
        assert await pool.events.wait() == ("writer_lost", OTHER)
        await finish(pool, writer.open(pool.grant("a")))
    finally:
        child.join()
