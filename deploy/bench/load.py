"""Load generators for OpenAI completions: TTFT, TPOT and tokens per second as a client sees them.

`waves` offers the same arrivals to whatever serves them, so that latencies compare; `closed_loop` keeps a
server busy, so that throughputs compare, but one that decodes faster sees its next prompts sooner, and queues.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

TIMEOUT_S = 600.0
VOCABULARY = (
    "the a old young river market lantern captain garden winter road carried found painted described near behind "
    "under before after evening morning stone bridge letter silver wooden quiet broken ancient village and then while"
)


@dataclass(frozen=True)
class Timing:
    """One request, in seconds. `tpot_s` is the mean time per token after the first, None for one token."""

    ttft_s: float
    tpot_s: float | None
    tokens: int


@dataclass(frozen=True)
class Load:
    """A measured round: every request's timing, and the wall time of all of them together."""

    timings: list[Timing]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return sum(t.tokens for t in self.timings) / self.seconds


def make_prompts(model: Path, count: int, tokens: int, seed: int) -> list[list[int]]:
    """`count` prompts of exactly `tokens` ids; prompts of different seeds or positions share no prefix block."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    rng, words = random.Random(seed), VOCABULARY.split()
    prompts = []
    for _ in range(count):
        text = f"{rng.getrandbits(64):x} " + " ".join(rng.choices(words, k=tokens))
        prompts.append(tokenizer.encode(text, add_special_tokens=False).ids[:tokens])
    return prompts


async def measure(client: httpx.AsyncClient, model: str, prompt: Sequence[int], output_tokens: int) -> Timing:
    """Stream one greedy completion of exactly `output_tokens` tokens.

    Raises RuntimeError where the server answers with anything else: a benchmark must not time errors.
    """
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    first = last = 0.0
    tokens = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(
                f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')[:500]}"
            )
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"the stream ended in an error: {event['error']}")
            if event.get("choices"):
                last = time.perf_counter()
                first = first or last
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    if tokens != output_tokens:
        raise RuntimeError(f"asked for {output_tokens} tokens, got {tokens}")
    return Timing(first - start, (last - first) / (tokens - 1) if tokens > 1 else None, tokens)


async def closed_loop(
    url: str,
    model: str,
    prompts: Sequence[Sequence[int]],
    *,
    concurrency: int,
    output_tokens: int,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Load:
    """Send every prompt once, `concurrency` at a time, each as soon as an earlier one has ended.

    `transport` replaces the network (tests).
    """
    queue = iter(prompts)
    timings: list[Timing] = []

    async def one_client(client: httpx.AsyncClient) -> None:
        for prompt in queue:
            timings.append(await measure(client, model, prompt, output_tokens))

    async with _client(url, transport) as client:
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(one_client(client))
        return Load(timings, time.perf_counter() - start)


async def waves(
    url: str,
    model: str,
    prompts: Sequence[Sequence[int]],
    *,
    concurrency: int,
    output_tokens: int,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Load:
    """Send `concurrency` prompts at once, and the next ones when all of these have ended."""
    timings: list[Timing] = []
    async with _client(url, transport) as client:
        start = time.perf_counter()
        for first in range(0, len(prompts), concurrency):
            async with asyncio.TaskGroup() as group:
                wave = prompts[first : first + concurrency]
                tasks = [group.create_task(measure(client, model, prompt, output_tokens)) for prompt in wave]
            timings += [task.result() for task in tasks]
        return Load(timings, time.perf_counter() - start)


def _client(url: str, transport: httpx.AsyncBaseTransport | None) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False, transport=transport)


def summary(rounds: Sequence[Load]) -> dict[str, float]:
    """Milliseconds and tokens/s over all rounds."""
    ttft = sorted(t.ttft_s * 1e3 for load in rounds for t in load.timings)
    tpot = sorted(t.tpot_s * 1e3 for load in rounds for t in load.timings if t.tpot_s is not None)
    seconds = sum(load.seconds for load in rounds)
    out = {
        "requests": float(len(ttft)),
        "ttft_ms_mean": statistics.fmean(ttft),
        "ttft_ms_p50": statistics.median(ttft),
        "ttft_ms_min": ttft[0],
        "ttft_ms_max": ttft[-1],
        "tokens_per_s": sum(t.tokens for load in rounds for t in load.timings) / seconds,
        "seconds": seconds,
    }
    if tpot:
        out |= {"tpot_ms_mean": statistics.fmean(tpot), "tpot_ms_p50": statistics.median(tpot)}
    return out
