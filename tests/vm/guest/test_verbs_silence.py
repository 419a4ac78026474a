"""A peer whose host has gone says nothing any more: both ends notice by themselves, and find each other again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from backend_harness import POISON, TOKEN, WRITER
from verbs_ends import sh
from verbs_pool import QUICK, QuickBackend, fails, filled, grant_soon, join, push, write_all

from transport.backends.verbs.writer import connect
from transport.messages import Writer

NOTICED_S = 11.0
"""By keep-alives at the latest: 5 s without a word, then three times 2 s without an answer."""
SLACK_S = 10.0
RESTARTED = Writer(worker=WRITER.worker, generation="p2")


@contextmanager
def no_way_between() -> Iterator[None]:
    """The link is on the loopback: what is sent there is lost, and nobody is told."""
    sh("ip link set lo down")
    try:
        yield
    finally:
        sh("ip link set lo up")


async def test_case_21_a_silent_peer_is_noticed_at_both_ends_and_registers_anew(tmp_path: Path) -> None:
    """Nothing is being sent at the time. The writer's next life, and its own next connection, are as good as new."""
    backend = QuickBackend(tmp_path)
    pool = await backend.pool(slots=2)
    loop = asyncio.get_running_loop()
    lost: asyncio.Queue[str] = asyncio.Queue()
    writer = await join(pool, on_lost=lambda reason: loop.call_soon_threadsafe(lost.put_nowait, reason))
    opened = writer.open(pool.grant("a"))
    with no_way_between():
        async with asyncio.timeout(NOTICED_S + SLACK_S):
            assert await pool.events.queue.get() == ("writer_lost", WRITER)
            assert "timed out" in await lost.get()
        assert not pool.receiver.writers  # type: ignore[attr-defined]
        await asyncio.wait_for(pool.receiver.fence("a"), 1.0)
    assert "connection to pool decode-0 is over" in await fails(lambda: write_all(opened, filled(4096, 1)))
    for name in (RESTARTED, WRITER):
        again = await join(pool, name)
        for number in range(4):
            granted = await grant_soon(pool, f"{name.generation}-{number}", name)
            await push(pool, await asyncio.to_thread(again.open, granted), 0x20 + number, offset=4096 * number)
        await asyncio.to_thread(again.close)
        assert await pool.events.wait() == ("writer_lost", name)
    assert (pool.memory[1] == POISON).all()
    await asyncio.to_thread(writer.close)
    await backend.close()


async def test_case_21_a_receiver_that_is_silent_is_not_waited_for_longer_than_said(tmp_path: Path) -> None:
    """The connection is refused by name, and can be had as soon as there is a way again."""
    backend = QuickBackend(tmp_path)
    pool = await backend.pool(slots=1)
    with no_way_between():
        message = await fails(lambda: connect(pool.description, WRITER, TOKEN, patience=QUICK, timeout_s=0.5))
    assert "cannot connect to pool decode-0" in message
    await asyncio.to_thread((await join(pool)).close)
    await backend.close()
