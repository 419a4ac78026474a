"""Processes killed in the worst moments. Runs last: each test restarts what it killed.

After each of them, without new traffic, every lease and every block is back.
"""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from .cluster import eventually
from .reference import Answer
from .test_requests import by_length, new_prompt
from .topology import Deployment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


async def assert_serves(deployment: Deployment, answers: list[Answer], router: str = "r0") -> None:
    answer = by_length(answers, 97)
    async with deployment.client(router) as client:
        outcome = await client.ask(answer.prompt, max_tokens=8)
    assert (outcome.status, outcome.text) == (200, answer.text_of(deployment.book, 8)), outcome.error


async def kill_prefill(deployment: Deployment, answers: list[Answer], share: float) -> None:
    """SIGKILL the only P after `share` of a prefill: an error for both clients, all back on D, a restart heals."""
    tokens = 896
    async with deployment.client("r0") as client:
        before = time.monotonic()
        await client.ask(new_prompt(deployment, tokens), max_tokens=1)
        delay_s = share * (time.monotonic() - before)
        whole = asyncio.create_task(client.ask(new_prompt(deployment, tokens), stream=False, max_tokens=8))
        await deployment.until(lambda: deployment.in_prefill("p0", "d0"), "in prefill", during=whole)
        streamed = asyncio.create_task(client.ask(new_prompt(deployment, tokens), stream=True, max_tokens=8))
        await asyncio.wait([whole], timeout=delay_s)
        deployment.cluster.kill("p0")
        outcomes = await asyncio.wait_for(asyncio.gather(whole, streamed), 100)
    for outcome in outcomes:
        assert outcome.error is not None, "a request whose prefill died must not look like a success"
        assert outcome.error["message"]
        assert outcome.status in (502, 503, 504)
        assert not outcome.text
    eventually(lambda: deployment.pool_full("d0"), "D's blocks are back while P is dead", 30)
    eventually(lambda: not deployment.cluster.orphans("p0"), "no process of the killed P is left", 30)
    eventually(lambda: deployment.cluster.ready_status("r0") == 503, "/ready of the router says 503", 15)
    deployment.cluster.restart("p0")
    deployment.cluster.wait_ready("r0", "r1", timeout_s=30)
    await assert_serves(deployment, answers)
    await deployment.until_idle()


async def test_prefill_killed_before_the_push(deployment: Deployment, answers: list[Answer]) -> None:
    """The first of seven chunks is being computed."""
    await kill_prefill(deployment, answers, share=0.02)


async def test_case_18_prefill_killed_in_mid_push_reconnects(deployment: Deployment, answers: list[Answer]) -> None:
    """Half of the chunks have been written. The restarted P serves without a restart of D."""
    await kill_prefill(deployment, answers, share=0.5)


async def test_case_m3_and_m8_decode_killed_in_mid_stream(deployment: Deployment, answers: list[Answer]) -> None:
    """An SSE error event at once, /ready 503 within a probe interval, P free, and a restarted D is used again."""
    prompt = new_prompt(deployment, 60)
    async with deployment.client("r0") as client:
        streamed = asyncio.create_task(client.ask(prompt, max_tokens=400, ignore_eos=True))
        whole = asyncio.create_task(
            client.ask(new_prompt(deployment, 60), stream=False, max_tokens=400, ignore_eos=True)
        )
        await deployment.until(lambda: deployment.decoding("d0") == 2, "decoding")
        deployment.cluster.kill("d0")
        died = time.monotonic()
        outcome, other = await asyncio.wait_for(asyncio.gather(streamed, whole), 20)
        assert time.monotonic() - died < 10, "the client was left waiting"
    assert outcome.status == 200
    assert outcome.text, "it was in mid-stream"
    assert outcome.error is not None, "silence instead of an error event"
    assert outcome.error["message"]
    assert outcome.finish_reason is None
    assert outcome.done <= 1
    assert other.status in (502, 503)
    assert other.error is not None
    eventually(lambda: deployment.cluster.ready_status("r0") == 503, "/ready of the router says 503", 10)
    eventually(lambda: deployment.held_by_prefill("p0") == 0, "P holds nothing for the dead D", 30)
    async with deployment.client("r0") as client:
        refused = await client.ask(prompt, max_tokens=8)
        assert (refused.status, refused.error is not None) == (503, True)
        alone = await client.ask(by_length(answers, 33).prompt, max_tokens=8)
        assert alone.status == 503
    deployment.cluster.restart("d0")
    deployment.cluster.wait_ready("r0", timeout_s=30)
    await assert_serves(deployment, answers)
    await deployment.until_idle()


async def test_case_19_decode_restarted_under_the_router(deployment: Deployment, answers: list[Answer]) -> None:
    """A new generation under the same address: nothing of the old one is used, no stale write lands."""
    await assert_serves(deployment, answers)
    deployment.cluster.kill("d0", signal.SIGTERM, timeout_s=40)
    deployment.cluster.restart("d0")
    deployment.cluster.wait_ready("r0", timeout_s=30)
    await assert_serves(deployment, answers)
    await deployment.until_idle()


async def test_router_killed_frees_both_workers(deployment: Deployment, answers: list[Answer]) -> None:
    """The session breaks: P and D drop everything that router had."""
    async with deployment.client("r0") as client:
        tasks = [
            asyncio.create_task(client.ask(new_prompt(deployment, tokens), max_tokens=400, ignore_eos=True))
            for tokens in (60, 900)
        ]
        await deployment.until(lambda: deployment.decoding("d0") > 0, "decoding")
        deployment.cluster.kill("r0")
        await asyncio.gather(*tasks, return_exceptions=True)
    eventually(lambda: deployment.pool_full("d0"), "D's blocks are back", 30)
    eventually(lambda: deployment.held_by_prefill("p0") == 0, "P holds nothing", 30)
    deployment.cluster.restart("r0")
    await assert_serves(deployment, answers)


async def test_case_09_a_hanging_prefill_that_wakes_up_harms_nobody(
    deployment: Deployment, answers: list[Answer]
) -> None:
    """P stops in mid-push: the client gets an error. When it goes on, it finds itself fenced: all blocks are back,
    and what is written into them from now on stays as it is.
    """
    async with deployment.client("r0") as client:
        task = asyncio.create_task(client.ask(new_prompt(deployment, 896), max_tokens=8))
        await deployment.until(lambda: deployment.in_prefill("p0", "d0"), "in prefill", during=task)
        deployment.cluster.signal_all("p0", signal.SIGSTOP)
        try:
            outcome = await asyncio.wait_for(task, 60)
            assert outcome.error is not None
            assert outcome.status in (502, 503, 504)
        finally:
            deployment.cluster.signal_all("p0", signal.SIGCONT)
    await deployment.until_idle()
    deployment.cluster.wait_ready("r0", "r1", timeout_s=30)
    await assert_serves(deployment, answers)
    await assert_serves(deployment, answers, "r1")


async def test_a_hanging_decode_worker_ends_its_streams_with_an_error(
    deployment: Deployment, answers: list[Answer]
) -> None:
    """Neither silence for ever nor a wrong end; when D goes on, it has nothing left of the request."""
    async with deployment.client("r0") as client:
        task = asyncio.create_task(client.ask(new_prompt(deployment, 60), max_tokens=400, ignore_eos=True))
        await deployment.until(lambda: deployment.decoding("d0") == 1, "decoding", during=task)
        deployment.cluster.signal_all("d0", signal.SIGSTOP)
        try:
            outcome = await asyncio.wait_for(task, 60)
            eventually(lambda: deployment.cluster.ready_status("r0") == 503, "/ready of the router says 503", 15)
            eventually(lambda: deployment.held_by_prefill("p0") == 0, "P holds nothing for the hanging D", 15)
        finally:
            deployment.cluster.signal_all("d0", signal.SIGCONT)
    assert outcome.status == 200
    assert outcome.text
    assert outcome.error is not None
    assert outcome.finish_reason is None
    deployment.cluster.wait_ready("r0", timeout_s=30)
    await deployment.until_idle()
    await assert_serves(deployment, answers)


async def test_a_hanging_router_costs_the_workers_nothing(deployment: Deployment, answers: list[Answer]) -> None:
    """Its sessions fall silent: both workers give up what it had, and serve the other router meanwhile."""
    async with deployment.client("r0") as client:
        task = asyncio.create_task(client.ask(new_prompt(deployment, 60), max_tokens=400, ignore_eos=True))
        await deployment.until(lambda: deployment.decoding("d0") == 1, "decoding", during=task)
        deployment.cluster.signal_all("r0", signal.SIGSTOP)
        try:
            eventually(lambda: deployment.pool_full("d0"), "D's blocks are back", 30)
            await assert_serves(deployment, answers, "r1")
        finally:
            deployment.cluster.signal_all("r0", signal.SIGCONT)
        outcome = await asyncio.wait_for(task, 60)
    assert outcome.error is not None
    deployment.cluster.wait_ready("r0", timeout_s=30)
    await deployment.until_idle()
    await assert_serves(deployment, answers)
