"""A pool on RDMA and its writers, with little patience, so that failures are quick."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from backend_harness import TOKEN, WRITER, Events, Handed, Pool, VerbsBackend

from transport.backends.base import LeaseWriter, Run, WriterOptions
from transport.backends.verbs.queue_pair import Options
from transport.backends.verbs.receiver import VerbsReceiver
from transport.backends.verbs.writer import VerbsPoolWriter, connect
from transport.errors import Overloaded, PushFailed
from transport.messages import Lease, PoolDescription, Writer

LIMIT_S = 60.0
"""Nothing here takes that long; a failure, not a measurement."""
QUICK = Options(timeout=13, retry_count=2, rnr_retry=2, min_rnr_timer=1)
"""A dead peer is known after 4.096 µs * 2^13 * 3 = 0.1 s."""
STAGING = 2 << 20


class QuickBackend(VerbsBackend):
    """`devices` on both ends; the link is on the loopback, so that it outlives the devices."""

    def __init__(self, directory: Path, devices: tuple[str, ...] = ()) -> None:
        super().__init__(directory)
        self.devices = devices

    def receiver(
        self, name: str, generation: str, token: str, regions: list[Handed], events: Events, slots: int
    ) -> VerbsReceiver:
        return VerbsReceiver(
            name, generation, token, regions, events, "127.0.0.1", devices=self.devices, slots=slots, options=QUICK
        )


def connect_to(
    description: PoolDescription,
    writer: Writer = WRITER,
    on_lost: Callable[[str], None] | None = None,
    devices: tuple[str, ...] = (),
) -> VerbsPoolWriter:
    options = WriterOptions(devices, STAGING)
    return connect(description, writer, TOKEN, on_lost=on_lost, options=options, patience=QUICK, timeout_s=LIMIT_S)


async def join(
    pool: Pool,
    writer: Writer = WRITER,
    on_lost: Callable[[str], None] | None = None,
    devices: tuple[str, ...] = (),
) -> VerbsPoolWriter:
    connected = await asyncio.to_thread(connect_to, pool.description, writer, on_lost, devices)
    assert await pool.events.wait() == ("writer_joined", writer)
    return connected


async def grant_soon(pool: Pool, lease_id: str, writer: Writer = WRITER) -> Lease:
    """A lane takes a moment to be rebuilt."""
    deadline = asyncio.get_running_loop().time() + LIMIT_S
    while True:
        try:
            return pool.grant(lease_id, writer)
        except Overloaded:
            assert asyncio.get_running_loop().time() < deadline, "no lane came back"
            await asyncio.sleep(0.005)


def filled(length: int, value: int) -> np.ndarray:
    return np.full(length, value, np.uint8)


def write_all(lease: LeaseWriter, data: np.ndarray, region: int = 0, offset: int = 0) -> None:
    """A push, from its first write until it is acknowledged."""
    lease.write(data, [Run(region, 0, offset, len(data))])
    lease.complete(LIMIT_S)


async def push(pool: Pool, lease: LeaseWriter, value: int, *, region: int = 0, offset: int = 0) -> None:
    """Push a page of `value` and see it in place."""
    length = 4096
    pushing = asyncio.create_task(asyncio.to_thread(write_all, lease, filled(length, value), region, offset))
    event = await pool.events.wait()
    assert event[0] == "landed", event
    assert (pool.memory[region][offset : offset + length] == value).all()
    pool.receiver.acknowledge(str(event[1]))
    await pushing


async def fails(push: Callable[[], object]) -> str:
    """The message of the PushFailed that a push ends with."""
    with pytest.raises(PushFailed) as failure:
        await asyncio.wait_for(asyncio.to_thread(push), LIMIT_S)
    return str(failure.value)


async def all_lanes_work(pool: Pool, writer: VerbsPoolWriter, lanes: int) -> None:
    """Leases on all of them at once, one push after the other."""
    leases = [await grant_soon(pool, f"again-{number}") for number in range(lanes)]
    for number, granted in enumerate(leases):
        await push(pool, await asyncio.to_thread(writer.open, granted), 0x30 + number, offset=4096 * number)
