"""The NIXL backend: what UCX is told, what is said where it cannot work, and what writers get in place."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from backend_harness import POISON, TOKEN, WRITER, Events, NixlBackend, Pool, ShmBackend
from geometry_cases import Case, cases
from hypothesis import HealthCheck, given, settings

from transport.backends import connect
from transport.backends.base import Run, WriterOptions
from transport.backends.nixl import library, ucx
from transport.backends.nixl.agent import Agent
from transport.backends.nixl.receiver import NixlReceiver
from transport.backends.nixl.writer import NixlPoolWriter
from transport.errors import ConfigurationError, LeaseRevoked, PushFailed
from transport.geometry.plan import plan
from transport.kernels import reference
from transport.messages import Region


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[NixlBackend]:
    backend = NixlBackend(tmp_path)
    yield backend
    await backend.close()


@pytest.fixture
async def pool(backend: NixlBackend) -> Pool:
    return await backend.pool()


async def join(pool: Pool, options: WriterOptions | None = None) -> NixlPoolWriter:
    writer = await asyncio.to_thread(connect, pool.description, WRITER, TOKEN, options=options)
    await pool.events.wait()
    assert isinstance(writer, NixlPoolWriter)
    return writer


# ---- what UCX is told ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transports", "strict", "rdma"),
    [
        (None, True, False),
        ("", True, False),
        ("tcp", True, False),
        ("tcp,self", True, False),
        ("rc_x,ud:aux", True, True),
        ("tcp,ib", True, True),
        ("tcp,sm", False, False),
        ("tcp,cma", False, False),
        ("all", False, True),
        ("^cma", False, True),
        ("tcp,something_new", False, False),
    ],
)
def test_what_transports_mean(
    monkeypatch: pytest.MonkeyPatch, transports: str | None, strict: bool, rdma: bool
) -> None:
    if transports is None:
        monkeypatch.delenv("UCX_TLS", raising=False)
    else:
        monkeypatch.setenv("UCX_TLS", transports)
    assert ucx.strict() is strict
    assert ucx.uses_rdma() is rdma


def test_ucx_is_kept_to_tcp_on_the_interface_of_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    assert ucx.engine_config("127.0.0.1") == "TLS=tcp,NET_DEVICES=lo"
    assert ucx.engine_config("192.0.2.1") == "TLS=tcp"


def test_what_the_operator_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "rc")
    assert ucx.engine_config("127.0.0.1") == ""
    monkeypatch.setenv("UCX_MODULES", "ib")
    monkeypatch.setenv("UCX_DEBUG_SIGNO", "SIGUSR2")
    ucx.prepare()
    assert (os.environ["UCX_MODULES"], os.environ["UCX_DEBUG_SIGNO"]) == ("ib", "SIGUSR2")


@pytest.fixture
def not_loaded() -> Iterator[Callable[[], object]]:
    """`library.load` as in a process that has not called it yet."""
    library.load.cache_clear()
    yield library.load
    library.load.cache_clear()


def test_nixl_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch, not_loaded: Callable[[], object]) -> None:
    monkeypatch.setattr(library, "_PACKAGES", ("nixl_of_nobody",))
    with pytest.raises(ConfigurationError, match=r"pip install --no-deps nixl-cu12==1\.5\.1"):
        not_loaded()


def test_transports_that_cannot_do_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "sm,self")
    with pytest.raises(ConfigurationError, match=r"UCX_TLS=sm,self.* it needs tcp beside it"):
        Agent("a", "127.0.0.1")


def test_regions_that_cannot_be_mapped_are_refused() -> None:
    with (
        open("/dev/null") as null,
        pytest.raises(ConfigurationError, match="cannot map the regions of decode-0"),
    ):
        NixlReceiver("decode-0", "d1", TOKEN, [(Region(address=0, rkey=0, length=10), null.fileno(), 0)], Events())


def test_a_process_that_uses_no_nixl_does_not_load_it() -> None:
    code = (
        "import sys, transport.backends.nixl.receiver, transport.backends.nixl.writer, decode_worker.receivers;"
        "sys.exit(any(name.startswith('nixl') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# ---- what UCX does ---------------------------------------------------------------------------------


def listening() -> set[str]:
    """Addresses, as the kernel writes them, where this process listens."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}").removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


async def test_nothing_listens_beyond_the_interface_of_the_link(pool: Pool) -> None:
    writer = await join(pool)
    assert listening() == {"0100007F"}
    await asyncio.to_thread(writer.close)


async def test_a_writer_that_goes_leaves_neither_threads_nor_descriptors(pool: Pool) -> None:
    # The loop's own pool of threads grows as it likes; with one thread it has its size from the first use on.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    async def come_and_go() -> None:
        writer = await join(pool)
        await asyncio.to_thread(writer.close)
        assert (await pool.events.wait())[0] == "writer_lost"

    await come_and_go()
    most = held()  # what the process keeps: UCX's own, and at worst something of the first writer that is still going
    for _ in range(3):
        await come_and_go()
    async with asyncio.timeout(10):
        while any(now > before for now, before in zip(held(), most, strict=True)):
            await asyncio.sleep(0.01)


def test_an_agent_sleeps_while_nothing_moves() -> None:
    """Its threads go to sleep again and again; one that polls without a pause never gives up its CPU."""
    before = set(os.listdir("/proc/self/task"))
    agent = Agent("sleeper", "127.0.0.1")
    threads = set(os.listdir("/proc/self/task")) - before

    def naps() -> int:
        texts = [Path(f"/proc/self/task/{thread}/status").read_text() for thread in threads]
        return sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in texts)

    count = naps()
    while naps() < count + 5:
        time.sleep(0.001)
    agent.close()


async def test_a_trial_write_that_does_not_arrive_is_no_connection(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver believes no engine that says `done` before the bytes are in place."""
    monkeypatch.setattr(Agent, "write", lambda *arguments: None)
    with pytest.raises(PushFailed, match="trial write has not arrived"):
        await asyncio.to_thread(connect, pool.description, WRITER, TOKEN)
    assert pool.receiver.writers == []


async def test_a_write_that_returned_is_in_place(pool: Pool) -> None:
    """No message on the link is behind it yet: UCX has confirmed it."""
    writer = await join(pool)
    lease = writer.open(pool.grant("a"))
    for size in (1, 100, 10_000, 1_000_000):
        for value in range(10):
            await asyncio.to_thread(lease.write, np.full(size, value, np.uint8), [Run(1, 0, 3, size)])
            assert (pool.memory[1][3 : 3 + size] == value).all()
    await asyncio.to_thread(writer.close)


# ---- staging ---------------------------------------------------------------------------------------

SMALL = WriterOptions(staging_bytes=1 << 18)


async def test_a_staged_buffer_is_sent_as_it_is_and_comes_back(pool: Pool) -> None:
    writer = await join(pool, SMALL)
    lease = writer.open(pool.grant("a"))
    for value in range(5):
        staging = lease.stage(200_000)  # room for one
        assert writer.staging.locate(staging) is not None
        staging[:] = value
        await asyncio.to_thread(lease.write, staging, [Run(0, 0, 0, 100_000), Run(1, 100_000, 0, 100_000)])
        assert (pool.memory[0][:100_000] == value).all()
        assert (pool.memory[1][:100_000] == value).all()
    assert writer.staging.free == writer.staging.size
    await asyncio.to_thread(writer.close)


async def test_more_than_the_staging_memory_is_written_through_it(pool: Pool) -> None:
    writer = await join(pool, SMALL)
    lease = writer.open(pool.grant("a"))
    staging = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    await asyncio.to_thread(lease.write, staging, [Run(0, 0, 0, 1 << 20)])
    assert np.array_equal(pool.memory[0], staging)
    assert writer.staging.free == writer.staging.size
    await asyncio.to_thread(writer.close)


async def test_a_buffer_that_is_never_written_comes_back_with_the_abort(pool: Pool) -> None:
    writer = await join(pool, SMALL)
    lease = writer.open(pool.grant("a"))
    lease.stage(200_000)
    with pytest.raises(PushFailed, match="out of bounds"):
        lease.write(lease.stage(200_000), [Run(7, 0, 0, 1)])
    lease.abort("no use")
    assert writer.staging.free == writer.staging.size
    await asyncio.to_thread(writer.close)


async def test_a_fenced_lease_gets_no_staging_memory(pool: Pool) -> None:
    writer = await join(pool, SMALL)
    lease = writer.open(pool.grant("a"))
    await asyncio.wait_for(pool.receiver.fence("a"), 10)
    with pytest.raises(LeaseRevoked):
        lease.stage(100)
    await asyncio.to_thread(writer.close)


async def test_pools_share_the_staging_memory(backend: NixlBackend, tmp_path: Path) -> None:
    other = NixlBackend(tmp_path)
    writers = [await join(await some.pool(), SMALL) for some in (backend, other)]
    assert writers[0].staging is writers[1].staging
    for writer in writers:
        await asyncio.to_thread(writer.close)
    await other.close()


# ---- the same bytes as by shared memory ------------------------------------------------------------


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_memory_after_a_push_equals_that_of_shared_memory(tmp_path: Path, case: Case) -> None:
    staging = reference.transform(*case.arguments(0, case.tokens))
    runs = plan(case.geometry, case.bases, case.dst_blocks, 0, case.tokens)
    lengths = (case.region_bytes,) * case.geometry.num_channels

    async def pushed(kind: type[ShmBackend | NixlBackend]) -> list[np.ndarray]:
        backend = kind(tmp_path)
        pool = await backend.pool(lengths=lengths)
        writer = await asyncio.to_thread(connect, pool.description, WRITER, TOKEN)
        await pool.events.wait()
        lease = writer.open(pool.grant("a"))
        buffer = lease.stage(staging.nbytes)
        buffer[:] = staging.reshape(-1).view(np.uint8)
        await asyncio.to_thread(lease.write, buffer, runs)
        push = asyncio.create_task(asyncio.to_thread(lease.complete, 10.0))
        assert await pool.events.wait() == ("landed", "a")
        memory = [region.copy() for region in pool.memory]
        pool.receiver.acknowledge("a")
        await push
        await asyncio.to_thread(writer.close)
        await backend.close()
        return memory

    by_nixl = asyncio.run(pushed(NixlBackend))
    by_shm = asyncio.run(pushed(ShmBackend))
    assert any((region != POISON).any() for region in by_shm)
    for got, expected in zip(by_nixl, by_shm, strict=True):
        assert np.array_equal(got, expected)
