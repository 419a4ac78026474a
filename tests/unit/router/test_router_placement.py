"""Where requests go, and who waits: placement and the front gate, without any session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from router_fleet import TOKEN, make_model

from router.admission import Gate
from router.placement import Placed, Placement, Prompt
from router.registry import Registry
from router.settings import RouterSettings
from router.workers import DecodeWorker, PrefillWorker, Worker
from transport.errors import NoWorkers, Overloaded
from transport.messages import Message, PoolOpened, ResidentBlocks, Status
from transport.model import model_info
from transport.prefix import block_hashes
from transport.testing import FakeDecode, FakePrefill, FakeWorker


class Nowhere:
    """An inbox that takes nothing, and a session that goes nowhere."""

    def tokens(self, *_: object) -> None: ...
    def message(self, *_: object) -> None: ...
    def lost(self, *_: object) -> None: ...
    def send(self, message: Message) -> None: ...


class Bench:
    """A registry whose workers are attached by hand."""

    def __init__(self, model_dir: Path, slots: int = 1) -> None:
        settings = RouterSettings.model_validate({"model": model_dir, "token": TOKEN})
        self.model = model_info(model_dir, "m")
        nowhere: Any = Nowhere()
        self.nowhere = nowhere
        self.registry = Registry(settings, self.model, "g", nowhere, lambda: None)
        self.placement = Placement(self.registry, slots)

    def _attach(self, worker: Worker, fake: FakeWorker) -> None:
        worker.client = self.nowhere
        fleet: Any = self.registry.prefill if isinstance(worker, PrefillWorker) else self.registry.decode
        fleet.append(worker)
        self.registry._attached(worker, fake.hello())
        for p in self.registry.prefill:
            for d in self.registry.decode:
                assert d.hello is not None
                self.registry.pools.answered(p, d, PoolOpened(worker=d.name, generation=d.hello.generation))

    def prefill(self, **load: int) -> PrefillWorker:
        worker = PrefillWorker(f"http://p{len(self.registry.prefill)}")
        self._attach(worker, FakePrefill(worker.url, self.model))
        for name, value in load.items():
            setattr(worker, name, value)
        return worker

    def decode(self, free_blocks: int = 100, total_blocks: int = 100) -> DecodeWorker:
        worker = DecodeWorker(f"http://d{len(self.registry.decode)}")
        self._attach(worker, FakeDecode(worker.url, self.model))
        worker.heard(Status(ready=True, free_blocks=free_blocks, total_blocks=total_blocks))
        return worker

    async def place(self, tokens: int = 10, **how: Any) -> Placed:
        loop = asyncio.get_running_loop()
        given = {
            "needs_decode": True,
            "kv_tokens": tokens + 1,
            "order": loop.time(),
            "deadline": loop.time() + 5,
            "avoid": frozenset(),
            **how,
        }
        return await self.placement.acquire(Prompt(list(range(tokens))), **given)


@pytest.fixture
async def bench(tmp_path: Path) -> Bench:
    return Bench(make_model(tmp_path / "m"))


@pytest.fixture
async def wide(tmp_path: Path) -> Bench:
    return Bench(make_model(tmp_path / "m"), slots=10)


async def test_prefill_by_least_outstanding_tokens(wide: Bench) -> None:
    a, b = wide.prefill(), wide.prefill()
    wide.decode()
    b.heard(Status(ready=True, outstanding_tokens=50))
    assert (await wide.place(100)).prefill is a
    assert (await wide.place(10)).prefill is b
    assert (await wide.place(100)).prefill is b, "100 outstanding there, 60 here: our own prompts count at once"
    assert [a.outstanding, b.outstanding, b.foreign] == [100, 110, 50]


async def test_decode_by_resident_prefix_then_free_blocks(wide: Bench) -> None:
    wide.prefill()
    holder, roomy, _ = wide.decode(10), wide.decode(90), wide.decode(50)
    hashes = block_hashes(list(range(100)), holder.block_size, holder.root)
    assert (await wide.place(100)).decode is roomy
    wide.registry._message(holder, ResidentBlocks(added=tuple(hashes[:2])))
    assert (await wide.place(100)).decode is holder
    assert (await wide.place(20)).decode is roomy
    wide.registry._message(holder, ResidentBlocks(removed=(hashes[0],)))
    assert (await wide.place(100)).decode is roomy
    wide.registry._message(holder, ResidentBlocks(added=(hashes[0],)))
    wide.registry._message(holder, ResidentBlocks(reset=True))
    assert (await wide.place(100)).decode is roomy


async def test_a_prefix_that_all_share_does_not_put_all_requests_on_one_decode_worker(wide: Bench) -> None:
    wide.prefill()
    holder, idle = wide.decode(90), wide.decode(10)
    shared = block_hashes(list(range(100)), holder.block_size, holder.root)
    wide.registry._message(holder, ResidentBlocks(added=tuple(shared)))
    for _ in range(10):
        placed = await wide.place(100)
        assert placed.decode is not None
        placed.decode.calls += 1
        wide.placement.release(placed)
    assert (holder.calls, idle.calls) == (8, 2), "the prefix draws requests, but within bounds"


async def test_only_decode_workers_whose_pool_can_hold_the_request(wide: Bench) -> None:
    wide.prefill()
    large, small = wide.decode(free_blocks=5, total_blocks=6), wide.decode(free_blocks=4, total_blocks=4)
    wide.registry._message(small, ResidentBlocks(added=tuple(block_hashes(list(range(64)), 32, small.root))))
    assert (await wide.place(100, kv_tokens=4 * 32)).decode is small
    assert (await wide.place(100, kv_tokens=4 * 32 + 1)).decode is large
    wide.placement.full(large)
    waiting = asyncio.create_task(wide.place(100, kv_tokens=6 * 32))
    await asyncio.sleep(0)
    assert wide.placement.queued == 1
    wide.placement.freed(large)
    assert (await waiting).decode is large
    with pytest.raises(NoWorkers, match="193 tokens"):
        await wide.place(100, kv_tokens=6 * 32 + 1)


async def test_workers_to_avoid_are_the_last_resort(wide: Bench) -> None:
    a, b = wide.prefill(), wide.prefill(outstanding=500)
    d = wide.decode()
    assert (await wide.place(avoid=frozenset({a}))).prefill is b
    assert (await wide.place(avoid=frozenset({a, b, d}))).prefill is a
    a.failed()
    assert (await wide.place()).prefill is b
    a.succeeded()
    assert (await wide.place()).prefill is a


async def test_no_worker_is_an_error_at_once(bench: Bench) -> None:
    with pytest.raises(NoWorkers, match="no pair of prefill and decode workers is ready"):
        await bench.place()
    bench.prefill()
    with pytest.raises(NoWorkers, match="no pair of prefill and decode workers is ready"):
        await bench.place()
    assert (await bench.place(needs_decode=False)).decode is None


async def test_slots_are_handed_on_in_order(bench: Bench) -> None:
    bench.prefill()
    bench.decode()
    first = await bench.place()
    waiting = [asyncio.create_task(bench.place(i + 1)) for i in range(3)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    bench.placement.release(first)
    bench.placement.release(first)
    assert (await waiting[0]).tokens == 1
    assert not waiting[2].done()
    bench.placement.release(waiting[0].result())
    assert (await waiting[2]).tokens == 3
    bench.placement.release(waiting[2].result())
    assert (bench.registry.prefill[0].in_flight, bench.registry.prefill[0].outstanding) == (0, 0)


async def test_a_slot_given_to_one_who_just_left_is_not_lost(bench: Bench) -> None:
    worker = bench.prefill()
    bench.decode()
    first = await bench.place()
    waiting = asyncio.create_task(bench.place())
    await asyncio.sleep(0)
    bench.placement.release(first)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert worker.in_flight == 0


async def test_one_that_needs_blocks_holds_up_only_those_that_need_them(wide: Bench) -> None:
    wide.prefill()
    decode = wide.decode()
    wide.placement.full(decode)
    large, small = asyncio.create_task(wide.place(90)), asyncio.create_task(wide.place(5))
    await asyncio.sleep(0)
    assert (await wide.place(1, needs_decode=False)).decode is None
    assert (large.done(), small.done()) == (False, False)
    wide.placement.freed(decode)
    assert (await large).decode is decode
    assert (await small).decode is decode


async def test_one_that_comes_back_keeps_its_turn(bench: Bench) -> None:
    bench.prefill()
    bench.decode()
    first = await bench.place()
    late = asyncio.create_task(bench.place(2, order=20.0))
    early = asyncio.create_task(bench.place(1, order=10.0))
    await asyncio.sleep(0)
    bench.placement.release(first)
    assert (await early).tokens == 1
    assert not late.done()
    late.cancel()


async def test_waiting_for_a_slot_ends(bench: Bench) -> None:
    bench.prefill()
    bench.decode()
    await bench.place()
    with pytest.raises(Overloaded):
        await bench.place(deadline=asyncio.get_running_loop().time() + 0.02)
    assert bench.placement.queued == 0


# ---- the gate


async def hold(gate: Gate, entered: Callable[[], None], leave: asyncio.Event) -> None:
    async with gate.admit():
        entered()
        await leave.wait()


async def test_the_gate_admits_in_order_and_loses_no_place() -> None:
    gate, order = Gate(1, 10, 5.0), []
    leave = [asyncio.Event() for _ in range(4)]
    tasks = [asyncio.create_task(hold(gate, lambda i=i: order.append(i), leave[i])) for i in range(4)]  # type: ignore[misc]
    await asyncio.sleep(0)
    assert (gate.inside, gate.queued) == (1, 3)
    tasks[1].cancel()
    await asyncio.sleep(0)
    leave[0].set()
    await asyncio.sleep(0)
    tasks[2].cancel()  # in the moment it is let in
    leave[2].set()
    leave[3].set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order[0] == 0
    assert order[-1] == 3
    assert (gate.inside, gate.queued) == (0, 0)
    async with gate.admit():
        assert gate.inside == 1


async def test_the_gate_is_bounded_in_number_and_time() -> None:
    gate = Gate(1, 1, 0.02)
    async with gate.admit():
        waiting = asyncio.create_task(hold(gate, lambda: None, asyncio.Event()))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="full"):
            async with gate.admit():
                pass
        with pytest.raises(Overloaded, match="within"):
            await waiting
    async with gate.admit():
        assert gate.queued == 0
