"""The decode worker as its routers and writers see it: answers, failures, drain, status."""

from __future__ import annotations

import asyncio
import threading

import pytest
from decode_fakes import BLOCK, ROOT, WRITER, Bench, Router, statuses

from decode_worker.engines.scripted import continuation
from decode_worker.lease import LeaseLimits, LeaseState
from transport import prefix
from transport.errors import EngineFailed, LeaseRevoked, Overloaded, ProtocolError
from transport.messages import Cancel, Failed, Ping, Prefilled, ResidentBlocks

PROMPT = [3, 1, 4, 1, 5] * 8


async def test_hello_describes_the_pool() -> None:
    async with Bench() as bench:
        hello = bench.worker.hello()
        assert (hello.role, hello.worker, hello.generation) == ("decode", "d0", "gen")
        assert hello.pool.geometry == bench.geometry
        assert hello.pool.bases == bench.pool.bases
        assert [c.length for c in hello.pool.channels] == [2 * bench.geometry.bank_bytes] * 8
        assert (hello.status.free_blocks, hello.status.total_blocks, hello.status.ready) == (64, 64, True)
        assert bench.worker.info()["model"]["name"] == "scripted"


async def test_decode_may_come_before_the_kv_has_landed() -> None:
    async with Bench() as bench:
        router = await bench.router()
        lease = await bench.reserve(router, "r", PROMPT)
        await bench.decode(router, lease, "r", 5)
        assert bench.worker.scheduler.waiting == 0
        bench.push(lease, PROMPT)
        assert await router.ended("r") == "length"
        assert router.tokens("r") == continuation(PROMPT, 5, 7)
        assert bench.receiver.acknowledged == [lease.id]


async def test_the_device_barrier_comes_before_decode() -> None:
    async with Bench() as bench:
        router = await bench.router()
        await bench.serve(router, "r", PROMPT)
        assert bench.device.barriers == 1
        await router.ended("r")


async def test_case_25_random_cancels_leave_every_request_ended_and_the_pool_full() -> None:
    async with Bench(num_blocks=32) as bench:
        router = await bench.router()

        async def one(i: int) -> None:
            text = [(i + j) % 90 for j in range(1 + 13 * i % 70)]
            try:
                lease = await bench.reserve(router, f"r{i}", text, 40)
            except Overloaded:
                return
            if i % 5 == 0:
                await bench.worker.on_message(router, Cancel(request_id=f"r{i}"))
                return
            await bench.decode(router, lease, f"r{i}", 5, max_tokens=40)
            await asyncio.sleep(0)
            if i % 7 == 0:
                bench.worker.push_failed(lease.id, "lost")
            else:
                bench.push(lease, text)
            if i % 3 == 0:
                await router.until(lambda: router.tokens(f"r{i}") or router.outcome(f"r{i}"))
                await bench.worker.on_message(router, Cancel(request_id=f"r{i}"))
                return
            outcome = await router.ended(f"r{i}")
            if outcome == "length":
                assert router.tokens(f"r{i}") == continuation(text, 5, 39)

        for start in range(0, 60, 6):
            await asyncio.gather(*(one(i) for i in range(start, start + 6)))
        await bench.idle()
        assert bench.worker.status().free_blocks == 32
        assert bench.metric("hawk_decode_blocks", state="held") == 0


@pytest.mark.parametrize("phase", ["reserved", "decode_waits", "landed", "decoding"])
async def test_case_03_a_cancel_reaches_every_phase(phase: str) -> None:
    async with Bench() as bench:
        bench.engine.gate = threading.Semaphore(0)
        router = await bench.router()
        lease = await bench.reserve(router, "r", PROMPT)
        if phase in ("landed", "decoding"):
            bench.push(lease, PROMPT)
        if phase in ("decode_waits", "decoding"):
            await bench.decode(router, lease, "r", 5)
        await bench.worker.on_message(router, Cancel(request_id="r"))
        bench.engine.gate.release(10)
        await bench.idle()
        assert bench.worker.status().free_blocks == 64
        assert router.outcome("r") is None
        await bench.worker.on_message(router, Cancel(request_id="r"))
        assert bench.metric("hawk_decode_unknown_messages_total", message="Cancel") == 1


async def test_case_02_a_router_that_goes_takes_all_it_had_with_it() -> None:
    async with Bench() as bench:
        gone, stays = await bench.router(), await bench.router()
        await bench.reserve(gone, "a", PROMPT)
        await bench.serve(gone, "b", PROMPT, max_tokens=200)
        await bench.serve(stays, "c", PROMPT, max_tokens=20)
        await bench.worker.on_close(gone)
        assert await stays.ended("c") == "length"
        await bench.idle()
        assert bench.worker.status().free_blocks == 64


async def test_case_16_and_22_a_failed_push_is_told_once_and_freed_at_once() -> None:
    async with Bench() as bench:
        router = await bench.router()
        lease = await bench.reserve(router, "r", PROMPT)
        bench.worker.push_failed(lease.id, "P is out of memory")
        (failed,) = router.of(Failed, "r")
        assert (failed.error.code, failed.error.message) == ("push_failed", "P is out of memory")
        await bench.idle()
        # The router's Decode crossed the failure: no second Failed, which could hit its next try.
        await bench.decode(router, lease, "r", 5)
        assert len(router.of(Failed)) == 1
        assert bench.metric("hawk_decode_failures_total", code="push_failed") == 1


async def test_case_08_a_dead_writer_ends_its_transfers() -> None:
    async with Bench() as bench:
        router = await bench.router()
        await bench.reserve(router, "r", PROMPT)
        bench.worker.writer_lost(WRITER)
        assert await router.ended("r") == "push_failed"
        await bench.idle()


async def test_case_20_decode_on_an_unknown_lease_is_refused_by_name() -> None:
    async with Bench() as bench:
        router = await bench.router()
        lease = await bench.reserve(router, "r", PROMPT)
        stranger = lease.model_copy(update={"id": "d0-earlier-1"})
        with pytest.raises(LeaseRevoked, match="d0-earlier-1"):
            await bench.decode(router, stranger, "r", 5)
        with pytest.raises(LeaseRevoked):
            await bench.decode(Router(), lease, "r", 5)  # somebody else's


async def test_a_repeated_decode_changes_nothing() -> None:
    async with Bench() as bench:
        router = await bench.router()
        lease = await bench.reserve(router, "r", PROMPT)
        await bench.decode(router, lease, "r", 5)
        await bench.decode(router, lease, "r", 6)
        bench.push(lease, PROMPT)
        await router.ended("r")
        assert router.tokens("r") == continuation(PROMPT, 5, 7)


async def test_case_12_pings_keep_leases_alive_and_silence_ends_them() -> None:
    async with Bench(limits=LeaseLimits(ttl_s=0.05, max_hold_s=10, watermark=0)) as bench:
        router = await bench.router()
        lease = await bench.reserve(router, "r", PROMPT)
        for seq in range(10):
            await asyncio.sleep(0.01)
            await bench.worker.on_message(router, Ping(seq=seq))
        assert bench.worker.leases.get(lease.id).state is LeaseState.RESERVED
        assert await router.ended("r") == "lease_expired"
        await bench.idle()


async def test_an_engine_failure_is_told_to_all_and_ends_the_worker() -> None:
    async with Bench() as bench:
        router = await bench.router()
        bench.engine.gate = threading.Semaphore(0)
        await bench.serve(router, "a", PROMPT)
        await bench.reserve(router, "b", PROMPT)
        bench.engine.fail = RuntimeError("bad tile")
        bench.engine.gate.release()
        with pytest.raises(EngineFailed, match="bad tile"):
            await bench.running
        assert await router.ended("a") == await router.ended("b") == "engine_failed"
        assert "bad tile" in bench.worker.ready()
        assert statuses(router)[-1].ready is False
        with pytest.raises(Overloaded):
            await bench.reserve(router, "c", PROMPT)
        await asyncio.sleep(0)
        assert len(bench.worker.leases) == 0


async def test_case_64_a_wedged_engine_is_not_ready() -> None:
    async with Bench() as bench:
        object.__setattr__(bench.worker._limits, "stall_s", 0.01)
        router = await bench.router()
        bench.engine.gate = threading.Semaphore(0)
        await bench.serve(router, "r", PROMPT, max_tokens=3)
        assert bench.worker.ready() is None
        while bench.worker.ready() is None:
            await asyncio.sleep(0.005)
        assert "in one step for" in bench.worker.ready()
        bench.engine.gate.release(10)
        await router.ended("r")
        assert bench.worker.ready() is None


async def test_case_26_a_draining_worker_takes_no_new_request_and_finishes_what_it_has() -> None:
    async with Bench() as bench:
        router = await bench.router()
        bench.engine.gate = threading.Semaphore(0)
        await bench.serve(router, "r", PROMPT, max_tokens=30)
        draining = asyncio.create_task(bench.worker.drain())
        await router.until(lambda: any(s.draining for s in statuses(router)))
        assert bench.worker.ready() == "draining"
        with pytest.raises(Overloaded, match="draining"):
            await bench.reserve(router, "late", PROMPT)
        assert not draining.done()
        bench.engine.gate.release(100)
        await asyncio.wait_for(draining, 5)
        assert router.tokens("r") == continuation(PROMPT, 5, 29)


async def test_a_session_learns_what_is_resident_and_what_changes() -> None:
    text = list(range(BLOCK)) * 2
    hashes = tuple(prefix.block_hashes(text, BLOCK, ROOT))
    async with Bench(num_blocks=4) as bench:
        first = await bench.router()
        assert first.of(ResidentBlocks) == [ResidentBlocks(reset=True)]
        await bench.serve(first, "r", text, max_tokens=3)
        await first.until(lambda: len(first.of(ResidentBlocks)) > 1)
        assert first.of(ResidentBlocks)[1].added == hashes
        await bench.idle()
        second = await bench.router()
        assert second.of(ResidentBlocks) == [ResidentBlocks(added=hashes, reset=True)]
        await bench.reserve(second, "s", [9] * 100)
        await second.until(lambda: len(second.of(ResidentBlocks)) > 1)
        assert set(second.of(ResidentBlocks)[1].removed) == set(hashes)


async def test_status_follows_the_pool_at_a_bounded_rate() -> None:
    async with Bench() as bench:
        router = await bench.router()
        lease = await bench.reserve(router, "r", PROMPT)
        await router.until(lambda: statuses(router) and statuses(router)[-1].free_blocks == 64 - len(lease.block_ids))
        bench.push(lease, PROMPT)
        await bench.decode(router, lease, "r", 5, max_tokens=60)
        await router.ended("r")
        await router.until(lambda: statuses(router)[-1].free_blocks == 64)
        assert statuses(router)[-1].running == 0


async def test_messages_that_are_not_for_a_decode_worker_are_refused() -> None:
    async with Bench() as bench:
        router = await bench.router()
        with pytest.raises(ProtocolError, match="takes no Prefilled"):
            await bench.worker.on_message(router, Prefilled(request_id="r", token_ids=(1,)))
        lease = await bench.reserve(router, "r", PROMPT)
        with pytest.raises(ProtocolError, match="outside the vocabulary"):
            await bench.decode(router, lease, "r", 97)
        await bench.idle()
