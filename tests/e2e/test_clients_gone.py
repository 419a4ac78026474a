"""A client that goes away in any phase: both sides are free again at once, without new traffic."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from .client import Client
from .test_requests import new_prompt
from .topology import Deployment

pytestmark = pytest.mark.e2e


async def gone_when(deployment: Deployment, tokens: int, phase: Callable[[], bool], what: str, *, stream: bool) -> None:
    """Send a long request, disconnect as soon as `phase` is seen, and expect everything back."""
    prompt = new_prompt(deployment, tokens)
    async with deployment.client("r0") as client:
        task = asyncio.create_task(client.ask(prompt, stream=stream, max_tokens=100, ignore_eos=True))
        await deployment.until(phase, what, during=task)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await deployment.until_idle()
    deployment.assert_ready()


@pytest.mark.parametrize("stream", [False, True])
async def test_case_02_gone_while_prefill_runs(deployment: Deployment, stream: bool) -> None:
    """Reserved on D, being prefilled on P: neither keeps a block."""
    await gone_when(deployment, 900, lambda: deployment.in_prefill("p0", "d0"), "in prefill", stream=stream)


async def test_case_10_gone_in_the_middle_of_the_push(deployment: Deployment) -> None:
    """Part of the KV has been written: the lease is fenced, nobody crashes, the pool is full again."""
    chunks = 7
    async with deployment.client("r0") as client:
        before = time.monotonic()
        await client.ask(new_prompt(deployment, chunks * 128), max_tokens=1)
        prefill_s = time.monotonic() - before
    fences = deployment.fences("d0")
    started = []

    def half_done() -> bool:
        """Of the chunks of this prefill some have been pushed, some are still to be computed."""
        if not started and deployment.in_prefill("p0", "d0"):
            started.append(time.monotonic())
        return bool(started) and time.monotonic() - started[0] > prefill_s / 2

    await gone_when(deployment, chunks * 128, half_done, "half pushed", stream=True)
    assert deployment.fences("d0") == fences + 1, "the writer had no right to write any more"


@pytest.mark.parametrize("stream", [False, True])
async def test_case_03_gone_while_streaming(deployment: Deployment, stream: bool) -> None:
    await gone_when(deployment, 64, lambda: deployment.decoding("d0") > 0, "decoding", stream=stream)


async def test_case_11_gone_while_queued(deployment: Deployment) -> None:
    """Requests behind others, in the router's queue or P's: dropped at once, the ones before them unharmed."""
    async with deployment.client("r0") as client:
        ahead = [
            asyncio.create_task(client.ask(new_prompt(deployment, 500), max_tokens=4, ignore_eos=True))
            for _ in range(4)
        ]
        await deployment.until(lambda: deployment.held_by_prefill("p0") > 0, "in prefill")
        async with deployment.client("r0") as other:
            behind = [
                asyncio.create_task(other.ask(new_prompt(deployment, 700), max_tokens=200, ignore_eos=True))
                for _ in range(12)
            ]
            await deployment.until(lambda: deployment.requests("r0") >= 16, "all are known to the router")
            for task in behind:
                task.cancel()
            await asyncio.gather(*behind, return_exceptions=True)
        outcomes = await asyncio.gather(*ahead)
    assert [o.completion_tokens for o in outcomes] == [4] * 4
    await deployment.until_idle()


async def test_gone_after_the_first_event(deployment: Deployment) -> None:
    """Many clients that read one event each and hang up."""

    async def one(client: Client) -> None:
        body = {"model": deployment.model, "stream": True, "max_tokens": 300, "ignore_eos": True}
        body |= new_prompt(deployment, 50).body()
        async with client.http.stream("POST", "/v1/completions", json=body) as response:
            await client.collect(response, stop_after=1)

    async with deployment.client("r0") as client:
        await asyncio.gather(*(one(client) for _ in range(12)))
    await deployment.until_idle()
