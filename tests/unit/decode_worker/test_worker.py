"""The decode worker as its routers and writers see it: answers, failures, drain, status."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from decode_fakes import BLOCK, ROOT, WRITER, Bench, Router, statuses

from decode_worker.engines.scripted import continuation, row_value
from decode_worker.lease import LeaseLimits, LeaseState
from transport import prefix
from transport.errors import EngineFailed, LeaseRevoked, Overloaded, ProtocolError
from transport.geometry.pages import PageLayout
from transport.geometry.staging import execute, plan_contiguous, plan_linear
from transport.kernels.reference import to_linear, transform
from transport.kernels.source import Source
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


# ---- the other KV paths


def pages_of(bench: Bench, prompt: list[int]) -> tuple[Source, list[int]]:
    """The prompt's KV as a prefill worker has it: what the scripted engine would have stored, in GPU pages."""
    layout = PageLayout(1, 32, 16, "LBHNC", "plain", "float32")
    count = -(-len(prompt) // 16)
    pages = np.zeros((count, 1, 16, 64), np.float32)
    for position, token in enumerate(prompt):
        pages[position // 16, 0, position % 16, 0] = row_value(token, position)
    return Source([pages], layout), list(range(count))


@pytest.mark.parametrize("kv_path", ["host", "contiguous"])
@pytest.mark.parametrize("length", [5, 64, 100])
async def test_staged_kv_is_laid_out_before_decode(kv_path: str, length: int) -> None:
    prompt = [(3 * i) % 90 for i in range(length)]
    async with Bench(kv_path=kv_path, channels=7) as bench:
        router = await bench.router()
        for name in ("first", "again"):  # the second finds whole blocks resident
            lease = await bench.reserve(router, name, prompt)
            start = lease.resident_tokens
            assert start == (0 if name == "first" else length // BLOCK * BLOCK)
            if start < length:
                source, blocks = pages_of(bench, prompt)
                if kv_path == "host":
                    staging = to_linear(source, bench.geometry, blocks, start, length)
                    runs = plan_linear(bench.geometry, lease.staging_offset, length, start, length, "float32")
                else:
                    staging = transform(bench.geometry, lease.block_ids, source, blocks, start, length)
                    runs = plan_contiguous(
                        bench.geometry, lease.staging_offset, lease.block_ids, length, start, start, length
                    )
                execute([bench.pool._staging_memory], staging, runs)
            bench.worker.landed(lease.id)
            await bench.decode(router, lease, name, 5)
            assert await router.ended(name) == "length"
            assert router.tokens(name) == continuation(prompt, 5, 7)
        await bench.idle()
        assert bench.pool.staging.free == bench.pool.staging.size


async def test_a_cancel_during_the_re_layout_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Bench(kv_path="host") as bench:
        gate, entered = threading.Event(), threading.Event()

        def slow(*arguments) -> None:
            entered.set()
            gate.wait(5)

        monkeypatch.setattr(bench.pool, "relayout", slow)
        router = await bench.router()
        lease = await bench.reserve(router, "r", PROMPT)
        bench.worker.landed(lease.id)
        await asyncio.get_running_loop().run_in_executor(None, entered.wait, 5)
        await bench.worker.on_message(router, Cancel(request_id="r"))
        assert bench.pool.blocks.held == len(lease.block_ids)
        gate.set()
        await bench.idle()
        assert bench.pool.blocks.held == 0
        assert bench.pool.staging.free == bench.pool.staging.size


async def test_a_re_layout_that_fails_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Bench(kv_path="host") as bench:

        def broken(*arguments) -> None:
            raise ValueError("no such block")

        monkeypatch.setattr(bench.pool, "relayout", broken)
        router = await bench.router()
        lease = await bench.reserve(router, "r", PROMPT)
        bench.worker.landed(lease.id)
        assert await router.ended("r") == "internal_error"
        await bench.idle()
        assert bench.worker.ready() is None
