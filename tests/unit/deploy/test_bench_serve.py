"""The load generator measures what it says, and the report's ratios are those of its rows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence

import httpx
import pytest

from deploy.bench import serve
from deploy.bench.load import Load, Timing, summary


class Paced(httpx.AsyncBaseTransport):
    """A completion server that knows how many requests it served at once, and how long a token takes.

    `slow`: prompts whose tokens take longer.
    """

    def __init__(
        self, step_s: float = 0.0, status: int = 200, lose: int = 0, error: bool = False, slow: Sequence[int] = ()
    ) -> None:
        self.step_s, self.status, self.lose, self.error, self.slow = step_s, status, lose, error, slow
        self.running = self.most = 0
        self.prompts: list[list[int]] = []
        self.found_running: list[int] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread())
        self.prompts.append(body["prompt"])
        self.found_running.append(self.running)
        if self.status != 200:
            return httpx.Response(self.status, json={"error": {"message": "no"}})
        return httpx.Response(200, content=self.stream(body["prompt"][0], body["max_tokens"] - self.lose))

    async def stream(self, prompt: int, tokens: int) -> AsyncIterator[bytes]:
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(tokens):
            await asyncio.sleep(0.02 if prompt in self.slow else self.step_s)
            yield b'data: {"choices": [{"text": "x"}]}\n\n'
        if self.error:
            yield b'data: {"error": {"message": "decode worker lost"}}\n\n'
        yield b'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\ndata: [DONE]\n\n' % tokens
        self.running -= 1


async def run(server: Paced, prompts: int = 6, concurrency: int = 2, load: str = "closed") -> Load:
    return await serve.LOADS[load](
        "http://server",
        "m",
        [[i] for i in range(prompts)],
        concurrency=concurrency,
        output_tokens=4,
        transport=server,
    )


@pytest.mark.parametrize("kind", ["wave", "closed"])
async def test_every_prompt_once_and_never_more_at_once_than_asked(kind: str) -> None:
    server = Paced()
    load = await run(server, load=kind)
    assert sorted(server.prompts) == [[i] for i in range(6)]
    assert server.most == 2
    assert [t.tokens for t in load.timings] == [4] * 6


async def test_a_wave_waits_for_all_of_the_one_before() -> None:
    server = Paced(slow=[0])
    await run(server, load="wave")
    assert server.found_running[2] == 0

    server = Paced(slow=[0])
    await run(server, load="closed")
    assert server.found_running[2] == 1, "prompt 0 still ran when prompt 2 came"


async def test_ttft_and_tpot_are_those_of_the_server() -> None:
    load = await run(Paced(step_s=0.02), prompts=1, concurrency=1)
    timing = load.timings[0]
    assert 0.02 <= timing.ttft_s < 0.2
    assert timing.tpot_s is not None
    assert 0.019 <= timing.tpot_s < 0.2
    assert load.tokens_per_s == pytest.approx(4 / load.seconds)


@pytest.mark.parametrize("server", [Paced(status=503), Paced(lose=1), Paced(error=True)])
async def test_what_is_not_the_asked_answer_is_not_timed(server: Paced) -> None:
    with pytest.raises(ExceptionGroup) as failed:
        await run(server)
    assert failed.group_contains(RuntimeError)


def test_summary_over_rounds() -> None:
    rounds = [Load([Timing(0.1, 0.01, 11)], 1.0), Load([Timing(0.3, None, 1)], 2.0)]
    out = summary(rounds)
    assert out["requests"] == 2
    assert (out["ttft_ms_mean"], out["ttft_ms_max"]) == (pytest.approx(200), pytest.approx(300))
    assert out["tpot_ms_mean"] == pytest.approx(10)
    assert out["tokens_per_s"] == pytest.approx(4)


def test_ratios_and_table() -> None:
    rows = [
        {
            "system": "vllm",
            "load": "wave",
            "concurrency": 8,
            "ttft_ms_p50": 400.0,
            "ttft_ms_max": 1.0,
            "tpot_ms_p50": 50.0,
            "tokens_per_s": 20.0,
        },
        {
            "system": "hawk",
            "load": "wave",
            "concurrency": 8,
            "ttft_ms_p50": 440.0,
            "ttft_ms_max": 1.0,
            "tpot_ms_p50": 25.0,
            "tokens_per_s": 30.0,
        },
    ]
    (ratio,) = serve.ratios(rows)
    assert ratio["added_ttft_percent"] == pytest.approx(10)
    assert (ratio["tpot_ratio"], ratio["tokens_per_s_ratio"]) == (pytest.approx(0.5), pytest.approx(1.5))
    assert "TTFT +10.0% (+40.0 ms), TPOT 0.50x, tokens/s 1.50x" in serve.table(rows, [ratio])


@pytest.mark.parametrize(
    "argv", [["--rounds", "0"], ["--concurrency", "0"], ["--prompt-tokens", "-1"], ["--dtype", "int3"]]
)
def test_bad_arguments_are_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        serve.main(argv)
