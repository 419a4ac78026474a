"""Workers that fail, die, are full or come back: what the client sees, and that nothing stays held."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from router_fleet import Fleet, finish_of, sse, text_of

from transport.errors import (
    ChecksumMismatch,
    ContextLengthExceeded,
    EngineFailed,
    GeometryMismatch,
    LeaseExpired,
    Overloaded,
    PushFailed,
    UnknownPool,
)
from transport.messages import Cancel, ClosePool, Decode, OpenPool, Prefill, Reserve
from transport.testing import fake_model


async def stream_until(fleet: Fleet, events: int, **fields: Any) -> tuple[asyncio.Task[list[Any]], list[Any]]:
    """A stream read in the background: (task of all its events, the events so far, at least that many)."""
    seen: list[Any] = []

    async def read() -> list[Any]:
        body = fleet.body("say a", stream=True, **fields)
        async with fleet.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for event in sse(response):
                seen.append(event)
        return seen

    task = asyncio.create_task(read())
    await fleet.until(lambda: len(seen) >= events)
    return task, seen


# ---- prefill


async def test_case_51_a_refusal_by_prefill_stays_that_4xx_and_is_not_retried(fleet: Fleet) -> None:
    await fleet.start()
    for stream in (False, True):
        fleet.prefill[0].failures.append(ContextLengthExceeded("513 tokens are too many", param="prompt"))
        response = await fleet.complete(stream=stream)
        assert response.status_code == 400
        assert response.json()["error"] == {
            "message": "513 tokens are too many",
            "type": "invalid_request_error",
            "code": "context_length_exceeded",
            "param": "prompt",
        }
    assert len(fleet.prefill[0].seen(Prefill)) == 2
    await fleet.until_idle()


async def test_case_54_client_errors_do_not_count_against_a_worker(fleet: Fleet) -> None:
    await fleet.start()
    worker = fleet.router.registry.prefill[0]
    for _ in range(5):
        fleet.prefill[0].failures.append(ContextLengthExceeded("too long"))
        assert (await fleet.complete()).status_code == 400
    assert (worker.failures, worker.cooling) == (0, False)
    fleet.prefill[0].failures.append(EngineFailed("crashed"))
    assert (await fleet.complete()).status_code == 200
    assert await fleet.metric("hawk_router_retries_total", code="engine_failed") == 1


async def test_case_17_a_failed_prefill_is_an_error_and_decode_is_told(fleet: Fleet) -> None:
    """Each try in vain gives its lease back; when the budget is spent, the client gets the real error."""
    await fleet.start(max_retries=1)
    fleet.prefill[0].failures.extend([EngineFailed("out of memory")] * 2)
    response = await fleet.complete()
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "out of memory"
    cancelled = await fleet.decode[0].until_seen(Cancel, 2)
    assert [c.request_id for c in cancelled] == [r.request_id for r in fleet.decode[0].seen(Reserve)]
    await fleet.until_idle()


async def test_case_53_a_failed_prefill_of_a_stream_is_an_http_error(fleet: Fleet) -> None:
    """Not a 200 with finish_reason length."""
    await fleet.start(max_retries=0)
    fleet.prefill[0].failures.append(EngineFailed("aborted"))
    response = await fleet.complete(stream=True)
    assert response.status_code == 500
    assert response.headers["content-type"] == "application/json"


async def test_retry_goes_to_another_prefill_worker(fleet: Fleet) -> None:
    fleet.add_prefill()
    await fleet.start()
    fleet.prefill[0].failures.extend([EngineFailed("broken")] * 10)
    for _ in range(4):
        response = await fleet.complete()
        assert (response.status_code, response.json()["choices"][0]["text"]) == (200, "bcde")
    assert 1 <= len(fleet.prefill[0].seen(Prefill)) <= 2, "a worker that just failed is avoided"
    await fleet.until_idle()


async def test_case_16_prefill_dies_before_its_token(fleet: Fleet) -> None:
    """D's lease is dropped at once, and another P serves the request."""
    fleet.prefill[0].gate.clear()
    await fleet.start()
    task = asyncio.create_task(fleet.complete())
    await fleet.prefill[0].until_seen(Prefill)
    other = fleet.add_prefill()
    fleet.router.registry.add("prefill", fleet.hosts[other].url)
    await fleet.until(fleet.all_open)
    await fleet.hosts[fleet.prefill[0]].kill()
    response = await task
    assert (response.status_code, response.json()["choices"][0]["text"]) == (200, "bcde")
    assert len(fleet.decode[0].seen(Cancel)) == 1
    fleet.prefill[0].held.clear()
    await fleet.until_idle()


async def test_case_18_a_restarted_prefill_worker_is_used_again(fleet: Fleet) -> None:
    await fleet.start()
    await fleet.hosts[fleet.prefill[0]].kill()
    await fleet.until(lambda: fleet.router.registry.not_ready() is not None)
    assert (await fleet.complete()).status_code == 503
    fresh = fleet.restart(fleet.prefill[0])
    await fleet.until(lambda: fleet.router.registry.not_ready() is None)
    assert (await fleet.complete()).status_code == 200
    assert [o.pool.worker for o in fresh.seen(OpenPool)] == ["d0"]
    assert len(fresh.seen(Prefill)) == 1


# ---- decode


async def test_case_52_no_200_before_decode_has_committed(fleet: Fleet) -> None:
    """A refused reservation is a plain HTTP error, for streams too, and P was never asked."""
    await fleet.start(max_retries=0)
    fleet.decode[0].failures.append(EngineFailed("decode is broken"))
    response = await fleet.complete(stream=True)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_failed")
    assert fleet.prefill[0].seen(Prefill) == []
    await fleet.until_idle()


async def test_case_m5_decode_gives_up_while_prefill_works(fleet: Fleet) -> None:
    """P's blocks are released at once: it is told to drop the request, and the next try succeeds."""
    fleet.prefill[0].gate.clear()
    await fleet.start()
    task = asyncio.create_task(fleet.complete())
    [prefill] = await fleet.prefill[0].until_seen(Prefill)
    await fleet.decode[0].fail(prefill.request_id, LeaseExpired("not used in time"))
    [cancel] = await fleet.prefill[0].until_seen(Cancel)
    assert cancel.request_id == prefill.request_id
    fleet.prefill[0].gate.set()
    assert (await task).json()["choices"][0]["text"] == "bcde"
    await fleet.until_idle()


async def test_case_15_decode_dies_while_prefill_works(fleet: Fleet) -> None:
    """P's leg is cancelled at once instead of waiting for a time-out; the error is one that clients retry."""
    fleet.prefill[0].gate.clear()
    await fleet.start()
    task = asyncio.create_task(fleet.complete(stream=True))
    await fleet.prefill[0].until_seen(Prefill)
    await fleet.hosts[fleet.decode[0]].kill()
    await fleet.prefill[0].until_seen(Cancel)
    response = await task
    assert response.status_code in (502, 503)
    await fleet.prefill[0].until_free()


async def test_case_m8_decode_dies_in_mid_stream(fleet: Fleet) -> None:
    """An SSE error event now, then the end: no finish_reason, no [DONE]."""
    fleet.decode[0].steps.clear()
    await fleet.start()
    task, _ = await stream_until(fleet, 1)
    await fleet.decode[0].until(lambda: bool(fleet.decode[0].rows))
    await fleet.hosts[fleet.decode[0]].kill()
    events = await asyncio.wait_for(task, 5)
    assert events[-1]["error"]["code"] == "worker_lost"
    assert text_of(events) == "b"
    assert finish_of(events) == []
    assert "[DONE]" not in events
    assert await fleet.metric("hawk_router_errors_total", code="worker_lost") == 1


async def test_case_m4_a_dead_decode_worker_costs_whole_answers_one_more_prefill(fleet: Fleet) -> None:
    """An answer that the client has seen nothing of starts anew on the other worker."""
    other = fleet.add_decode()
    for worker in fleet.decode:
        worker.steps.clear()
    await fleet.start()
    tasks = [asyncio.create_task(fleet.complete()) for _ in range(4)]
    await fleet.until(lambda: sum(len(d.rows) for d in fleet.decode) == 4)
    await fleet.hosts[fleet.decode[0]].kill()
    other.steps.set()
    responses = await asyncio.gather(*tasks)
    assert [r.json()["choices"][0]["text"] for r in responses] == ["bcde"] * 4
    assert [r.json()["usage"]["completion_tokens"] for r in responses] == [4] * 4
    assert len(fleet.prefill[0].seen(Prefill)) <= 8


@pytest.mark.parametrize("stream", [False, True])
async def test_case_22_a_failed_push_is_said(fleet: Fleet, stream: bool) -> None:
    """After the first token a stream ends with the error; a whole answer is tried again."""
    fleet.decode[0].steps.clear()
    await fleet.start()
    fleet.prefill[0].push_failures.append(PushFailed("the wire broke"))
    if stream:
        task, _ = await stream_until(fleet, 1)
        events = await asyncio.wait_for(task, 5)
        assert events[-1]["error"]["message"] == "the wire broke"
    else:
        task = asyncio.create_task(fleet.complete())  # type: ignore[arg-type]
        await fleet.decode[0].until_seen(Decode, 2)
        fleet.decode[0].steps.set()
        response: Any = await task
        assert response.json()["choices"][0]["text"] == "bcde"
    await fleet.decode[0].until_seen(Cancel)
    fleet.decode[0].steps.set()
    await fleet.until_idle()


@pytest.mark.parametrize("corrupted", [1, 2, 3])
async def test_case_35_a_checksum_mismatch_is_tried_again_within_the_budget(fleet: Fleet, corrupted: int) -> None:
    """Decode reports it where its first token would come: the whole answer is right, or it is that error."""
    await fleet.start(max_retries=2)
    fleet.decode[0].steps.clear()
    task: asyncio.Task[Any] = asyncio.create_task(fleet.complete())  # type: ignore[arg-type]
    for number in range(1, corrupted + 1):
        decode = (await fleet.decode[0].until_seen(Decode, number))[-1]
        await fleet.decode[0].fail(decode.request_id, ChecksumMismatch("channel 3 does not hold what p0 sent"))
    fleet.decode[0].steps.set()
    response = await task
    if corrupted <= 2:
        assert (response.status_code, response.json()["choices"][0]["text"]) == (200, "bcde")
        assert response.json()["usage"]["completion_tokens"] == 4
    else:
        assert response.status_code == 502
        assert list(response.json()) == ["error"]
        assert response.json()["error"]["code"] == "checksum_mismatch"
    tries = min(corrupted, 2) + 1
    assert await fleet.metric("hawk_router_retries_total", code="checksum_mismatch") == tries - 1
    assert len({p.request_id for p in fleet.prefill[0].seen(Prefill)}) == tries
    assert len(fleet.decode[0].seen(Reserve)) == tries
    await fleet.until_idle()


async def test_case_20_a_restarted_decode_worker_poisons_nobody_and_is_used_again(fleet: Fleet) -> None:
    """One of two goes down and comes back, again and again, under load: each answer is whole or says an error."""
    fleet.add_decode()
    await fleet.start()
    for turn in range(3):
        first = fleet.decode[turn % 2]
        first.steps.clear()
        tasks = [asyncio.create_task(fleet.complete(stream=turn == 1)) for _ in range(6)]  # type: ignore[arg-type]
        await first.until_seen(Decode, 1)
        await fleet.hosts[first].kill()
        for response in await asyncio.gather(*tasks):
            assert response.status_code == 200
            events = [json.loads(line[5:]) for line in response.text.splitlines() if line.startswith("data: {")]
            if turn != 1:
                assert response.json()["choices"][0]["text"] == "bcde"
            else:
                said = "".join(c.get("text", "") for e in events for c in e.get("choices", ()))
                failed = any("error" in event for event in events)
                assert said == "bcde" or (failed and "bcde".startswith(said))
        fresh = fleet.restart(first)
        await fleet.until(fleet.all_open)
        before = len(fresh.seen(Reserve))
        answers = await asyncio.gather(*(fleet.complete() for _ in range(4)))
        assert [r.json()["choices"][0]["text"] for r in answers] == ["bcde"] * 4
        assert len(fresh.seen(Reserve)) > before, "it is not used again"
    await fleet.until_idle()


async def test_case_m3_ready_turns_503_when_decode_is_gone(fleet: Fleet) -> None:
    await fleet.start()
    assert (await fleet.http.get("/ready")).status_code == 200
    await fleet.hosts[fleet.decode[0]].kill()
    await fleet.until(lambda: fleet.router.registry.not_ready() is not None, timeout_s=1)
    response = await fleet.http.get("/ready")
    assert response.status_code == 503
    assert "no decode worker is ready" in response.json()["error"]["message"]
    assert (await fleet.http.get("/health")).status_code == 200
    refused = await fleet.complete()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_workers")
    assert refused.headers["retry-after"] == "1"
    assert "127.0.0.1" not in refused.text, "a client learns where the workers are"


async def test_case_19_and_20_and_23_all_decode_workers_restart(fleet: Fleet) -> None:
    """The new generation's pool is opened, the old one's closed, and requests succeed without a router restart."""
    await fleet.start()
    first = fleet.decode[0]
    assert (await fleet.complete()).status_code == 200
    await fleet.hosts[first].kill()
    await fleet.until(lambda: fleet.router.registry.not_ready() is not None)
    fresh = fleet.restart(first)
    await fleet.until(lambda: fleet.router.registry.not_ready() is None)
    assert (await fleet.complete()).json()["choices"][0]["text"] == "bcde"
    [closed] = fleet.prefill[0].seen(ClosePool)
    assert (closed.worker, closed.generation) == ("d0", first.generation)
    assert [o.pool.generation for o in fleet.prefill[0].seen(OpenPool)] == [first.generation, fresh.generation]
    assert fleet.prefill[0].seen(Prefill)[-1].lease.generation == fresh.generation  # type: ignore[union-attr]


async def test_case_21_a_silent_worker_counts_as_dead(fleet: Fleet) -> None:
    """Its socket is open and it says nothing: the heartbeat notices."""
    await fleet.start(ping_interval_s=0.05, dead_after_s=0.3)
    for session in fleet.decode[0].sessions:
        session.send = lambda message: None
    await fleet.until(lambda: fleet.router.registry.not_ready() is not None, timeout_s=3)


async def test_workers_that_are_not_ready_or_drain_take_no_new_work(fleet: Fleet) -> None:
    """Case 26: what runs is finished."""
    other = fleet.add_decode()
    other.draining = True
    await fleet.start()
    for _ in range(3):
        assert (await fleet.complete()).status_code == 200
    assert other.received == []
    fleet.decode[0].steps.clear()
    task = asyncio.create_task(fleet.complete())
    await fleet.decode[0].until_seen(Decode, 4)
    fleet.decode[0].draining = True
    await fleet.until(lambda: fleet.router.registry.not_ready() is not None)
    assert (await fleet.complete()).status_code == 503
    fleet.decode[0].steps.set()
    assert (await task).status_code == 200


# ---- pools


async def test_only_opened_pairs_are_used(fleet: Fleet) -> None:
    fleet.prefill[0].refusal = GeometryMismatch("9 heads do not fit 8")
    other = fleet.add_prefill()
    await fleet.start(wait=False)
    await fleet.until(lambda: fleet.router.registry.not_ready() is None)
    for _ in range(3):
        assert (await fleet.complete()).status_code == 200
    assert fleet.prefill[0].seen(Prefill) == []
    assert len(other.seen(Prefill)) == 3


async def test_a_refused_pool_is_the_reason_not_to_be_ready(fleet: Fleet) -> None:
    fleet.prefill[0].refusal = GeometryMismatch("9 heads do not fit 8")
    await fleet.start(wait=False)
    await fleet.until(lambda: "9 heads" in (fleet.router.registry.not_ready() or ""))
    assert (await fleet.complete()).status_code == 503


async def test_a_lost_pool_is_opened_again(fleet: Fleet) -> None:
    fleet.prefill[0].refusal = PushFailed("cannot connect")
    await fleet.start(wait=False)
    await fleet.prefill[0].until_seen(OpenPool)
    fleet.prefill[0].refusal = None
    await fleet.until(lambda: fleet.router.registry.not_ready() is None)


async def test_a_pool_that_prefill_does_not_know_is_opened_and_the_request_succeeds(fleet: Fleet) -> None:
    await fleet.start()
    fleet.prefill[0].failures.append(UnknownPool("d0 is not open here"))
    assert (await fleet.complete()).json()["choices"][0]["text"] == "bcde"
    assert len(fleet.prefill[0].seen(OpenPool)) == 2


async def test_a_worker_of_another_model_is_refused_with_the_reason(fleet: Fleet) -> None:
    stranger = fleet.add_decode()
    stranger.model = fake_model("other")
    await fleet.start(wait=False)
    await fleet.until(lambda: fleet.router.registry.not_ready() is None)
    await fleet.until(lambda: fleet.router.registry.decode[1].refused is not None)
    described = fleet.router.registry.decode[1].describe()
    assert described["state"] == "refused"
    assert "another model (other" in described["reason"]
    assert (await fleet.complete()).status_code == 200
    assert stranger.received == []


# ---- room


async def test_a_full_decode_worker_makes_requests_wait(fleet: Fleet) -> None:
    """They wait in the router, where they pin nothing, and go on when blocks are free."""
    fleet.decode.clear()
    decode = fleet.add_decode(num_blocks=2, block_size=32)
    decode.steps.clear()
    await fleet.start()
    tasks = [asyncio.create_task(fleet.complete()) for _ in range(5)]
    await decode.until(lambda: len(decode.rows) == 2)
    await fleet.until(lambda: fleet.router.placement.queued == 3)
    assert len(fleet.prefill[0].seen(Prefill)) == 2
    decode.steps.set()
    assert [r.status_code for r in await asyncio.gather(*tasks)] == [200] * 5
    await fleet.until_idle()


async def test_waiting_for_room_ends_with_503(fleet: Fleet) -> None:
    fleet.decode.clear()
    decode = fleet.add_decode(num_blocks=1, block_size=32)
    decode.steps.clear()
    await fleet.start(queue_timeout_s=0.3)
    first = asyncio.create_task(fleet.complete())
    await decode.until(lambda: len(decode.rows) == 1)
    response = await fleet.complete()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
    decode.steps.set()
    assert (await first).status_code == 200


async def test_a_lease_is_reserved_only_when_prefill_can_start(fleet: Fleet) -> None:
    fleet.prefill[0].gate.clear()
    await fleet.start(prefills_per_worker=2)
    tasks = [asyncio.create_task(fleet.complete()) for _ in range(6)]
    await fleet.prefill[0].until_seen(Prefill, 2)
    await fleet.until(lambda: fleet.router.placement.queued == 4)
    assert len(fleet.decode[0].seen(Reserve)) == 2
    fleet.prefill[0].gate.set()
    assert [r.status_code for r in await asyncio.gather(*tasks)] == [200] * 6


async def test_the_front_queue_is_bounded(fleet: Fleet) -> None:
    fleet.decode[0].steps.clear()
    await fleet.start(max_concurrent=1, max_queued=1)
    first = asyncio.create_task(fleet.complete())
    await fleet.decode[0].until_seen(Decode)
    second = asyncio.create_task(fleet.complete())
    await fleet.until(lambda: fleet.router.gate.queued == 1)
    third = await fleet.complete()
    assert (third.status_code, third.headers["retry-after"]) == (503, "1")
    fleet.decode[0].steps.set()
    assert [(await first).status_code, (await second).status_code] == [200, 200]


async def test_an_overloaded_prefill_worker_is_no_reason_to_fail(fleet: Fleet) -> None:
    await fleet.start()
    fleet.prefill[0].failures.append(Overloaded("512 requests wait"))
    assert (await fleet.complete()).status_code == 200
    assert not fleet.router.registry.prefill[0].cooling


# ---- preemption


@pytest.mark.parametrize("stream", [False, True])
async def test_case_38_a_preempted_request_goes_on_with_what_it_has(fleet: Fleet, stream: bool) -> None:
    """Prefilled again with its tokens appended; the text goes on seamlessly and every token is counted once."""
    await fleet.start()
    fleet.decode[0].preempt = 2
    if stream:
        events = await fleet.events("say a", max_tokens=8, stream_options={"include_usage": True})
        text, usage = text_of(events), events[-2]["usage"]
        assert finish_of(events) == ["length"]
    else:
        answer = (await fleet.complete("say a", max_tokens=8)).json()
        text, usage = answer["choices"][0]["text"], answer["usage"]
    assert text == "bcdefghi"
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 8)
    prompts = [list(p.token_ids) for p in fleet.prefill[0].seen(Prefill)]
    assert prompts == [fleet.ids("say a"), fleet.ids("say abc"), fleet.ids("say abcde")]
    assert [p.sampling.max_tokens for p in fleet.prefill[0].seen(Prefill)] == [8, 6, 4]
    assert [(d.generated, d.sampling.max_tokens) for d in fleet.decode[0].seen(Decode)] == [(1, 8), (3, 8), (5, 8)]
    assert [(r.max_tokens, r.preemptions) for r in fleet.decode[0].seen(Reserve)] == [(8, 0), (6, 1), (4, 2)]
    assert await fleet.metric("hawk_router_preemptions_total") == 2
    await fleet.until_idle()


async def test_preemption_is_bounded(fleet: Fleet) -> None:
    await fleet.start()
    fleet.decode[0].preempt = 100
    response = await fleet.complete(max_tokens=100)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "preempted")
    assert len(fleet.prefill[0].seen(Prefill)) == 4
    events = await fleet.events(max_tokens=100)
    assert events[-1]["error"]["code"] == "preempted"
    await fleet.until_idle()


async def test_preempted_before_the_last_token_needs_no_decode(fleet: Fleet) -> None:
    await fleet.start()
    fleet.decode[0].preempt = 1
    answer = (await fleet.complete(max_tokens=3)).json()
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("bcd", 3)
    assert len(fleet.decode[0].seen(Reserve)) == 1


# ---- time


async def test_case_25_a_request_that_gets_no_token_ends(fleet: Fleet) -> None:
    fleet.decode[0].steps.clear()
    await fleet.start(token_timeout_s=0.2, max_retries=0)
    events = await fleet.events()
    assert events[-1]["error"]["code"] == "worker_lost"
    assert "no token within 0.2 s" in events[-1]["error"]["message"]
    await fleet.until_idle()


async def test_case_25_no_answer_to_reserve_or_prefill(fleet: Fleet) -> None:
    await fleet.start(reserve_timeout_s=0.2, prefill_timeout_s=0.2, max_retries=0)
    fleet.decode[0].gate.clear()
    response = await fleet.complete()
    assert (response.status_code, response.json()["error"]["code"]) == (502, "worker_lost")
    fleet.decode[0].gate.set()
    fleet.prefill[0].gate.clear()
    response = await fleet.complete()
    assert (response.status_code, response.json()["error"]["code"]) == (502, "worker_lost")
    await fleet.until_idle()


async def test_case_25_the_whole_request_is_bounded(fleet: Fleet) -> None:
    fleet.decode[0].step_s = 0.05
    await fleet.start(request_timeout_s=0.3)
    response = await fleet.complete(max_tokens=400)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    await fleet.until_idle()
