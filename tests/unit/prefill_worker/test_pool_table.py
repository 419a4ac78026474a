"""Several routers and one decode worker's pool: none may take it from another."""

from __future__ import annotations

from typing import Any

import pytest
from prefill_fakes import FakeSession, lease_of, pool_of

from prefill_worker.pool_table import PoolTable, check_lease
from transport.errors import InvalidRequest, StaleGeneration, UnknownPool
from transport.messages import ClosePool, ErrorInfo, OpenPool, PoolOpened, PoolRefused, Region

OPENED = PoolOpened(worker="d0", generation="g0")


def refused(generation: str) -> PoolRefused:
    return PoolRefused(worker="d0", generation=generation, error=ErrorInfo(code="stale_generation", message="no"))


def table_with_an_open_pool() -> tuple[PoolTable, list[Any], Any]:
    sent: list[Any] = []
    table, session = PoolTable(sent.append), FakeSession()
    table.ask(session, pool_of())
    table.answer(OPENED)
    return table, sent, session


async def test_a_router_behind_the_times_takes_nothing_from_the_others() -> None:
    table, sent, session = table_with_an_open_pool()
    late: Any = FakeSession(2)
    table.ask(late, pool_of(generation="old"))
    table.check(lease_of(100), 100)
    table.answer(refused("old"))
    table.check(lease_of(100), 100)
    assert late.sent == [refused("old")]
    assert session.sent == [OPENED]
    table.leave_all(late)
    assert sent == [OpenPool(pool=pool_of()), OpenPool(pool=pool_of(generation="old"))]
    with pytest.raises(StaleGeneration, match="the open one is g0"):
        table.check(lease_of(100, generation="old"), 100)


async def test_a_new_generation_takes_the_place_once_it_is_open() -> None:
    table, sent, session = table_with_an_open_pool()
    other: Any = FakeSession(2)
    table.ask(other, pool_of(generation="g1"))
    with pytest.raises(StaleGeneration, match="the open one is g0"):
        table.check(lease_of(100, generation="g1"), 100)
    table.answer(PoolOpened(worker="d0", generation="g1"))
    assert [message.generation for message in session.sent] == ["g0", "g0"]
    assert session.sent[1].error.code == StaleGeneration.code
    table.check(lease_of(100, generation="g1"), 100)
    with pytest.raises(StaleGeneration, match="the open one is g1"):
        table.check(lease_of(100), 100)
    assert table.open_count == 1
    table.leave(session, "d0", "g0")
    assert not [message for message in sent if isinstance(message, ClosePool)]
    table.leave(other, "d0", "g1")
    assert sent[-1] == ClosePool(worker="d0", generation="g1")
    with pytest.raises(UnknownPool):
        table.check(lease_of(100, generation="g1"), 100)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"staging_offset": None}, "staging_offset does not go with kv_path host"),
        ({"staging_slots": 0}, "0 slots of 8192 bytes at 4096"),
        ({"staging_offset": 40961}, "are not in a staging region of 65536 bytes"),
    ],
)
def test_a_lease_whose_slots_are_not_in_the_staging_region_is_refused(changes: dict[str, Any], words: str) -> None:
    pool = pool_of(kv_path="host", staging=Region(address=0, rkey=0, length=65536), staging_dtype="float32")
    slots = {"staging_offset": 4096, "staging_slots": 3, "staging_slot_bytes": 8192}
    check_lease(lease_of(100, **slots), pool, 100)
    check_lease(lease_of(100, **slots | {"staging_offset": 40960}), pool, 100)
    with pytest.raises(InvalidRequest, match=words):
        check_lease(lease_of(100, **slots | changes), pool, 100)
