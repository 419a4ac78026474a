"""Greedy fp32 text is byte-equal to the same vLLM serving alone, whatever the geometry, batch or cache state."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from .client import Client, Outcome
from .reference import MAX_TOKENS, Answer
from .topology import KV_BYTES_PER_TOKEN, PREFILL_BLOCK, Deployment

pytestmark = pytest.mark.e2e


async def ask_all(client: Client, answers: Sequence[Answer], at_once: int) -> list[Outcome]:
    """All prompts, `at_once` in flight, streamed; outcomes in the order of `answers`."""
    gate = asyncio.Semaphore(at_once)

    async def one(answer: Answer) -> Outcome:
        async with gate:
            return await client.ask(answer.prompt, max_tokens=MAX_TOKENS)

    return await asyncio.gather(*(one(a) for a in answers))


def assert_equal(outcomes: Sequence[Outcome], answers: Sequence[Answer]) -> None:
    wrong = [
        f"{a.prompt.name} (smallest lead {a.gap:.4f}): expected {a.text!r} {a.finish_reason}, "
        f"got {o.status} {o.text!r} {o.finish_reason} {o.error or ''}"
        for o, a in zip(outcomes, answers, strict=True)
        if (o.status, o.text, o.finish_reason, o.error, o.done) != (200, a.text, a.finish_reason, None, 1)
    ]
    assert not wrong, f"{len(wrong)} of {len(answers)} differ from vLLM alone:\n" + "\n".join(wrong)
    for outcome, answer in zip(outcomes, answers, strict=True):
        assert outcome.usage is not None
        assert outcome.usage["prompt_tokens"] == len(answer.prompt_ids), answer.prompt.name
        assert outcome.completion_tokens == len(answer.token_ids), answer.prompt.name


@pytest.mark.timeout(420)
async def test_all_lengths_eight_at_once_block_32_channels_8(deployment: Deployment, answers: list[Answer]) -> None:
    """Every prompt for the first time: chunked prefill (budget 128), eight concurrent, streamed."""
    async with deployment.client("r0") as client:
        assert_equal(await ask_all(client, answers, at_once=8), answers)


async def test_prefix_hits_on_both_sides(deployment: Deployment, answers: list[Answer]) -> None:
    """The same prompts again: P takes whole blocks from its cache, D's lease declares them resident."""
    # together they fit the pool, which otherwise would have dropped some when they come again
    again = [a for a in answers if len(a.prompt_ids) % 64 in (0, 1, 63) and len(a.prompt_ids) <= 321]
    async with deployment.client("r0") as client:
        await ask_all(client, again, at_once=8)
        landed = deployment.landed_bytes("d0")
        outcomes = await ask_all(client, again, at_once=8)
        assert_equal(outcomes, again)
    for outcome, answer in zip(outcomes, again, strict=True):
        prompt = len(answer.prompt_ids)
        blocks = (prompt - 1) // PREFILL_BLOCK * PREFILL_BLOCK
        assert outcome.cached_tokens == blocks, f"{answer.prompt.name}: P's cache"
    tails = sum(-len(a.prompt_ids) % 32 + len(a.prompt_ids) % 32 for a in again)
    assert deployment.landed_bytes("d0") - landed == tails * KV_BYTES_PER_TOKEN, "what D holds was sent again"


async def test_prefix_hit_on_p_with_nothing_resident_on_d_block_64_channels_7(
    deployment: Deployment, answers: list[Answer]
) -> None:
    """Another pool (block 64, 7 channels) behind the same P: cached blocks are pushed although nothing is computed."""
    async with deployment.client("r1") as client:
        outcomes = await ask_all(client, answers, at_once=8)
        assert_equal(outcomes, answers)
    assert sum(o.cached_tokens for o in outcomes) > 0


async def test_shared_prefix_with_a_new_tail(deployment: Deployment, answers: list[Answer]) -> None:
    """A longer prompt whose head is resident: only its tail crosses the wire, and the text is that of a fresh one."""
    longest = max(answers, key=lambda a: len(a.prompt_ids))
    stem = list(longest.prompt_ids)
    async with deployment.client("r0") as client:
        for cut in (64, 130, 257):
            body = {"prompt": stem[:cut], "temperature": 0, "max_tokens": 8}
            warm = await client.post("/v1/completions", {"model": client.model, **body})
            assert warm.status == 200
        outcomes = await ask_all(client, [longest], at_once=1)
        assert_equal(outcomes, [longest])


async def test_alone_equals_in_a_batch(deployment: Deployment, answers: list[Answer]) -> None:
    """One at a time, not streamed."""
    few = [a for a in answers if a.prompt.message is not None or len(a.prompt_ids) in (1, 33, 129)]
    async with deployment.client("r0") as client:
        for answer in few:
            outcome = await client.ask(answer.prompt, stream=False, max_tokens=MAX_TOKENS)
            assert (outcome.status, outcome.text, outcome.finish_reason) == (200, answer.text, answer.finish_reason)


@pytest.mark.parametrize("tokens", [1, 2, 5])
async def test_fewer_tokens_are_a_prefix(deployment: Deployment, answers: list[Answer], tokens: int) -> None:
    few = [a for a in answers if len(a.prompt_ids) in (32, 97, 256)]
    async with deployment.client("r0") as client:
        for answer in few:
            outcome = await client.ask(answer.prompt, max_tokens=tokens)
            assert outcome.text == answer.text_of(deployment.book, tokens)
            assert (outcome.finish_reason, outcome.completion_tokens) == ("length", tokens)
