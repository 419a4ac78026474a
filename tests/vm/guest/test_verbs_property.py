"""Whatever the plan, RDMA leaves the same bytes in D's memory as shared memory does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from backend_harness import TOKEN, WRITER, Pool, ShmBackend, VerbsBackend

from transport.backends import connect
from transport.backends.base import PoolWriter, Run, WriterOptions
from transport.backends.verbs import lease as verbs_lease
from transport.backends.verbs.lanes import DEPTH
from transport.backends.verbs.queue_pair import Options
from transport.backends.verbs.writer import VerbsPoolWriter

LENGTHS = (96 * 1024, 64 * 1024)
STAGING = 100_000
INLINE = Options().max_inline
MESSAGE = 1000
"""Bytes that the NIC is said to take in one write, where plans are to be cut."""
PORTION = 7777
"""Bytes that are copied into staging at a time, likewise."""


@pytest.fixture
async def pools(tmp_path: Path) -> AsyncIterator[list[tuple[Pool, PoolWriter]]]:
    """The same pool twice, by shared memory and by RDMA, with a writer each."""
    backends = [ShmBackend(tmp_path), VerbsBackend(tmp_path)]
    joined = []
    for backend in backends:
        pool = await backend.pool(lengths=LENGTHS, slots=1)
        joined.append((pool, await asyncio.to_thread(connect, pool.description, WRITER, TOKEN)))
        await pool.events.wait()
    yield joined
    for _, writer in joined:
        await asyncio.to_thread(writer.close)
    for backend in backends:
        await backend.close()


def random_plan(rng: np.random.Generator, count: int) -> list[Run]:
    """`count` runs in any order that share no byte of a region, though perhaps bytes of the staging."""
    runs = []
    for region, length in enumerate(LENGTHS):
        here = count // 2 if region else count - count // 2
        cuts = np.sort(rng.choice(length, 2 * here, replace=False))
        for start, stop in zip(cuts[::2].tolist(), cuts[1::2].tolist(), strict=True):
            runs.append(Run(region, int(rng.integers(STAGING - (stop - start))), start, stop - start))
    return [runs[index] for index in rng.permutation(len(runs))]


async def push(pool: Pool, writer: PoolWriter, data: np.ndarray, plan: list[Run], *, staged: bool) -> None:
    opened = writer.open(pool.grant())

    def write() -> None:
        source = opened.stage(len(data)) if staged else data
        source[:] = data
        opened.write(source, plan)
        opened.complete(30.0)

    writing = asyncio.create_task(asyncio.to_thread(write))
    event = await pool.events.wait()
    assert event[0] == "landed", event
    pool.receiver.acknowledge(str(event[1]))
    await writing


async def same_bytes(pools: list[tuple[Pool, PoolWriter]], plans: list[list[Run]], *, staged: bool) -> None:
    rng = np.random.default_rng(len(plans))
    for plan in plans:
        data = rng.integers(0, 256, STAGING, np.uint8)
        for pool, writer in pools:
            await push(pool, writer, data, plan, staged=staged)
        (by_shm, _), (by_rdma, _) = pools
        for region, (ours, theirs) in enumerate(zip(by_rdma.memory, by_shm.memory, strict=True)):
            assert np.array_equal(ours, theirs), f"region {region} differs after {plan}"


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "foreign"])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
async def test_any_plan_leaves_the_same_bytes_as_shared_memory(
    pools: list[tuple[Pool, PoolWriter]], monkeypatch: pytest.MonkeyPatch, staged: bool, cut: bool
) -> None:
    if cut:
        monkeypatch.setattr(VerbsPoolWriter, "max_message", lambda self, lane: MESSAGE)
        monkeypatch.setattr(verbs_lease, "COPY_BYTES", PORTION)
    rng = np.random.default_rng(2 * staged + cut)
    await same_bytes(pools, [random_plan(rng, count) for count in (1, 2, 7, 60, 2 * DEPTH)], staged=staged)


async def test_lengths_around_each_limit(pools: list[tuple[Pool, PoolWriter]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied into the request, what is one message, and what is a page."""
    monkeypatch.setattr(VerbsPoolWriter, "max_message", lambda self, lane: MESSAGE)
    lengths = [edge + by for edge in (INLINE, MESSAGE, 2 * MESSAGE, 4096) for by in (-1, 0, 1)] + [1]
    plan, at = [], 1
    for number, length in enumerate(lengths):
        plan.append(Run(0, 13 * number, at, length))
        at += length + 1  # a byte between them that must stay
    await same_bytes(pools, [plan], staged=True)


async def test_case_33_staging_is_not_filled_again_before_the_nic_has_read_it(tmp_path: Path) -> None:
    """Pieces of a chunked prefill, each half of the staging memory, filled as fast as it comes free."""
    piece, count = 512 * 1024, 12
    backend = VerbsBackend(tmp_path)
    pool = await backend.pool(lengths=(piece * count,), slots=1)
    options = WriterOptions(staging_bytes=2 * piece)
    writer = await asyncio.to_thread(connect, pool.description, WRITER, TOKEN, options=options)
    await pool.events.wait()
    opened = writer.open(pool.grant())

    def write() -> None:
        for number in range(count):
            staging = opened.stage(piece)
            staging[:] = number + 1
            opened.write(staging, [Run(0, 0, number * piece, piece)])
        opened.complete(60.0)

    writing = asyncio.create_task(asyncio.to_thread(write))
    event = await asyncio.wait_for(pool.events.queue.get(), 60)
    assert event[0] == "landed", event
    pool.receiver.acknowledge(str(event[1]))
    await writing
    assert (pool.memory[0].reshape(count, piece) == np.arange(1, count + 1, dtype=np.uint8)[:, None]).all()
    await asyncio.to_thread(writer.close)
    await backend.close()
