"""Other pools behind the same prefill worker: staged KV paths, other cache dtypes, one that is too small."""

from __future__ import annotations

import asyncio

import pytest

from .reference import MAX_TOKENS, Answer
from .test_equality import ask_all, assert_equal
from .test_requests import by_length, new_prompt
from .topology import KV_BYTES_PER_TOKEN, Deployment

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("kv_path", ["host", "contiguous"])
async def test_staged_kv_paths_give_the_same_text(deployment: Deployment, answers: list[Answer], kv_path: str) -> None:
    """The baselines are real: another way for the same bytes, checksums and prefix hits there too.

    The longest prompts take more pieces than a lease has staging slots.
    """
    some = [a for a in answers if len(a.prompt_ids) in (1, 32, 33, 129, 192, 321, 513)]
    pool = {"channels": 7, "block_size": 64, "num_blocks": 100}
    with deployment.pool(kv_path=kv_path, checksum=True, **pool) as (decode, router):
        async with deployment.client(router) as client:
            assert_equal(await ask_all(client, some, at_once=4), some)
            landed = deployment.landed_bytes(decode)
            assert_equal(await ask_all(client, some, at_once=4), some)
        assert deployment.landed_bytes(decode) - landed < sum(len(a.prompt_ids) for a in some) * KV_BYTES_PER_TOKEN / 2
        await deployment.until_idle()


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "bfp8_b"])
async def test_smaller_cache_dtypes_still_know_the_answer(
    deployment: Deployment, answers: list[Answer], kv_dtype: str
) -> None:
    """Not byte-equal, but right, at half and at a quarter of the bytes on the wire."""
    chats = [a for a in answers if a.finish_reason == "stop"]
    with deployment.pool(kv_dtype=kv_dtype, num_blocks=100) as (decode, router):
        async with deployment.client(router) as client:
            assert_equal(await ask_all(client, chats, at_once=2), chats)
            before = deployment.landed_bytes(decode)
            await client.ask(new_prompt(deployment, 256), max_tokens=2)
        share = {"bfloat16": 1 / 2, "bfp8_b": 1088 / 4096}[kv_dtype]
        assert deployment.landed_bytes(decode) - before == 256 * KV_BYTES_PER_TOKEN * share


async def test_preempted_requests_end_with_the_text_of_undisturbed_ones(deployment: Deployment) -> None:
    """More requests than the pool has blocks for: victims are prefilled again, and nobody can tell."""
    prompts = [new_prompt(deployment, 60 + i) for i in range(6)]
    with deployment.pool(num_blocks=20) as (decode, router):
        async with deployment.client(router) as client:
            ask = [lambda p=p: client.ask(p, max_tokens=70, ignore_eos=True) for p in prompts]
            alone = [o for half in (ask[:3], ask[3:]) for o in await asyncio.gather(*(one() for one in half))]
            assert not deployment.metrics(decode).value("hawk_decode_preemptions_total")
            together = await asyncio.gather(*(one() for one in ask))
        assert deployment.metrics(decode).value("hawk_decode_preemptions_total") > 0, "the pool was not too small"
        for one, other in zip(alone, together, strict=True):
            assert (other.status, other.error, other.completion_tokens) == (200, None, 70)
            assert other.text == one.text
            assert other.usage is not None
            assert one.usage is not None
            assert other.usage["prompt_tokens"] == one.usage["prompt_tokens"]
        await deployment.until_idle()


async def test_a_request_larger_than_the_pool_is_a_400(deployment: Deployment) -> None:
    with deployment.pool(num_blocks=8) as (_, router):
        async with deployment.client(router) as client:
            outcome = await client.ask(new_prompt(deployment, 250), max_tokens=100)
            assert outcome.status == 400
            assert outcome.error is not None
            assert outcome.error["code"] == "context_length_exceeded"
            fits = await client.ask(new_prompt(deployment, 200), max_tokens=8, ignore_eos=True)
            assert (fits.status, fits.completion_tokens) == (200, 8)


async def test_n_samples_are_each_complete(deployment: Deployment, answers: list[Answer]) -> None:
    """n > 1, greedy: n times the same text; several prompts in one request: each its own."""
    few = [by_length(answers, n) for n in (33, 65)]
    async with deployment.client("r0") as client:
        body = {"model": client.model, "temperature": 0, "max_tokens": MAX_TOKENS}
        many = await client.post("/v1/completions", {**body, "prompt": list(few[0].prompt_ids), "n": 3})
        both = await client.post("/v1/completions", {**body, "prompt": [list(a.prompt_ids) for a in few]})
    assert many.body is not None
    assert both.body is not None
    assert [c["text"] for c in many.body["choices"]] == [few[0].text] * 3
    assert [c["text"] for c in sorted(both.body["choices"], key=lambda c: c["index"])] == [a.text for a in few]
    assert many.completion_tokens == 3 * MAX_TOKENS
    assert both.completion_tokens == 2 * MAX_TOKENS
