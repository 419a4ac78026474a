"""What a client sees of single requests: first tokens, streams, usage, content types, limits."""

from __future__ import annotations

import asyncio
import itertools

import httpx
import pytest

from .client import Client
from .prompts import Prompt
from .reference import Answer
from .topology import MAX_MODEL_LEN, PREFILL_BLOCK, Deployment

pytestmark = pytest.mark.e2e
fresh = itertools.count(10_000)


def new_prompt(deployment: Deployment, tokens: int) -> Prompt:
    """A prompt that no cache has seen."""
    return Prompt(f"new-{tokens}", token_ids=deployment.book.tokens(tokens, seed=next(fresh)))


def by_length(answers: list[Answer], tokens: int) -> Answer:
    return next(a for a in answers if a.prompt.message is None and len(a.prompt_ids) == tokens)


def stopping(answers: list[Answer]) -> Answer:
    return next(a for a in answers if a.finish_reason == "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_case_39_one_token_is_one_token(deployment: Deployment, answers: list[Answer], stream: bool) -> None:
    answer = by_length(answers, 65)
    async with deployment.client("r0") as client:
        outcome = await client.ask(answer.prompt, stream=stream, max_tokens=1)
    assert (outcome.status, outcome.finish_reason, outcome.completion_tokens) == (200, "length", 1)
    assert outcome.text == answer.text_of(deployment.book, 1)
    assert outcome.done == int(stream)


async def test_case_m6_one_token_never_touches_decode(deployment: Deployment, answers: list[Answer]) -> None:
    before = deployment.reservations("r0")
    async with deployment.client("r0") as client:
        for tokens in (8, 129, 321):
            outcome = await client.ask(by_length(answers, tokens).prompt, max_tokens=1)
            assert outcome.completion_tokens == 1
    assert deployment.reservations("r0") == before


@pytest.mark.parametrize("stream", [False, True])
async def test_case_41_eos_as_first_token(deployment: Deployment, answers: list[Answer], stream: bool) -> None:
    """The prompt holds the whole answer but its EOS: stop, no text, one [DONE], and no garbage after it."""
    answer = stopping(answers)
    ends = Prompt("ends", token_ids=(*answer.prompt_ids, *answer.token_ids[:-1]))
    async with deployment.client("r0") as client:
        outcome = await client.ask(ends, stream=stream, max_tokens=9)
    assert (outcome.status, outcome.text, outcome.finish_reason) == (200, "", "stop")
    assert outcome.done == int(stream)
    assert outcome.completion_tokens == 1
    deployment.assert_idle()


async def test_case_41_ignore_eos_goes_on(deployment: Deployment, answers: list[Answer]) -> None:
    answer = stopping(answers)
    ends = Prompt("ends", token_ids=(*answer.prompt_ids, *answer.token_ids[:-1]))
    async with deployment.client("r0") as client:
        outcome = await client.ask(ends, max_tokens=9, ignore_eos=True)
    assert (outcome.finish_reason, outcome.completion_tokens, outcome.done) == ("length", 9, 1)


async def test_case_42_prefill_ended_by_a_stop_string(deployment: Deployment, answers: list[Answer]) -> None:
    """The first token completes a stop string: the request ends there and decode gives its lease back."""
    answer = by_length(answers, 64)
    first = answer.text_of(deployment.book, 1)
    async with deployment.client("r0") as client:
        outcome = await client.ask(answer.prompt, max_tokens=12, stop=[first.strip()])
    assert (outcome.status, outcome.text.strip(), outcome.finish_reason, outcome.done) == (200, "", "stop", 1)
    deployment.assert_idle()


async def test_stop_string_in_mid_stream(deployment: Deployment, answers: list[Answer]) -> None:
    answer = by_length(answers, 128)
    stop = answer.text[12:20]
    async with deployment.client("r0") as client:
        outcome = await client.ask(answer.prompt, max_tokens=16, stop=stop)
    assert (outcome.text, outcome.finish_reason) == (answer.text[: answer.text.index(stop)], "stop")
    deployment.assert_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_case_45_cached_tokens_are_real_hits(deployment: Deployment, stream: bool) -> None:
    prompt = new_prompt(deployment, 161)
    async with deployment.client("r0") as client:
        first = await client.ask(prompt, stream=stream, max_tokens=3)
        second = await client.ask(prompt, stream=stream, max_tokens=3)
    assert first.text == second.text
    assert first.cached_tokens == 0
    assert second.cached_tokens == 160 // PREFILL_BLOCK * PREFILL_BLOCK
    for outcome in (first, second):
        assert outcome.usage is not None
        assert (outcome.usage["prompt_tokens"], outcome.completion_tokens) == (161, 3)
        assert outcome.usage["total_tokens"] == 164


async def test_case_55_and_56_tokens_come_one_by_one(deployment: Deployment, answers: list[Answer]) -> None:
    """The first token is there long before the last, and every token is its own event."""
    answer = by_length(answers, 256)
    async with deployment.client("r0") as client:
        outcome = await client.ask(answer.prompt, max_tokens=16)
    texts = [e for e in outcome.events if e.get("choices") and e["choices"][0].get("text")]
    assert len(texts) >= 12
    waits = [after - before for before, after in itertools.pairwise(outcome.times)]
    assert sum(wait > 0.002 for wait in waits) >= 10, f"the events came in bursts: {waits}"


async def test_case_61_content_types(deployment: Deployment, answers: list[Answer]) -> None:
    answer = by_length(answers, 5)
    async with deployment.client("r0") as client:
        whole = await client.ask(answer.prompt, stream=False, max_tokens=2)
        stream = await client.ask(answer.prompt, stream=True, max_tokens=2)
        error = await client.ask(answer.prompt, stream=True, max_tokens=-2)
    assert whole.content_type.startswith("application/json")
    assert stream.content_type.startswith("text/event-stream")
    assert (error.status, error.content_type.split(";")[0]) == (400, "application/json")


async def test_case_34_a_long_prompt_in_many_chunks_converges(deployment: Deployment) -> None:
    """As long as the model's context allows, at a chunk budget of 128."""
    prompt = new_prompt(deployment, MAX_MODEL_LEN - 4)
    async with deployment.client("r1") as client:
        outcome = await client.ask(prompt, max_tokens=4, ignore_eos=True)
        again = await client.ask(prompt, max_tokens=4, ignore_eos=True)
    assert (outcome.status, outcome.finish_reason, outcome.completion_tokens) == (200, "length", 4)
    assert again.text == outcome.text
    deployment.assert_idle()


async def test_case_51_too_long_is_the_same_400_everywhere(deployment: Deployment) -> None:
    prompt = new_prompt(deployment, MAX_MODEL_LEN + 1)
    before = deployment.prefills("p0")
    async with deployment.client("r0") as client:
        for stream in (False, True):
            outcome = await client.ask(prompt, stream=stream, max_tokens=4)
            assert outcome.status == 400
            assert outcome.error is not None
            assert outcome.error["code"] == "context_length_exceeded"
    assert deployment.prefills("p0") == before


async def test_case_67_routing_fields_of_clients_do_nothing(deployment: Deployment, answers: list[Answer]) -> None:
    """Worker addresses and transfer parameters that a client sends are refused or ignored, never passed on."""
    answer = by_length(answers, 33)
    params = {"do_remote_decode": True, "lease": {"id": "x", "block_ids": [0]}, "remote_host": "127.0.0.1"}
    headers = {"x-prefiller-host-port": "127.0.0.1:1", "x-data-parallel-rank": "7", "x-hawk-decode": "none"}
    async with Client(deployment.url("r0"), deployment.model, headers) as client:
        outcome = await client.ask(answer.prompt, max_tokens=4, kv_transfer_params=params)
        assert outcome.status in (200, 400)
        plain = await client.ask(answer.prompt, max_tokens=4)
    assert (plain.status, plain.text) == (200, answer.text_of(deployment.book, 4))
    if outcome.status == 200:
        assert outcome.text == plain.text
    assert "127.0.0.1" not in str(plain.events)


async def test_case_13_prefill_gives_everything_back_after_its_one_token(deployment: Deployment) -> None:
    """While D still streams, P holds nothing of the request any more."""
    async with deployment.client("r0") as client:
        prompt = new_prompt(deployment, 130)
        task = asyncio.create_task(client.ask(prompt, max_tokens=60, ignore_eos=True))
        await deployment.until(lambda: deployment.decoding("d0") == 1, "decoding")
        await deployment.until(lambda: deployment.held_by_prefill("p0") == 0, "P gave its blocks back")
        assert deployment.decoding("d0") == 1
        assert not task.done()
        outcome = await task
    assert outcome.completion_tokens == 60


async def test_sampled_text_with_a_seed_repeats(deployment: Deployment) -> None:
    prompt = new_prompt(deployment, 40)
    async with deployment.client("r0") as client:
        a, b = [await client.ask(prompt, max_tokens=8, temperature=0.9, top_p=0.9, seed=7) for _ in range(2)]
        c = await client.ask(prompt, max_tokens=8, temperature=0.9, top_p=0.9, seed=8)
    assert a.text == b.text
    assert c.status == 200


async def test_logprobs_for_every_token(deployment: Deployment, answers: list[Answer]) -> None:
    """N entries for N tokens: the handed-over first token's are not lost."""
    answer = by_length(answers, 47)
    async with deployment.client("r0") as client:
        outcome = await client.ask(answer.prompt, stream=False, max_tokens=5, logprobs=2)
    assert outcome.body is not None
    logprobs = outcome.body["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 5
    assert "".join(logprobs["tokens"]) == answer.text_of(deployment.book, 5)
    assert all(p <= 0 for p in logprobs["token_logprobs"])


async def test_models_and_probes(deployment: Deployment) -> None:
    async with httpx.AsyncClient(base_url=deployment.url("r0"), trust_env=False) as http:
        models = (await http.get("/v1/models")).json()
        assert [m["id"] for m in models["data"]] == [deployment.model]
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).status_code == 200
