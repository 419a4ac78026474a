"""Announcements that cannot be true, landings that leave holes, and trouble while bytes are moved."""

from __future__ import annotations

import asyncio
import re
import threading

import pytest
from decode_fakes import Bench, Router

from transport.backends.base import Piece
from transport.messages import Cancel, Failed, Lease

PROMPT = [3, 1, 4, 1, 5] * 20
ROW = 32 * 32 * 4
"""Bytes of a tile row of one tensor."""
ALL = Piece(0, 100, 0, 1)


async def begin(bench: Bench, prompt: list[int] = PROMPT) -> tuple[Router, Lease]:
    router = await bench.router()
    return router, await bench.reserve(router, "r", prompt)


def reason(router: Router) -> str:
    (failed,) = router.of(Failed, "r")
    return failed.error.message


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (Piece(0, 132, 0, 0), r"tokens \[0, 132\) of tensors 0…0: the writer may bring tokens \[0, 100\)"),
        (Piece(16, 32, 0, 0), "multiples of 32"),
        (Piece(0, 32, 0, 2), "tensors 0…1"),
        (Piece(0, 96, 0, 1), f"its {6 * ROW} bytes are more than a staging slot's {4 * ROW}"),
        (Piece(0, 32, 0, 0, (1,)), "1 digests, expected 0"),
    ],
)
async def test_a_bad_piece_ends_its_lease_by_name_before_memory_is_touched(
    monkeypatch: pytest.MonkeyPatch, piece: Piece, words: str
) -> None:
    async with Bench(kv_path="host", slot_bytes=4 * ROW) as bench:
        placed: list[object] = []
        monkeypatch.setattr(bench.worker._arrivals._relayout, "place", lambda *what: placed.append(what))
        router, lease = await begin(bench)
        bench.worker.announced(lease.id, piece)
        assert await router.ended("r") == "protocol_error"
        await bench.idle()
        assert re.search(words, reason(router))
        assert placed == []
        assert reason(router).startswith(f"lease {lease.id}: p0 announced tokens")
        assert bench.pool.staging.free == bench.pool.staging.size
        assert bench.worker.ready() is None


async def test_resident_tokens_must_not_be_announced() -> None:
    async with Bench(kv_path="host") as bench:
        router, first = await begin(bench)
        bench.worker.announced(first.id, ALL)
        bench.worker.landed(first.id)
        async with asyncio.timeout(5):
            while not bench.pool.blocks.resident():
                await asyncio.sleep(0)
        lease = await bench.reserve(router, "again", PROMPT)
        assert lease.resident_tokens == 96
        bench.worker.announced(lease.id, ALL)
        assert await router.ended("again") == "protocol_error"


async def test_a_writer_that_does_not_wait_for_its_slots_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Bench(kv_path="host", slot_bytes=ROW) as bench:
        gate = threading.Event()
        monkeypatch.setattr(bench.worker._arrivals._relayout, "place", lambda *what: gate.wait(5))
        router, lease = await begin(bench)
        for start in (0, 32, 64):
            bench.worker.announced(lease.id, Piece(start, start + 32, 0, 0))
        assert router.outcome("r") is None
        bench.worker.announced(lease.id, Piece(96, 100, 0, 0))
        assert await router.ended("r") == "protocol_error"
        assert "all of its 3 staging slots are still full" in reason(router)
        gate.set()
        await bench.idle()


@pytest.mark.parametrize(("kv_path", "checksum"), [("host", False), ("hawk", True), ("contiguous", True)])
async def test_a_landing_that_leaves_a_hole_is_never_decoded_from(kv_path: str, checksum: bool) -> None:
    async with Bench(kv_path=kv_path, checksum=checksum) as bench:
        router, lease = await begin(bench)
        digests = (0,) * (len(bench.pool.handed_out()) if checksum else 0)
        bench.worker.announced(lease.id, Piece(0, 64, 0, 1, digests))
        bench.worker.announced(lease.id, Piece(64, 100, 1, 1, digests))
        await bench.decode(router, lease, "r", 5)
        bench.worker.landed(lease.id)
        assert await router.ended("r") == "protocol_error"
        assert "never announced 2 of the 8 rows of 32 tokens" in reason(router)
        await bench.idle()
        assert bench.pool.blocks.resident() == []
        assert bench.engine.steps == 0


async def test_with_checksums_a_landing_without_announcements_is_an_error() -> None:
    async with Bench(checksum=True) as bench:
        router, lease = await begin(bench)
        bench.push(lease, PROMPT)
        assert await router.ended("r") == "protocol_error"
        assert "never announced 8 of the 8 rows" in reason(router)


async def test_without_checksums_an_announcement_on_the_direct_path_is_a_sign_of_life_alone() -> None:
    async with Bench() as bench:
        router, lease = await begin(bench)
        bench.worker.announced(lease.id, Piece(0, 32, 0, 1))
        assert bench.worker.leases.get(lease.id).state.value == "writing"
        bench.push(lease, PROMPT)
        await bench.decode(router, lease, "r", 5)
        assert await router.ended("r") == "length"


async def test_announcements_of_a_lease_that_is_over_are_counted() -> None:
    async with Bench(kv_path="host") as bench:
        router, lease = await begin(bench)
        await bench.worker.on_message(router, Cancel(request_id="r"))
        await bench.idle()
        bench.worker.announced(lease.id, ALL)
        assert bench.metric("hawk_decode_late_events_total", event="announced") == 1
        assert bench.receiver.emptied[lease.id] == 0


async def test_each_piece_that_has_left_its_slot_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Bench(kv_path="host", slot_bytes=2 * ROW) as bench:
        gate = threading.Semaphore(0)
        monkeypatch.setattr(bench.worker._arrivals._relayout, "place", lambda *what: gate.acquire(timeout=5))
        _, lease = await begin(bench)
        for start in (0, 32, 64):
            bench.worker.announced(lease.id, Piece(start, start + 32, 0, 1))
        for count in (1, 2, 3):
            gate.release()
            async with asyncio.timeout(5):
                while bench.receiver.emptied[lease.id] < count:
                    await asyncio.sleep(0)
            assert bench.receiver.emptied[lease.id] == count


async def test_landing_waits_for_the_pieces_that_are_still_in_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Bench(kv_path="host") as bench:
        gate, entered = threading.Event(), threading.Event()
        monkeypatch.setattr(bench.worker._arrivals._relayout, "place", lambda *what: (entered.set(), gate.wait(5)))
        router, lease = await begin(bench)
        await bench.decode(router, lease, "r", 5)
        bench.worker.announced(lease.id, ALL)
        bench.worker.landed(lease.id)
        assert await asyncio.to_thread(entered.wait, 5)
        assert bench.receiver.acknowledged == [lease.id]  # the writer may go
        assert (bench.device.barriers, bench.engine.steps) == (0, 0)
        gate.set()
        assert await router.ended("r") == "length"
        assert bench.device.barriers == 1


async def test_a_re_layout_that_fails_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Bench(kv_path="host") as bench:

        def broken(*what: object) -> None:
            raise ValueError("no such block")

        monkeypatch.setattr(bench.worker._arrivals._relayout, "place", broken)
        router, lease = await begin(bench)
        bench.worker.announced(lease.id, ALL)
        assert await router.ended("r") == "internal_error"
        assert "no such block" in reason(router)
        await bench.idle()
        assert bench.worker.ready() is None


async def test_a_cancel_while_all_of_a_lease_is_moved_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Bench(kv_path="contiguous") as bench:
        gate, entered = threading.Event(), threading.Event()
        monkeypatch.setattr(bench.worker._arrivals._relayout, "scatter", lambda target: (entered.set(), gate.wait(5)))
        router, lease = await begin(bench)
        bench.worker.landed(lease.id)
        assert await asyncio.to_thread(entered.wait, 5)
        await bench.worker.on_message(router, Cancel(request_id="r"))
        assert bench.pool.blocks.held == len(lease.block_ids)
        gate.set()
        await bench.idle()
        assert bench.pool.blocks.held == 0
        assert bench.pool.staging.free == bench.pool.staging.size


async def test_a_worker_that_closes_drops_what_is_still_in_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, entered, placed = threading.Event(), threading.Event(), []

    def place(target: object, number: int, piece: Piece) -> None:
        placed.append(number)
        entered.set()
        gate.wait(5)

    async with Bench(kv_path="host", slot_bytes=2 * ROW) as bench:
        monkeypatch.setattr(bench.worker._arrivals._relayout, "place", place)
        _, lease = await begin(bench)
        for start in (0, 32, 64):
            bench.worker.announced(lease.id, Piece(start, start + 32, 0, 1))
        assert await asyncio.to_thread(entered.wait, 5)
        asyncio.get_running_loop().call_later(0.05, gate.set)
    assert placed == [0]
    assert bench.pool.blocks.held == 0
