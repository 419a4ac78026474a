"""Blocks come back, and D is told, whatever happens to a request: each on a real engine, without new traffic."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prefill_peers import Decode, Router, Worker, decode_of, eventually, router_of, tokens_of

from transport.errors import HawkError
from transport.messages import Cancel, Failed, Lease, OpenPool, PoolRefused, Prefilled, Pushed

pytestmark = pytest.mark.e2e

TTL_S = 3.0
MAX_LEN = 512
SOON_S = TTL_S / 2
"""Well before the TTL: what is back by then did not wait for it."""


@pytest.fixture(scope="module")
def settings() -> dict[str, object]:
    """Room for about 1300 tokens: two long prompts and a bit."""
    return {
        "dtype": "bfloat16",
        "block_size": 64,
        "max_num_batched_tokens": 64,
        "max_model_len": MAX_LEN,
        "kv_cache_gib": 0.03,
        "hold_ttl_s": TTL_S,
    }


@pytest.fixture
async def decode(worker: Worker, router: Router, model: Path, tmp_path: Path) -> AsyncIterator[Decode]:
    async with decode_of("d0", model, tmp_path, dtype="bfloat16", num_blocks=512) as decode:
        await router.open(decode)
        yield decode


async def end_of(decode: Decode, lease: Lease) -> str:
    return await asyncio.wait_for(asyncio.shield(decode.ends[lease.id]), 10)


async def assert_all_there(worker: Worker, router: Router, decode: Decode, seed: int) -> None:
    """Nothing is held; and two prompts that fill the cache between them are served at once."""
    await worker.until_nothing_held(SOON_S)
    leases = [decode.lease(router.writer, 500) for _ in range(2)]
    await asyncio.gather(
        *(router.hand_over(tokens_of(seed + i, 500), lease, max_tokens=4) for i, lease in enumerate(leases))
    )
    await worker.until_nothing_held(SOON_S)


async def begun(worker: Worker, before: float) -> None:
    await eventually(lambda: worker.metric("requests_total") > before)


# ---- aborts in every phase


async def test_case_11_aborted_while_queued_behind_others(worker: Worker, router: Router, decode: Decode) -> None:
    decode.acknowledges = False
    requests = [router.prefill(tokens_of(i, 500), decode.lease(router.writer, 500)) for i in range(6)]
    await router.expect(Prefilled, request_id=requests[0])
    for request_id in requests:
        router.send(Cancel(request_id=request_id))
    await eventually(lambda: worker.metric("unprefilled_requests") == 0)
    decode.acknowledges = True
    await assert_all_there(worker, router, decode, 100)


async def test_case_01_aborted_in_mid_prefill(worker: Worker, router: Router, decode: Decode) -> None:
    before = worker.metric("requests_total")
    lease = decode.lease(router.writer, 500)
    request_id = router.prefill(tokens_of(20, 500), lease)
    await begun(worker, before)
    router.send(Cancel(request_id=request_id))
    await eventually(lambda: worker.metric("unprefilled_requests") == 0)
    await assert_all_there(worker, router, decode, 120)
    assert not any(getattr(m, "request_id", None) == request_id for m in router.messages)
    await decode.receiver.fence(lease.id)


async def test_case_02_and_10_aborted_between_prefill_and_acknowledgement(
    worker: Worker, router: Router, decode: Decode
) -> None:
    decode.acknowledges = False
    lease = decode.lease(router.writer, 300)
    request_id = router.prefill(tokens_of(30, 300), lease)
    await router.expect(Prefilled, request_id=request_id)
    assert await end_of(decode, lease) == "landed"
    await eventually(lambda: worker.metric("held_blocks") == 5)
    router.send(Cancel(request_id=request_id))
    await worker.until_nothing_held(SOON_S)
    decode.acknowledges = True
    await assert_all_there(worker, router, decode, 130)


async def test_case_13_one_token_holds_nothing(worker: Worker, router: Router, decode: Decode) -> None:
    pushes = worker.metric("pushes_total")
    request_id = router.prefill(tokens_of(40, 300), None, max_tokens=1)
    prefilled = await router.expect(Prefilled, request_id=request_id)
    assert prefilled.finish_reason == "length"
    assert len(prefilled.token_ids) == 1
    await assert_all_there(worker, router, decode, 140)
    assert worker.metric("pushes_total") == pushes + 2


async def test_case_42_a_first_token_that_stops_gives_the_lease_up(
    worker: Worker, router: Router, decode: Decode
) -> None:
    tokens = tokens_of(50, 300)
    probe = router.prefill(tokens, None, max_tokens=1)
    (first,) = (await router.expect(Prefilled, request_id=probe)).token_ids
    lease = decode.lease(router.writer, 300)
    request_id = router.prefill(tokens, lease, stop_token_ids=(first,))
    prefilled = await router.expect(Prefilled, request_id=request_id)
    assert prefilled.finish_reason == "stop"
    await assert_all_there(worker, router, decode, 150)
    assert not any(isinstance(m, Pushed) and m.request_id == request_id for m in router.messages)


# ---- the other side fails


async def test_case_12_a_peer_that_never_acknowledges_costs_one_ttl(
    worker: Worker, router: Router, decode: Decode
) -> None:
    decode.acknowledges = False
    lease = decode.lease(router.writer, 300)
    began = time.monotonic()
    request_id = router.prefill(tokens_of(60, 300), lease)
    await router.expect(Prefilled, request_id=request_id)
    failed = await router.expect(Failed, request_id=request_id, timeout_s=30)
    assert failed.error.code == "push_failed"
    assert time.monotonic() - began >= TTL_S
    decode.acknowledges = True
    await assert_all_there(worker, router, decode, 160)


async def test_case_09_a_fenced_lease_is_given_up(worker: Worker, router: Router, decode: Decode) -> None:
    lease = decode.lease(router.writer, 300)
    await decode.receiver.fence(lease.id)
    request_id = router.prefill(tokens_of(70, 300), lease)
    failed = await router.expect(Failed, request_id=request_id)
    assert failed.error.code == "lease_revoked"
    await assert_all_there(worker, router, decode, 170)


async def test_case_15_and_22_a_decode_worker_that_dies_is_said_at_once(
    worker: Worker, router: Router, model: Path, tmp_path: Path, decode: Decode
) -> None:
    async with decode_of("d9", model, tmp_path, dtype="bfloat16") as other:
        await router.open(other)
        other.acknowledges = False
        lease = other.lease(router.writer, 300)
        request_id = router.prefill(tokens_of(80, 300), lease)
        await end_of(other, lease)
        await other.receiver.close()
        failed = await router.expect(Failed, request_id=request_id, timeout_s=SOON_S)
        assert failed.error.code == "push_failed"
        refused = await router.expect(PoolRefused, worker="d9")
        assert refused.generation == other.generation
        with pytest.raises(HawkError) as caught:
            await router.hand_over(tokens_of(81, 64), other.lease(router.writer, 64, grant=False))
        assert caught.value.code == "unknown_pool"
    await assert_all_there(worker, router, decode, 180)


async def test_case_18_and_19_a_decode_worker_comes_back_under_its_name(
    worker: Worker, router: Router, model: Path, tmp_path: Path
) -> None:
    async with decode_of("d9", model, tmp_path, dtype="bfloat16") as old:
        await router.open(old)
        stale = old.lease(router.writer, 64)
    async with decode_of("d9", model, tmp_path, dtype="bfloat16") as new:
        await router.open(new)
        with pytest.raises(HawkError) as caught:
            await router.hand_over(tokens_of(90, 64), stale)
        assert caught.value.code == "stale_generation"
        await router.hand_over(tokens_of(90, 64), new.lease(router.writer, 64))


async def test_a_router_that_leaves_frees_all_it_had(worker: Worker, router: Router, decode: Decode) -> None:
    decode.acknowledges = False
    async with router_of(worker, "r1") as other:
        await other.open(decode)
        leases = [decode.lease(other.writer, 400) for _ in range(4)]
        requests = [other.prefill(tokens_of(200 + i, 400), lease) for i, lease in enumerate(leases)]
        await other.expect(Prefilled, request_id=requests[0])
    await eventually(lambda: worker.metric("unprefilled_requests") == 0)
    decode.acknowledges = True
    await assert_all_there(worker, router, decode, 190)


# ---- more work than room


async def test_case_34_more_prompts_than_blocks_all_land_right(worker: Worker, router: Router, decode: Decode) -> None:
    """Eight prompts of 450 tokens in room for two and a half: they wait or are preempted, and none is wrong."""
    from test_prefill_kv import assert_landed

    leases = [decode.lease(router.writer, 450) for _ in range(8)]
    await asyncio.gather(*(router.hand_over(tokens_of(300 + i, 450), lease) for i, lease in enumerate(leases)))
    for lease in leases:
        assert_landed(worker, decode, lease, "bfloat16")
    await assert_all_there(worker, router, decode, 310)


async def test_random_aborts_leave_nothing(worker: Worker, router: Router, decode: Decode) -> None:
    rng = np.random.default_rng(5)
    for i in range(40):
        length = int(rng.integers(1, 500))
        request_id = router.prefill(tokens_of(400 + i, length), decode.lease(router.writer, length))
        await asyncio.sleep(float(rng.exponential(0.03)))
        if rng.random() < 0.7:
            router.send(Cancel(request_id=request_id))
    await eventually(lambda: worker.metric("unprefilled_requests") == 0, 60)
    await assert_all_there(worker, router, decode, 500)


# ---- refusals over the wire


@pytest.mark.parametrize(
    ("tokens", "fields", "code", "words"),
    [
        (tokens_of(1, MAX_LEN), {}, "context_length_exceeded", f"{MAX_LEN} tokens"),
        ([], {}, "invalid_request", "empty"),
        ([49152], {}, "invalid_request", "49152"),
        ([5], {"stop_token_ids": (60000,)}, "invalid_request", "60000"),
        ([5], {"temperature": 50.0}, "invalid_request", "temperature"),
    ],
)
async def test_case_51_bad_requests_are_refused_with_the_reason(
    router: Router, tokens: list[int], fields: dict[str, Any], code: str, words: str
) -> None:
    request_id = router.prefill(tokens, None, **fields)
    failed = await router.expect(Failed, request_id=request_id)
    assert failed.error.code == code
    assert words in failed.error.message


async def test_case_27_a_pool_of_another_model_is_refused(router: Router, model: Path, tmp_path: Path) -> None:
    async with decode_of("d8", model, tmp_path, dtype="bfloat16") as decode:
        other = decode.model.model_copy(update={"fingerprint": "0" * 32})
        router.send(OpenPool(pool=decode.description.model_copy(update={"model": other})))
        refused = await router.expect(PoolRefused, worker="d8")
        assert refused.error.code == "geometry_mismatch"


# ---- sampling


async def test_case_43_and_47_the_first_token_is_sampled_as_asked(router: Router) -> None:
    tokens = tokens_of(600, 50)

    async def first(**sampling: Any) -> Prefilled:
        return await router.expect(Prefilled, request_id=router.prefill(tokens, None, **sampling))

    greedy = await first(max_tokens=1, logprobs=5)
    assert greedy.logprobs is not None
    (entry,) = greedy.logprobs
    assert entry.token == greedy.token_ids[0] == entry.top[0][0]
    assert len(entry.top) == 5
    assert [p for _, p in entry.top] == sorted((p for _, p in entry.top), reverse=True)
    bare = await first(max_tokens=1, logprobs=0)
    assert bare.logprobs is not None
    assert bare.logprobs[0].top == ()
    assert (await first(max_tokens=1)).logprobs is None
    hot = [await first(max_tokens=1, temperature=2.0, seed=seed) for seed in (1, 1, 2, 3, 4)]
    assert hot[0].token_ids == hot[1].token_ids
    assert len({h.token_ids for h in hot}) > 1
    assert (await first(max_tokens=1, temperature=2.0, top_k=1)).token_ids == greedy.token_ids
    assert (await first(max_tokens=1, temperature=2.0, min_p=1.0)).token_ids == greedy.token_ids
    assert set(greedy.timings) == {"queue", "prefill"}
