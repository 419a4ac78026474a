"""A client that leaves, in every phase: both workers are told at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from router_fleet import Fleet

from transport.messages import Cancel, Decode, Prefill, Reserve


async def leave_when(fleet: Fleet, phase: Callable[[], bool], *, stream: bool, **fields: object) -> None:
    """Ask, and hang up as soon as `phase` is reached."""
    body = fleet.body(stream=stream, max_tokens=300, **fields)

    async def ask() -> None:
        async with fleet.http.stream("POST", "/v1/completions", json=body) as response:
            await response.aread()

    task = asyncio.create_task(ask())
    await fleet.until(phase)
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_gone_while_decode_reserves(fleet: Fleet, stream: bool) -> None:
    await fleet.start()
    fleet.decode[0].gate.clear()
    await leave_when(fleet, lambda: len(fleet.decode[0].seen(Reserve)) == 1, stream=stream)
    await fleet.decode[0].until_seen(Cancel)
    assert fleet.prefill[0].seen(Prefill) == []
    await fleet.until_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_case_02_gone_between_prefill_and_decode(fleet: Fleet, stream: bool) -> None:
    """The router itself releases both sides."""
    fleet.prefill[0].gate.clear()
    await fleet.start()
    await leave_when(fleet, lambda: len(fleet.prefill[0].seen(Prefill)) == 1, stream=stream)
    [at_prefill] = await fleet.prefill[0].until_seen(Cancel)
    [at_decode] = await fleet.decode[0].until_seen(Cancel)
    assert at_prefill.request_id == at_decode.request_id == fleet.prefill[0].seen(Prefill)[0].request_id
    assert fleet.decode[0].seen(Decode) == []
    await fleet.until_idle()
    assert await fleet.metric("hawk_router_aborts_total") == 1
    assert await fleet.metric("hawk_router_requests_total", status="499") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_case_10_gone_in_the_middle_of_the_push(fleet: Fleet, stream: bool) -> None:
    fleet.prefill[0].push_gate.clear()
    fleet.decode[0].steps.clear()
    await fleet.start()
    await leave_when(fleet, lambda: bool(fleet.decode[0].rows), stream=stream)
    await fleet.prefill[0].until_seen(Cancel)
    await fleet.decode[0].until_seen(Cancel)
    await fleet.until_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_gone_while_decoding(fleet: Fleet, stream: bool) -> None:
    """P has long finished and is not bothered."""
    fleet.decode[0].step_s = 0.01
    await fleet.start()
    row = fleet.decode[0].rows
    await leave_when(fleet, lambda: any(r.count > 3 for r in row.values()), stream=stream)
    await fleet.decode[0].until_seen(Cancel)
    assert fleet.prefill[0].seen(Cancel) == []
    await fleet.until_idle()


async def test_case_11_gone_while_waiting_for_a_prefill_slot(fleet: Fleet) -> None:
    """Dropped from the queue: no worker ever hears of it, and those around it are served."""
    fleet.prefill[0].gate.clear()
    await fleet.start(prefills_per_worker=1)
    first = asyncio.create_task(fleet.complete())
    await fleet.prefill[0].until_seen(Prefill)
    await leave_when(fleet, lambda: fleet.router.placement.queued == 1, stream=True)
    await fleet.until(lambda: fleet.router.placement.queued == 0)
    last = asyncio.create_task(fleet.complete())
    await fleet.until(lambda: fleet.router.placement.queued == 1)
    fleet.prefill[0].gate.set()
    assert [(await first).status_code, (await last).status_code] == [200, 200]
    assert len(fleet.prefill[0].seen(Prefill)) == 2


async def test_gone_while_waiting_at_the_gate(fleet: Fleet) -> None:
    fleet.decode[0].steps.clear()
    await fleet.start(max_concurrent=1)
    first = asyncio.create_task(fleet.complete())
    await fleet.decode[0].until_seen(Decode)
    await leave_when(fleet, lambda: fleet.router.gate.queued == 1, stream=False)
    await fleet.until(lambda: fleet.router.gate.queued == 0)
    fleet.decode[0].steps.set()
    assert (await first).status_code == 200
    assert (await fleet.complete()).status_code == 200, "the place was not lost"


async def test_all_choices_are_dropped(fleet: Fleet) -> None:
    fleet.decode[0].steps.clear()
    await fleet.start()
    await leave_when(fleet, lambda: len(fleet.decode[0].rows) == 4, stream=True, n=4)
    await fleet.decode[0].until_seen(Cancel, 4)
    await fleet.until_idle()


async def test_one_failed_choice_ends_the_others(fleet: Fleet) -> None:
    fleet.decode[0].steps.clear()
    await fleet.start(max_retries=0)
    task = asyncio.create_task(fleet.complete(n=3, max_tokens=300))
    await fleet.decode[0].until(lambda: len(fleet.decode[0].rows) == 3)
    await fleet.decode[0].fail(next(iter(fleet.decode[0].rows)), MemoryFault("bank 3"))
    assert (await task).status_code == 500
    await fleet.decode[0].until_seen(Cancel, 2)
    await fleet.until_idle()


class MemoryFault(Exception):
    """Something that is no HawkError."""


async def test_a_router_that_goes_leaves_nothing_on_its_workers(fleet: Fleet) -> None:
    fleet.decode[0].steps.clear()
    await fleet.start()
    tasks = [asyncio.create_task(fleet.complete()) for _ in range(3)]
    await fleet.decode[0].until(lambda: len(fleet.decode[0].rows) == 3)
    await fleet.router.registry.close()
    await fleet.decode[0].until_free()
    assert {r.status_code for r in await asyncio.gather(*tasks)} <= {502, 503}
