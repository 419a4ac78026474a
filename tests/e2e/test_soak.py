"""200 requests at concurrency 16, random lengths, random client aborts: every one ends, none wrong."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from .client import Client
from .reference import MAX_TOKENS, Answer
from .test_requests import new_prompt
from .topology import Deployment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

REQUESTS, CONCURRENCY = 200, 16


async def one(deployment: Deployment, client: Client, answers: list[Answer], rng: random.Random) -> str:
    """One random request → how it ended. Raises AssertionError where its result is wrong."""
    answer = rng.choice(answers)
    tokens = rng.randint(1, MAX_TOKENS)
    kind = rng.choices(("known", "fresh", "abort early", "abort streaming"), (60, 15, 12, 13))[0]
    if kind == "known":
        outcome = await client.ask(answer.prompt, stream=rng.random() < 0.7, max_tokens=tokens)
        expected = min(tokens, len(answer.token_ids))
        assert outcome.status == 200, outcome.error
        assert outcome.error is None, outcome.error
        assert (outcome.completion_tokens, outcome.text) == (expected, answer.text_of(deployment.book, expected))
        return kind
    prompt = new_prompt(deployment, rng.randint(1, 250))
    if kind == "fresh":
        outcome = await client.ask(prompt, max_tokens=tokens, ignore_eos=True)
        assert (outcome.status, outcome.error) == (200, None)
        assert (outcome.completion_tokens, outcome.finish_reason, outcome.done) == (tokens, "length", 1)
    elif kind == "abort early":
        task = asyncio.create_task(client.ask(prompt, max_tokens=200, ignore_eos=True))
        await asyncio.wait([task], timeout=rng.uniform(0, 1.5))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    else:
        body = {"model": client.model, "stream": True, **prompt.body(max_tokens=200, ignore_eos=True)}
        async with client.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            await client.collect(response, stop_after=rng.randint(1, 6))
    return kind


async def test_case_25_every_request_ends(deployment: Deployment, answers: list[Answer]) -> None:
    rng = random.Random(25)
    ended: Counter[str] = Counter()
    queue = iter(range(REQUESTS))

    async def user(client: Client) -> None:
        for number in queue:
            ended[
                await asyncio.wait_for(one(deployment, client, answers, random.Random(rng.random() + number)), 120)
            ] += 1

    async with deployment.client("r0") as client, asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(user(client))
    assert sum(ended.values()) == REQUESTS
    assert len(ended) == 4
    await deployment.until_idle()
    assert deployment.pool_full("d0")
