"""The clients people use: the openai SDK, and the smoke script with curl."""

from __future__ import annotations

import asyncio

import openai
import pytest

from .cluster import ROOT
from .reference import Answer
from .topology import Deployment

pytestmark = pytest.mark.e2e


async def test_openai_sdk_streams_a_chat(deployment: Deployment, answers: list[Answer]) -> None:
    answer = next(a for a in answers if a.prompt.name == "chat-0")
    async with openai.AsyncOpenAI(base_url=deployment.url("r0") + "/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model=deployment.model,
            messages=[{"role": "user", "content": answer.prompt.message or ""}],
            temperature=0,
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    choices = [c.choices[0] for c in chunks if c.choices]
    assert "".join(c.delta.content or "" for c in choices) == answer.text
    assert choices[0].delta.role == "assistant"
    assert [c.finish_reason for c in choices if c.finish_reason] == ["stop"]
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(answer.prompt_ids), len(answer.token_ids))
    assert len({c.id for c in chunks}) == 1


async def test_openai_sdk_sees_typed_errors(deployment: Deployment) -> None:
    async with openai.AsyncOpenAI(base_url=deployment.url("r0") + "/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="gpt-unknown", prompt="hi")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model=deployment.model, prompt="hi", max_tokens=-1)
        assert refused.value.param == "max_tokens"
        models = [model.id async for model in client.models.list()]
    assert models == [deployment.model]


async def test_smoke_script(deployment: Deployment) -> None:
    async def smoke(url: str) -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            "bash",
            str(ROOT / "deploy" / "smoke.sh"),
            url,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await process.communicate()
        return process.returncode, out.decode()

    code, text = await smoke(deployment.url("r0"))
    assert code == 0, text
    code, text = await smoke("http://127.0.0.1:9")
    assert code != 0, f"smoke.sh must fail where nothing listens:\n{text}"
