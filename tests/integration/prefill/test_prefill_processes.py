"""The worker's processes: none outlives the others, and the router is told."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from prefill_peers import Router, Worker, decode_of, eventually, router_of, tokens_of

from transport.messages import Failed, Prefilled

pytestmark = pytest.mark.e2e


@pytest.fixture
async def worker(model: Path, tmp_path: Path) -> AsyncIterator[Worker]:
    """A new one for each test, which will not survive it."""
    worker = Worker(tmp_path, model, dtype="bfloat16", max_num_batched_tokens=64, kv_cache_gib=0.25)
    try:
        await worker.until_ready()
        yield worker
    finally:
        worker.close()


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


async def prefilling(worker: Worker, router: Router, count: int = 1) -> list[str]:
    requests = [router.prefill(tokens_of(i, 900), None) for i in range(count)]
    await eventually(lambda: worker.metric("unprefilled_requests") == count)
    return requests


async def test_case_53_a_killed_engine_fails_its_requests_and_ends_the_worker(worker: Worker) -> None:
    async with router_of(worker) as router:
        requests = await prefilling(worker, router, 2)
        engine = worker.children
        for process in engine:
            process.kill()
        for request_id in requests:
            failed = await router.expect(Failed, request_id=request_id, timeout_s=10)
            assert failed.error.code == "engine_failed"
    await eventually(lambda: worker.process.poll() is not None, 15)
    assert worker.process.returncode not in (0, None)
    assert gone(engine)


async def test_a_killed_worker_leaves_no_process(worker: Worker, model: Path, tmp_path: Path) -> None:
    async with router_of(worker) as router, decode_of("d0", model, tmp_path, dtype="bfloat16") as decode:
        await router.open(decode)
        router.prefill(tokens_of(1, 900), decode.lease(router.writer, 900))
        await eventually(lambda: worker.metric("unprefilled_requests") == 1)
        children = worker.children
        assert children
        os.kill(worker.process.pid, signal.SIGKILL)
        await eventually(lambda: gone(children), 5)
        # The kernel closes the dead engine's socket: D knows that the lease will not be written any more.
        for end in decode.ends.values():
            assert await asyncio.wait_for(end, 5) == "writer lost"


async def test_case_26_a_draining_worker_finishes_what_it_has(worker: Worker) -> None:
    async with router_of(worker) as router:
        (request_id,) = await prefilling(worker, router)
        worker.process.terminate()
        await eventually(lambda: worker.get("/ready").status_code == 503)
        late = router.prefill(tokens_of(9, 10), None)
        assert (await router.expect(Failed, request_id=late)).error.code == "overloaded"
        await router.expect(Prefilled, request_id=request_id)
        await eventually(lambda: worker.process.poll() is not None, 20)
    assert worker.process.returncode == 0
