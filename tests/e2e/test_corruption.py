"""KV that changes on its way to the decode worker: the right text all the same, or an error, and never a wrong text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .reference import MAX_TOKENS, Answer
from .test_equality import ask_all, assert_equal
from .test_requests import by_length, new_prompt
from .topology import KV_BYTES_PER_TOKEN, Deployment

pytestmark = pytest.mark.e2e

MAX_RETRIES = 2
"""Of the router, unless it is told otherwise."""


@dataclass(frozen=True)
class FlippingPool:
    """A pool with checksums whose decode worker has bytes flipped, and the router in front of it."""

    deployment: Deployment
    file: Path
    decode: str
    router: str

    def flip(self, leases: int) -> None:
        """Hit so many of the next leases."""
        self.file.write_text(str(leases))

    @property
    def to_flip(self) -> int:
        return int(self.file.read_text())

    @property
    def hold(self) -> Path:
        """While it exists, what was hit is not looked at."""
        return self.file.with_suffix(".hold")

    def first_tokens(self) -> float:
        """Streams that have sent something."""
        return self.deployment.metrics(self.router).value("hawk_router_time_to_first_token_seconds_count")

    def counts(self) -> tuple[int, int, int]:
        """So far: checksum failures on D, tries again of the router for that reason, leases that it asked for."""
        decode, router = self.deployment.metrics(self.decode), self.deployment.metrics(self.router)
        retries = router.get("hawk_router_retries_total", [])
        return (
            int(decode.value("hawk_decode_checksum_failures_total")),
            int(sum(value for labels, value in retries if labels["code"] == "checksum_mismatch")),
            self.deployment.reservations(self.router),
        )

    def since(self, before: tuple[int, int, int]) -> tuple[int, int, int]:
        failures, retries, leases = (now - then for now, then in zip(self.counts(), before, strict=True))
        return failures, retries, leases

    def landed_tokens(self) -> float:
        return self.deployment.landed_bytes(self.decode) / KV_BYTES_PER_TOKEN


@pytest.fixture(scope="module", params=["hawk", "host"])
def pool(deployment: Deployment, request: pytest.FixtureRequest) -> Iterator[FlippingPool]:
    """Checked in the channels after the last byte, or piece by piece in a staging slot."""
    file = deployment.cluster.directory / f"flips-{request.param}"
    file.write_text("0")
    command = ("-m", "tests.e2e.flipping_decode", str(file))
    settings = {"kv_path": request.param, "channels": 7, "block_size": 64, "num_blocks": 100}
    with deployment.pool(command=command, checksum=True, **settings) as (decode, router):
        yield FlippingPool(deployment, file, decode, router)


async def test_case_35_a_request_whose_kv_changed_on_the_way_is_tried_again(
    pool: FlippingPool, answers: list[Answer]
) -> None:
    """Nothing of the bad blocks is kept: the second try is sent all of the prompt, a later request only its tail."""
    async with pool.deployment.client(pool.router) as client:
        for tokens in (33, 128, 321):
            answer = by_length(answers, tokens)
            before, landed = pool.counts(), pool.landed_tokens()
            pool.flip(1)
            outcome = await client.ask(answer.prompt, stream=False, max_tokens=MAX_TOKENS)
            assert (outcome.status, outcome.text, outcome.finish_reason) == (200, answer.text, answer.finish_reason)
            assert outcome.completion_tokens == len(answer.token_ids)
            assert outcome.usage is not None
            assert outcome.usage["prompt_tokens"] == tokens
            assert pool.to_flip == 0
            assert pool.since(before) == (1, 1, 2)
            sent = pool.landed_tokens() - landed
            assert sent >= 2 * tokens
            assert_equal(await ask_all(client, [answer], at_once=1), [answer])
            assert pool.since(before) == (1, 1, 3)
            assert pool.landed_tokens() - landed - sent <= 64
    await pool.deployment.until_idle()


async def test_case_35_others_are_not_concerned(pool: FlippingPool, answers: list[Answer]) -> None:
    """Six requests at once, two of them hit; those that come from the same prefix are among them."""
    some = [a for a in answers if len(a.prompt_ids) in (31, 65, 97, 129, 192, 256) and a.prompt.message is None]
    before = pool.counts()
    pool.flip(2)
    async with pool.deployment.client(pool.router) as client:
        asked = (client.ask(a.prompt, stream=False, max_tokens=MAX_TOKENS) for a in some)
        outcomes = await asyncio.gather(*asked)
    assert [(o.status, o.text, o.finish_reason) for o in outcomes] == [(200, a.text, a.finish_reason) for a in some]
    assert pool.since(before) == (2, 2, len(some) + 2)
    await pool.deployment.until_idle()


async def test_case_35_where_every_try_is_hit_the_client_gets_an_error_and_no_text(pool: FlippingPool) -> None:
    """The error's own status and code, no choices; what was tried leaves nothing that the next one could find."""
    prompt = new_prompt(pool.deployment, 200)
    before = pool.counts()
    pool.flip(100)
    try:
        async with pool.deployment.client(pool.router) as client:
            failed = await client.ask(prompt, stream=False, max_tokens=8)
            assert failed.status == 502
            assert failed.body is not None
            assert list(failed.body) == ["error"]
            assert failed.error is not None
            assert failed.error["code"] == "checksum_mismatch"
            assert "does not hold what prefill worker p0 sent for tokens" in failed.error["message"]
            assert pool.since(before) == (MAX_RETRIES + 1, MAX_RETRIES, MAX_RETRIES + 1)
            await pool.deployment.until_idle()
            pool.flip(0)
            landed = pool.landed_tokens()
            fine = await client.ask(prompt, stream=False, max_tokens=8)
            assert (fine.status, fine.completion_tokens) == (200, 8)
            assert pool.landed_tokens() - landed >= 200
            async with pool.deployment.client("r0") as other:
                assert (await other.ask(prompt, stream=False, max_tokens=8)).text == fine.text
    finally:
        pool.flip(0)
    await pool.deployment.until_idle()


async def test_case_35_a_stream_that_has_its_first_token_ends_with_the_error(
    pool: FlippingPool, answers: list[Answer]
) -> None:
    """That token came from the prefill worker; not one follows that was computed from the changed KV."""
    answer = by_length(answers, 193)
    before = pool.counts()
    pool.flip(1)
    pool.hold.touch()
    try:
        async with pool.deployment.client(pool.router) as client:
            streamed = pool.first_tokens()
            task = asyncio.create_task(client.ask(answer.prompt, stream=True, max_tokens=8))
            await pool.deployment.until(lambda: pool.first_tokens() > streamed, "the first token", during=task)
            pool.hold.unlink()
            outcome = await task
    finally:
        pool.hold.unlink(missing_ok=True)
    assert outcome.status == 200
    assert outcome.text == answer.text_of(pool.deployment.book, 1)
    assert outcome.error is not None
    assert outcome.error["code"] == "checksum_mismatch"
    assert outcome.events[-1] == {"error": outcome.error}
    assert outcome.finish_reason is None
    assert pool.since(before) == (1, 0, 1)
    await pool.deployment.until_idle()
