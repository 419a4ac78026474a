"""Leases: every way through their states gives all blocks back, and never too early."""

from __future__ import annotations

import asyncio

import pytest
from decode_fakes import BLOCK, WRITER, Router, reserve, table

from decode_worker.lease import LeaseLimits, LeaseState
from decode_worker.staging import StagingArea
from transport.errors import ContextLengthExceeded, InvalidRequest, Overloaded, ProtocolError, WorkerLost
from transport.messages import Writer

PROMPT = list(range(70))  # two full blocks and a tail


async def settle() -> None:
    """Let fence tasks run."""
    for _ in range(5):
        await asyncio.sleep(0)


def to_state(leases, state: LeaseState, owner, name="r"):
    """A lease that has come as far as `state`."""
    lease = leases.get(leases.reserve(owner, reserve(name, PROMPT)).id)
    if state is not LeaseState.RESERVED:
        leases.progress(lease.id)
    if state in (LeaseState.LANDED, LeaseState.DECODING):
        leases.land(leases.written(lease.id))
    if state is LeaseState.DECODING:
        lease.state = LeaseState.DECODING
    assert lease.state is state
    return lease


LIVE = [LeaseState.RESERVED, LeaseState.WRITING, LeaseState.LANDED, LeaseState.DECODING]


async def test_a_lease_covers_the_prompt_and_one_token_more() -> None:
    leases, receiver, _, _ = table()
    for tokens, blocks in [(1, 1), (31, 1), (32, 2), (63, 2), (64, 3)]:
        lease = leases.reserve(Router(), reserve(f"r{tokens}", list(range(tokens))))
        assert (len(lease.block_ids), lease.prompt_tokens, lease.resident_tokens) == (blocks, tokens, 0)
        assert lease.generation == "gen"
        assert receiver.open[lease.id] == WRITER


@pytest.mark.parametrize("state", LIVE)
async def test_case_01_and_10_a_cancel_in_any_state_frees_at_once(state: LeaseState) -> None:
    leases, receiver, _, failed = table()
    lease = to_state(leases, state, Router())
    leases.finish(lease, "cancelled")
    assert leases.of_request(lease.owner, "r") is None
    await settle()
    assert leases.blocks.available == 16
    assert len(leases) == 0
    assert not receiver.open
    assert failed == []
    leases.finish(lease, "cancelled")  # idempotent
    assert leases.counts.ended == {"cancelled": 1}


@pytest.mark.parametrize("state", [LeaseState.RESERVED, LeaseState.WRITING])
async def test_case_09_blocks_stay_until_the_fence_has_returned(state: LeaseState) -> None:
    leases, receiver, _, _ = table()
    receiver.hold = True
    lease = to_state(leases, state, Router())
    leases.finish(lease, "cancelled")
    await settle()
    assert lease.state is LeaseState.FENCING
    assert leases.blocks.available == 13
    # nothing else waits for it
    other = to_state(leases, LeaseState.LANDED, Router())
    assert not set(other.blocks) & set(lease.blocks)
    leases.finish(other, "stop")
    assert leases.blocks.available == 13
    receiver.let_go()
    await settle()
    assert leases.blocks.available == 16


async def test_case_09_blocks_stay_while_a_step_uses_them() -> None:
    leases, _, _, _ = table()
    lease = to_state(leases, LeaseState.DECODING, Router())
    leases.pin(lease)
    leases.finish(lease, "cancelled")
    assert leases.blocks.available == 13
    leases.unpin(lease)
    assert leases.blocks.available == 16


@pytest.mark.parametrize("state", LIVE)
async def test_case_07_and_12_the_reaper_frees_what_is_not_refreshed(state: LeaseState) -> None:
    leases, _, clock, failed = table()
    lease = to_state(leases, state, Router())
    clock.now += 29.9
    assert leases.reap() == pytest.approx(0.1)
    clock.now += 0.2
    leases.reap()
    await settle()
    assert lease.state is LeaseState.FREED
    assert failed == [("r", "lease_expired")]
    assert leases.blocks.available == 16


async def test_case_07_the_reaper_needs_no_traffic() -> None:
    limits = LeaseLimits(ttl_s=0.01, max_hold_s=1, watermark=0)
    leases, _, _, failed = table(limits=limits, clock=asyncio.get_running_loop().time)
    to_state(leases, LeaseState.WRITING, Router())
    reaper = asyncio.create_task(leases.reap_forever())
    async with asyncio.timeout(2):
        while len(leases):
            await asyncio.sleep(0.005)
    reaper.cancel()
    assert failed == [("r", "lease_expired")]


async def test_case_12_pings_refresh_but_never_for_ever() -> None:
    leases, _, clock, failed = table()
    router = Router()
    waiting = to_state(leases, LeaseState.WRITING, router, "waiting")
    decoding = to_state(leases, LeaseState.DECODING, router, "decoding")
    decoding.decode = object()
    for _ in range(9):
        clock.now += 10
        leases.refresh(router)
        leases.progress(waiting.id)
        leases.reap()
    assert failed == []
    clock.now += 10
    leases.refresh(router)
    leases.reap()
    assert failed == [("waiting", "lease_expired")]  # 100 s after its reservation
    assert decoding.state is LeaseState.DECODING


async def test_another_routers_ping_refreshes_nothing_of_ours() -> None:
    leases, _, clock, failed = table()
    to_state(leases, LeaseState.WRITING, Router())
    clock.now += 31
    leases.refresh(Router())
    leases.reap()
    assert failed == [("r", "lease_expired")]


async def test_case_16_and_22_a_failed_push_ends_the_lease_with_its_reason() -> None:
    leases, _, _, failed = table()
    lease = to_state(leases, LeaseState.WRITING, Router())
    leases.push_failed(lease.id, "out of pages")
    await settle()
    assert failed == [("r", "push_failed")]
    assert leases.blocks.available == 16
    leases.push_failed(lease.id, "again")
    leases.push_failed("unheard-of", "?")
    assert leases.counts.late == {"push_failed": 2}


async def test_case_16_a_lost_writer_ends_what_it_had_not_finished() -> None:
    leases, receiver, _, failed = table()
    other = Writer(worker="p1", generation="g1")
    receiver.writers.add(other)
    router = Router()
    for name, state in [("a", LeaseState.RESERVED), ("b", LeaseState.WRITING), ("c", LeaseState.LANDED)]:
        to_state(leases, state, router, name)
    leases.reserve(router, reserve("d", PROMPT, writer=other))
    leases.writer_lost(WRITER)
    await settle()
    assert failed == [("a", "push_failed"), ("b", "push_failed")]
    assert leases.of_request(router, "c") is not None
    assert leases.of_request(router, "d") is not None


async def test_a_closed_session_loses_all_and_only_its_leases() -> None:
    leases, _, _, failed = table(24)
    gone, stays = Router(), Router()
    for i, state in enumerate(LIVE):
        to_state(leases, state, gone, f"r{i}")
    kept = to_state(leases, LeaseState.WRITING, stays)
    leases.close_owner(gone)
    await settle()
    assert len(leases) == 1
    assert leases.of_request(stays, "r") is kept
    assert failed == []


async def test_landing_after_the_end_changes_nothing() -> None:
    leases, receiver, _, _ = table()
    receiver.hold = True
    lease = to_state(leases, LeaseState.WRITING, Router())
    leases.finish(lease, "cancelled")
    assert leases.written(lease.id) is None
    leases.land(lease)
    assert lease.state is LeaseState.FENCING
    assert receiver.acknowledged == []
    assert leases.counts.late == {"landed": 1}
    receiver.let_go()
    await settle()
    assert leases.blocks.find(lease.block_hashes) == []  # what did not land is never shared


async def test_a_fence_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_worker.leases.FENCE_RETRY_S", 0.0)
    leases, receiver, _, _ = table()
    receiver.fail_fences = 2
    leases.finish(to_state(leases, LeaseState.WRITING, Router()), "cancelled")
    await settle()
    await settle()
    assert leases.counts.fence_errors == 2
    assert leases.blocks.available == 16


# ---- prefixes


async def test_blocks_are_shared_once_their_kv_has_landed() -> None:
    leases, _, _, _ = table()
    first = to_state(leases, LeaseState.WRITING, Router(), "a")
    early = leases.reserve(Router(), reserve("b", PROMPT))
    assert early.resident_tokens == 0
    leases.land(leases.written(first.id))
    late = leases.reserve(Router(), reserve("c", PROMPT))
    assert late.resident_tokens == 2 * BLOCK
    assert list(late.block_ids[:2]) == first.blocks[:2]
    assert late.block_ids[2] != first.blocks[2]
    leases.finish(first, "stop")
    after = leases.reserve(Router(), reserve("d", PROMPT[:40]))
    assert after.resident_tokens == BLOCK


async def test_a_request_without_hashes_shares_nothing() -> None:
    leases, _, _, _ = table()
    lease = leases.get(leases.reserve(Router(), reserve("a", PROMPT, shared=False)).id)
    leases.land(leases.written(lease.id))
    assert leases.blocks.resident() == []


# ---- admission


@pytest.mark.parametrize(("prompt", "max_tokens"), [(400, 113), (500, 13)])
async def test_what_exceeds_the_context_is_refused_for_good(prompt: int, max_tokens: int) -> None:
    leases, _, _, _ = table(64)
    with pytest.raises(ContextLengthExceeded, match="context of 512 tokens"):
        leases.reserve(Router(), reserve("r", list(range(prompt)), max_tokens))
    leases.reserve(Router(), reserve("r", list(range(prompt)), max_tokens - 1))


async def test_what_can_never_fit_the_pool_is_refused_for_good() -> None:
    leases, _, _, _ = table(4)
    with pytest.raises(ContextLengthExceeded, match="need 5 KV blocks, the decode worker's pool has 4"):
        leases.reserve(Router(), reserve("r", PROMPT, 4 * BLOCK - 70 + 2))
    leases.reserve(Router(), reserve("r", PROMPT, 4 * BLOCK - 70 + 1))


async def test_no_room_now_is_overloaded_and_holds_nothing() -> None:
    leases, receiver, _, _ = table(4)
    lease = leases.reserve(Router(), reserve("a", PROMPT))
    with pytest.raises(Overloaded, match="3 KV blocks needed, 1 of 4"):
        leases.reserve(Router(), reserve("b", list(range(100, 170))))
    assert leases.blocks.available == 1
    assert list(receiver.open) == [lease.id]


async def test_the_watermark_leaves_room_to_grow_but_not_on_an_idle_pool() -> None:
    leases, _, _, _ = table(8, limits=LeaseLimits(watermark=0.5))
    assert leases.admissible == 8
    leases.reserve(Router(), reserve("a", list(range(5 * BLOCK))))
    assert leases.admissible == 0
    with pytest.raises(Overloaded):
        leases.reserve(Router(), reserve("b", [1, 2]))


async def test_each_running_request_keeps_one_block_to_grow_into() -> None:
    leases, _, _, _ = table(8)
    for name in "ab":
        to_state(leases, LeaseState.DECODING, Router(), name)
    assert leases.blocks.available == 4  # b shares a's two full blocks
    assert leases.admissible == 2


async def test_an_unconnected_writer_is_refused_and_holds_nothing() -> None:
    leases, _, _, _ = table()
    with pytest.raises(WorkerLost):
        leases.reserve(Router(), reserve("r", PROMPT, writer=Writer(worker="p0", generation="older")))
    assert leases.blocks.available == 16
    assert len(leases) == 0


async def test_full_staging_is_overloaded_and_comes_back() -> None:
    leases, _, _, _ = table(staging=StagingArea(4096), staging_room=lambda tokens, resident: (2, 32 * tokens))
    router = Router()
    first = leases.reserve(router, reserve("a", list(range(40))))
    assert (first.staging_offset, first.staging_slots, first.staging_slot_bytes) == (0, 2, 32 * 40)
    with pytest.raises(Overloaded, match="staging buffer full"):
        leases.reserve(router, reserve("b", list(range(40))))
    assert leases.blocks.held == len(first.block_ids)
    leases.land(leases.written(first.id))
    second = leases.reserve(router, reserve("b", list(range(40))))
    leases.finish(leases.get(second.id), "cancelled")
    await settle()
    assert leases._staging.free == 4096


async def test_case_m6_one_token_is_never_reserved_for() -> None:
    leases, _, _, _ = table()
    with pytest.raises(InvalidRequest, match="at least 2"):
        leases.reserve(Router(), reserve("r", PROMPT, 1))


async def test_hashes_that_do_not_fit_the_prompt_are_a_protocol_error() -> None:
    leases, _, _, _ = table()
    with pytest.raises(ProtocolError, match="2 block hashes and 6 tail tokens"):
        leases.reserve(Router(), reserve("r", PROMPT).model_copy(update={"tail_tokens": (1,)}))


async def test_a_second_reservation_of_a_live_request_ends_both() -> None:
    leases, _, _, _ = table()
    router = Router()
    to_state(leases, LeaseState.WRITING, router)
    with pytest.raises(ProtocolError, match="had a lease already"):
        leases.reserve(router, reserve("r", PROMPT))
    await settle()
    assert leases.blocks.available == 16


async def test_the_victim_is_the_latest_of_those_preempted_least() -> None:
    leases, _, _, _ = table(32)
    router = Router()
    assert leases.victim() is None
    first = to_state(leases, LeaseState.DECODING, router, "first")
    second = to_state(leases, LeaseState.LANDED, router, "second")
    to_state(leases, LeaseState.WRITING, router, "not landed")
    back = leases.get(leases.reserve(router, reserve("back", PROMPT, preemptions=1)).id)
    leases.land(leases.written(back.id))
    order = []
    while victim := leases.victim():
        order.append(victim)
        leases.finish(victim, "preempted")
    assert order == [second, first, back]


async def test_a_preempted_request_comes_back_when_there_is_room_for_all_of_it() -> None:
    leases, _, _, _ = table(8)
    other = to_state(leases, LeaseState.DECODING, Router(), "other")
    text, tokens = list(range(100, 170)), 6 * BLOCK - 70 + 1  # three blocks now, six in the end
    again = reserve("r.1", text, tokens, preemptions=1)
    with pytest.raises(Overloaded, match="6 KV blocks needed, 4 of 8"):
        leases.reserve(Router(), again)
    leases.reserve(Router(), reserve("new", text, tokens))
    leases.finish(leases.victim(), "stop")
    assert other.state is LeaseState.FREED
    leases.close_owner(leases.live()[0].owner)
    await settle()
    leases.reserve(Router(), again)
