"""The service's side of each request: answers, refusals, cancellation in every phase, and what the engine says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prefill_fakes import MODEL, WRITER, FakeControl, FakeEngine, FakeSession, lease_of, pool_of, settle
from prometheus_client import CollectorRegistry

from prefill_worker.control.messages import Held
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.sampling import Sampled
from prefill_worker.service import PrefillService
from transport.errors import EngineFailed, HawkError, InvalidRequest, PushFailed
from transport.messages import (
    Cancel,
    ClosePool,
    Decode,
    ErrorInfo,
    Failed,
    Logprob,
    Message,
    OpenPool,
    Ping,
    PoolOpened,
    PoolRefused,
    Prefill,
    Prefilled,
    Pushed,
    Sampling,
)

TOKEN = Sampled(7, None, None, 0, {"queue": 0.5, "prefill": 0.25})
ENDED = Sampled(2, None, "stop", 0)


class Rig:
    def __init__(self, max_queued: int = 8, stall_s: float = 60) -> None:
        self.engine = FakeEngine()
        self.control = FakeControl()
        self.registry = CollectorRegistry()
        self.service = PrefillService(
            WRITER,
            MODEL,
            self.engine,
            self.control,
            PrefillMetrics(self.registry),
            max_queued=max_queued,
            stall_s=stall_s,
        )
        self.session = FakeSession()

    async def send(self, message: Message, session: FakeSession | None = None) -> None:
        await self.service.on_message(session or self.session, message)  # type: ignore[arg-type]
        await settle()

    async def open_pool(self, **changes: Any) -> None:
        pool = pool_of(**changes)
        await self.send(OpenPool(pool=pool))
        self.service.on_engine_message(PoolOpened(worker=pool.worker, generation=pool.generation))

    async def begin(self, request_id: str = "q", *, hand_over: bool = True, tokens: int = 100, **sampling: Any) -> None:
        options = {"max_tokens": 16} | sampling
        lease = lease_of(tokens) if hand_over else None
        await self.send(
            Prefill(request_id=request_id, token_ids=(5,) * tokens, sampling=Sampling(**options), lease=lease)
        )

    async def sampled(self, sampled: Sampled | Exception, index: int = -1) -> None:
        if isinstance(sampled, Exception):
            self.engine.results[index].set_exception(sampled)
        else:
            self.engine.results[index].set_result(sampled)
        await settle()

    def pushed(self, transfer_id: str = "t1") -> None:
        self.service.on_engine_message(Pushed(request_id=transfer_id, lease_id="l0", bytes=64, seconds=0.5))

    def push_failed(self, transfer_id: str = "t1") -> None:
        error = ErrorInfo.of(PushFailed("the peer is gone"))
        self.service.on_engine_message(Failed(request_id=transfer_id, error=error))

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"hawk_prefill_{name}", labels) or 0.0

    @property
    def sent(self) -> list[Message]:
        return [m for m in self.session.sent if not isinstance(m, PoolOpened)]

    @property
    def cancels(self) -> list[str]:
        return [m.request_id for m in self.control.sent if isinstance(m, Cancel)]

    def assert_nothing_left(self) -> None:
        status = self.service.status()
        assert (status.running, status.outstanding_tokens) == (0, 0)
        assert self.metric("pushing_requests") == 0
        assert self.service._transfers == {}


@pytest.fixture
async def rig() -> Rig:
    rig = Rig()
    await rig.open_pool()
    return rig


# ---- the usual way


async def test_first_token_then_acknowledgement(rig: Rig) -> None:
    await rig.begin()
    _, tokens, _, handover = rig.engine.calls[0]
    assert len(tokens) == 100
    assert handover is not None
    assert handover.lease.id == "l0"
    assert rig.service.status().outstanding_tokens == 100
    await rig.sampled(TOKEN)
    assert rig.service.status().outstanding_tokens == 0
    assert rig.sent == [Prefilled(request_id="q", token_ids=(7,), timings=TOKEN.timings)]
    rig.pushed(handover.transfer_id)
    assert rig.sent[1] == Pushed(request_id="q", lease_id="l0", bytes=64, seconds=0.5)
    assert (rig.metric("pushes_total"), rig.metric("pushed_bytes_total")) == (1, 64)
    rig.assert_nothing_left()


async def test_an_acknowledgement_that_overtakes_the_token_waits_for_it(rig: Rig) -> None:
    await rig.begin()
    rig.pushed()
    assert rig.sent == []
    await rig.sampled(TOKEN)
    assert [type(m) for m in rig.sent] == [Prefilled, Pushed]
    rig.assert_nothing_left()


async def test_case_13_a_request_without_a_lease_ends_with_its_token(rig: Rig) -> None:
    await rig.begin(hand_over=False, max_tokens=1)
    assert rig.engine.calls[0][3] is None
    await rig.sampled(Sampled(7, None, "length", 0))
    assert [type(m) for m in rig.sent] == [Prefilled]
    rig.assert_nothing_left()


async def test_a_lease_for_a_single_token_is_not_written(rig: Rig) -> None:
    await rig.begin(max_tokens=1)
    assert rig.engine.calls[0][3] is None


async def test_case_42_a_first_token_that_ends_the_request_hands_nothing_over(rig: Rig) -> None:
    await rig.begin()
    await rig.sampled(ENDED)
    assert rig.sent == [Prefilled(request_id="q", token_ids=(2,), finish_reason="stop")]
    rig.assert_nothing_left()
    rig.pushed()  # the connector gives the push up; were it faster, nobody is confused
    assert len(rig.sent) == 1


async def test_logprobs_and_cached_tokens_reach_the_router(rig: Rig) -> None:
    await rig.begin()
    logprobs = (Logprob(token=7, logprob=-0.1, top=((7, -0.1), (8, -2.0))),)
    await rig.sampled(Sampled(7, logprobs, None, 64))
    (prefilled,) = rig.sent
    assert isinstance(prefilled, Prefilled)
    assert (prefilled.logprobs, prefilled.cached_tokens) == (logprobs, 64)
    assert rig.metric("cached_tokens_total") == 64


async def test_the_same_request_id_from_two_routers_is_two_requests(rig: Rig) -> None:
    other = FakeSession(2, "r1")
    await rig.begin()
    await rig.send(
        Prefill(request_id="q", token_ids=(1,), sampling=Sampling(max_tokens=1)),
        other,
    )
    await rig.sampled(Sampled(9, None, "length", 0))
    assert [type(m) for m in other.sent] == [Prefilled]
    assert rig.sent == []


async def test_a_request_can_come_again_after_it_ended(rig: Rig) -> None:
    for _ in range(2):
        await rig.begin()
        await rig.sampled(ENDED)
    assert [call[0] for call in rig.engine.calls] == ["t1", "t2"]


# ---- refusals, before any work is done


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"token_ids": ()}, "invalid_request", "empty"),
        ({"token_ids": (5,) * 512}, "context_length_exceeded", "512 tokens.*511"),
        ({"token_ids": (5, 1000)}, "invalid_request", "1000 is outside the vocabulary of 1000"),
        (
            {"sampling": Sampling(max_tokens=4, stop_token_ids=(4000,))},
            "invalid_request",
            "stop_token_ids: token id 4000",
        ),
        ({"lease": lease_of(100, worker="d7")}, "unknown_pool", "d7"),
        ({"lease": lease_of(100, generation="old")}, "stale_generation", "generation old of d0, the open one is g0"),
        ({"lease": lease_of(99)}, "invalid_request", "for 99 tokens, the prompt has 100"),
        ({"lease": lease_of(100, block_ids=(1, 2, 3))}, "invalid_request", "3 blocks of 32"),
        ({"lease": lease_of(100, block_ids=(1, 2, 3, 32))}, "invalid_request", "pool of 32"),
        ({"lease": lease_of(100, block_ids=(1, 2, 3, 1))}, "invalid_request", "distinct"),
        ({"lease": lease_of(100, resident_tokens=33)}, "invalid_request", "33 resident"),
        ({"lease": lease_of(100, resident_tokens=128)}, "invalid_request", "128 resident"),
        ({"lease": lease_of(100, staging_offset=0)}, "invalid_request", "kv_path hawk"),
    ],
)
async def test_case_51_what_is_wrong_is_refused_with_the_reason(
    rig: Rig, fields: dict[str, Any], code: str, words: str
) -> None:
    values = {"token_ids": (5,) * 100, "sampling": Sampling(max_tokens=4), "lease": None} | fields
    with pytest.raises(HawkError, match=words) as caught:
        await rig.send(Prefill(request_id="q", **values))
    assert caught.value.code == code
    assert rig.engine.calls == []
    assert rig.metric("failures_total", code=code) == 1
    rig.assert_nothing_left()


async def test_a_running_request_id_is_refused(rig: Rig) -> None:
    await rig.begin()
    with pytest.raises(HawkError, match="already running"):
        await rig.begin()
    await rig.sampled(TOKEN)
    assert [type(m) for m in rig.sent] == [Prefilled]


async def test_a_full_queue_is_an_overload() -> None:
    rig = Rig(max_queued=1)
    await rig.begin("a", hand_over=False)
    with pytest.raises(HawkError) as caught:
        await rig.begin("b", hand_over=False)
    assert caught.value.code == "overloaded"
    await rig.sampled(ENDED)
    await rig.begin("c", hand_over=False)


async def test_case_51_what_the_engine_refuses_stays_the_clients_fault(rig: Rig) -> None:
    await rig.begin()
    await rig.sampled(InvalidRequest("bad logprobs"))
    (failed,) = rig.sent
    assert isinstance(failed, Failed)
    assert failed.error.code == "invalid_request"
    rig.assert_nothing_left()


async def test_messages_for_other_roles_are_refused(rig: Rig) -> None:
    with pytest.raises(HawkError, match="Decode"):
        await rig.send(Decode(request_id="q", lease_id="l", token_id=1, generated=1, sampling=Sampling(max_tokens=2)))
    await rig.send(Ping(seq=1))


# ---- cancellation


async def test_case_11_cancelled_in_the_engine(rig: Rig) -> None:
    await rig.begin()
    await rig.send(Cancel(request_id="q", reason="client gone"))
    assert rig.engine.cancelled == ["t1"]
    assert rig.cancels == ["t1"]
    assert rig.sent == []
    assert rig.metric("aborts_total") == 1
    rig.assert_nothing_left()


async def test_case_02_cancelled_between_prefill_and_acknowledgement(rig: Rig) -> None:
    await rig.begin()
    await rig.sampled(TOKEN)
    await rig.send(Cancel(request_id="q"))
    assert rig.cancels == ["t1"]
    rig.assert_nothing_left()


async def test_case_05_late_news_of_a_cancelled_request_is_counted(rig: Rig) -> None:
    await rig.begin()
    await rig.sampled(TOKEN)
    await rig.send(Cancel(request_id="q"))
    rig.pushed()
    assert [type(m) for m in rig.sent] == [Prefilled]
    assert rig.metric("unknown_messages_total", message="Pushed") == 1
    await rig.send(Cancel(request_id="q"))
    assert rig.metric("unknown_messages_total", message="Cancel") == 1


async def test_a_router_that_leaves_takes_only_its_own_along(rig: Rig) -> None:
    other = FakeSession(2, "r1")
    await rig.begin("a")
    await rig.send(Prefill(request_id="b", token_ids=(1,), sampling=Sampling(max_tokens=1)), other)
    await rig.begin("c", hand_over=False)
    await rig.sampled(TOKEN, 0)
    await rig.service.on_close(rig.session)  # type: ignore[arg-type]
    await settle()
    assert rig.engine.cancelled == ["t3"]
    assert rig.cancels == ["t1"]
    await rig.sampled(Sampled(9, None, "length", 0), 1)
    assert [type(m) for m in other.sent] == [Prefilled]
    rig.assert_nothing_left()


# ---- failures


@pytest.mark.parametrize("prefilled", [False, True])
async def test_case_22_a_failed_push_is_said_and_ends_the_request(rig: Rig, prefilled: bool) -> None:
    await rig.begin()
    if prefilled:
        await rig.sampled(TOKEN)
    rig.push_failed()
    await settle()
    failed = rig.sent[-1]
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.error.code) == ("q", "push_failed")
    assert "the peer is gone" in failed.error.message
    assert rig.engine.cancelled == ([] if prefilled else ["t1"])
    assert rig.metric("push_failures_total", code="push_failed") == 1
    rig.assert_nothing_left()


async def test_case_53_a_dying_engine_fails_its_requests(rig: Rig) -> None:
    await rig.begin("a")
    await rig.begin("b", hand_over=False)
    await rig.sampled(TOKEN, 0)
    rig.service.engine_lost("killed")
    rig.service.engine_lost("noticed twice")
    await settle()
    failures = {m.request_id: m.error.code for m in rig.sent if isinstance(m, Failed)}
    assert failures == {"a": "engine_failed", "b": "engine_failed"}
    assert rig.service.failed.is_set()
    assert not rig.service.status().ready
    assert "killed" in (rig.service.unready_reason() or "")
    with pytest.raises(EngineFailed):
        await rig.begin("c", hand_over=False)


async def test_case_64_not_ready_once_the_engine_is_errored(rig: Rig) -> None:
    assert rig.service.unready_reason() is None
    rig.engine.failed = True
    assert rig.service.unready_reason() is not None


async def test_case_64_not_ready_while_the_engine_hangs() -> None:
    rig = Rig(stall_s=0.05)
    await asyncio.sleep(0.1)
    assert rig.service.unready_reason() is None  # idle engines are silent
    await rig.begin(hand_over=False)
    assert rig.service.unready_reason() is None
    await asyncio.sleep(0.1)
    assert "no step" in (rig.service.unready_reason() or "")
    assert not rig.service.status().ready
    rig.service.on_engine_message(Held(requests=0, blocks=0))
    assert rig.service.unready_reason() is None


# ---- drain


async def test_case_26_draining_refuses_new_work_and_finishes_the_old(rig: Rig) -> None:
    await rig.begin("a")
    draining = asyncio.create_task(rig.service.drain())
    await settle()
    with pytest.raises(HawkError) as caught:
        await rig.begin("b")
    assert caught.value.code == "overloaded"
    assert rig.service.status().draining
    await rig.sampled(TOKEN)
    assert not draining.done()  # its push still runs
    rig.pushed()
    await settle()
    assert draining.done()
    assert [type(m) for m in rig.sent] == [Prefilled, Pushed]


# ---- pools


async def test_several_routers_share_one_opening() -> None:
    rig, other = Rig(), FakeSession(2, "r1")
    await rig.send(OpenPool(pool=pool_of()))
    await rig.send(OpenPool(pool=pool_of()), other)
    assert len(rig.control.sent) == 1
    opened = PoolOpened(worker="d0", generation="g0")
    rig.service.on_engine_message(opened)
    assert (rig.session.sent, other.sent) == ([opened], [opened])
    third = FakeSession(3, "r2")
    await rig.send(OpenPool(pool=pool_of()), third)
    assert third.sent == [opened]
    assert rig.metric("open_pools") == 1

    await rig.send(ClosePool(worker="d0", generation="g0"))
    await rig.service.on_close(other)  # type: ignore[arg-type]
    assert len(rig.control.sent) == 1
    await rig.service.on_close(third)  # type: ignore[arg-type]
    assert rig.control.sent[-1] == ClosePool(worker="d0", generation="g0")
    assert rig.metric("open_pools") == 0


async def test_no_lease_of_a_pool_that_is_still_being_opened() -> None:
    rig = Rig()
    await rig.send(OpenPool(pool=pool_of()))
    with pytest.raises(HawkError, match="not open"):
        await rig.begin()


async def test_case_19_a_refused_or_lost_pool_takes_no_more_leases(rig: Rig) -> None:
    refused = PoolRefused(worker="d0", generation="g0", error=ErrorInfo.of(PushFailed("gone")))
    rig.service.on_engine_message(refused)
    assert rig.session.sent[-1] == refused
    with pytest.raises(HawkError, match="not open"):
        await rig.begin()
    rig.service.on_engine_message(refused)
    assert rig.session.sent.count(refused) == 1


async def test_case_18_a_restarted_decode_worker_is_opened_anew(rig: Rig) -> None:
    await rig.open_pool(generation="g1")
    with pytest.raises(HawkError) as caught:
        await rig.begin()
    assert caught.value.code == "stale_generation"
    refused = PoolRefused(worker="d0", generation="g0", error=ErrorInfo.of(PushFailed("late news of g0")))
    rig.service.on_engine_message(refused)
    lease = lease_of(100, generation="g1")
    await rig.send(Prefill(request_id="n", token_ids=(5,) * 100, sampling=Sampling(max_tokens=4), lease=lease))
    assert len(rig.engine.calls) == 1


async def test_held_blocks_are_shown(rig: Rig) -> None:
    rig.service.on_engine_message(Held(requests=2, blocks=9))
    assert (rig.metric("held_requests"), rig.metric("held_blocks")) == (2, 9)


async def test_hello_says_who_and_what(rig: Rig) -> None:
    hello = rig.service.hello()
    assert (hello.role, hello.worker, hello.generation, hello.model) == ("prefill", "p0", "g", MODEL)
    assert hello.status.ready
