"""NICs that are down, gone, missing, several, or not allowed to lock memory: named on both ends, and got over."""

from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path

import numpy as np
import pytest
from backend_harness import REGION_BYTES, TOKEN, WRITER, Events, describe
from verbs_ends import sh, soft_nic
from verbs_pool import LIMIT_S, QuickBackend, all_lanes_work, connect_to, fails, filled, join, push, write_all

from transport.backends.base import Run, WriterOptions
from transport.backends.verbs import hw_counters
from transport.backends.verbs.receiver import VerbsReceiver
from transport.backends.verbs.writer import connect
from transport.errors import ConfigurationError, HawkError
from transport.messages import Endpoint, PoolDescription, Region

LANES = 2


# ---- the network, the device


async def test_a_link_that_is_down_fails_pushes_and_readiness_until_it_is_up_again(tmp_path: Path) -> None:
    with soft_nic("rxe5", "hawk5"):
        backend = QuickBackend(tmp_path, ("rxe5",))
        pool = await backend.pool(slots=LANES)
        receiver = pool.receiver
        writer = await join(pool, devices=("rxe5",))
        assert receiver.ready() is None
        await push(pool, writer.open(pool.grant("before")), 1)
        opened = writer.open(pool.grant("during"))
        sh("ip link set hawk5 down")
        assert receiver.ready() == "port 1 of NIC rxe5 is down"
        # Soft-RoCE has no route and says so at once, other NICs send into the void until they give up.
        message = await fails(lambda: write_all(opened, filled(4096, 2)))
        assert "status 2," in message or "status 12," in message
        opened.abort("the network is down")
        event = await pool.events.wait()
        assert event in (("push_failed", "during", "the network is down"), ("writer_lost", WRITER))
        sh("ip link set hawk5 up")
        while receiver.ready() is not None:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(writer.close)  # the lane may not have been rebuilt while the link was down
        while event[0] != "writer_lost":
            event = await pool.events.wait()
        again = await join(pool, devices=("rxe5",))
        await all_lanes_work(pool, again, LANES)
        await asyncio.to_thread(again.close)
        await backend.close()


async def test_a_device_that_is_removed_fails_pushes_and_readiness_and_everything_closes(tmp_path: Path) -> None:
    with soft_nic("rxe6", "hawk6"):
        backend = QuickBackend(tmp_path, ("rxe6",))
        pool = await backend.pool(slots=LANES)
        writer = await join(pool, devices=("rxe6",))
        opened = writer.open(pool.grant("a"))
        # Takes rxe6 along, and waits for its users.
        removal = await asyncio.create_subprocess_exec("ip", "link", "delete", "hawk6")
        while (reason := pool.receiver.ready()) is None:
            await asyncio.sleep(0.01)
        assert "rxe6" in reason
        await fails(lambda: write_all(opened, filled(4096, 2)))
        opened.abort("the device is gone")
        assert (await pool.events.wait())[0] in ("push_failed", "writer_lost")
        await asyncio.wait_for(asyncio.to_thread(writer.close), LIMIT_S)
        await asyncio.wait_for(backend.close(), LIMIT_S)
        assert await asyncio.wait_for(removal.wait(), LIMIT_S) == 0
    with pytest.raises(ConfigurationError, match="rxe6"):
        await QuickBackend(tmp_path, ("rxe6",)).pool()


# ---- what is configured wrongly


@pytest.mark.parametrize("side", ["receiver", "writer"])
def test_too_low_a_memlock_limit_says_how_to_raise_it(side: str, tmp_path: Path) -> None:
    """In a child without root's rights, which would make it exempt."""
    inside, outside = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))
            os.setgid(65534)
            os.setuid(65534)
            try:
                register(side)
            except HawkError as error:
                os.write(outside, f"{error.code}: {error}".encode())
        finally:
            os._exit(0)
    os.close(outside)
    with os.fdopen(inside) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    assert text.startswith("configuration"), text
    for part in ("rxe0 cannot register 1048576 bytes", "limit of locked memory is 0.0625 MiB", "LimitMEMLOCK=infinity"):
        assert part in text


def register(side: str) -> None:
    if side == "receiver":
        fd = os.memfd_create("region")
        os.ftruncate(fd, REGION_BYTES)
        VerbsReceiver("d", "g", TOKEN, [(Region(address=0, rkey=0, length=REGION_BYTES), fd, 0)], Events(), "127.0.0.1")
    else:
        connect(nowhere(), WRITER, TOKEN, options=WriterOptions(staging_bytes=REGION_BYTES))


def nowhere() -> PoolDescription:
    """A pool that nobody serves."""
    regions = [Region(address=0, rkey=0, length=REGION_BYTES)]
    return describe("decode-0", "d1", regions, Endpoint(backend="verbs", address="127.0.0.1:1"))


def test_a_device_that_does_not_exist_is_named_on_both_sides() -> None:
    message = "there is no RDMA device 'mlx5_9'; there are: rxe0"
    with pytest.raises(ConfigurationError, match=message):
        VerbsReceiver("d", "g", TOKEN, [], Events(), devices=("mlx5_9",))
    with pytest.raises(ConfigurationError, match=message):
        connect_to(nowhere(), devices=("mlx5_9",))


def test_a_file_that_cannot_be_mapped_is_named() -> None:
    fd = os.open("/proc/version", os.O_RDONLY)
    with pytest.raises(ConfigurationError, match=f"cannot map 4096 bytes at 0 of descriptor {fd}"):
        VerbsReceiver("d", "g", TOKEN, [(Region(address=0, rkey=0, length=4096), fd, 0)], Events(), "127.0.0.1")
    os.close(fd)


# ---- several NICs


async def test_lanes_are_dealt_over_several_nics_and_one_that_fails_leaves_the_others(tmp_path: Path) -> None:
    with soft_nic("rxe5", "hawk5"):
        both = ("rxe0", "rxe5")
        backend = QuickBackend(tmp_path, both)
        pool = await backend.pool(slots=4)
        writer = await join(pool, devices=both)
        try:
            assert [lane.nic for lane in writer._lanes.lanes] == [0, 1, 0, 1]
            opened = [writer.open(pool.grant(f"lease-{number}")) for number in range(4)]
            data = np.random.default_rng(1).integers(0, 256, REGION_BYTES, np.uint8)
            part = REGION_BYTES // 4
            before = [hw_counters.read(device, 1)["sent_pkts"] for device in both]
            for number, one in enumerate(opened):
                one.write(data[number * part : (number + 1) * part], [Run(0, 0, number * part, part)])
            pushing = [asyncio.create_task(asyncio.to_thread(one.complete, LIMIT_S)) for one in opened]
            for _ in opened:
                event = await pool.events.wait()
                assert event[0] == "landed"
                pool.receiver.acknowledge(str(event[1]))
            await asyncio.gather(*pushing)
            assert (pool.memory[0] == data).all()
            for device, count in zip(both, before, strict=True):
                assert hw_counters.read(device, 1)["sent_pkts"] - count >= 2 * part // 4096

            sh("ip link set hawk5 down")
            assert pool.receiver.ready() == "port 1 of NIC rxe5 is down"
            by_nic = {writer._lanes.lanes[one.slot].nic: one for one in (writer.open(pool.grant(n)) for n in "ab")}
            await push(pool, by_nic[0], 0x55)
            await fails(lambda: write_all(by_nic[1], filled(4096, 0x66)))
        finally:
            await asyncio.to_thread(writer.close)
            await backend.close()
