"""An OpenAI client that shows everything: each SSE event with its arrival time, errors as they were sent."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from .prompts import Prompt


@dataclass
class Outcome:
    """One finished request: what a client can tell of it."""

    status: int
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    body: dict[str, Any] | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    done: int = 0
    content_type: str = ""

    @property
    def completion_tokens(self) -> int:
        return int((self.usage or {})["completion_tokens"])

    @property
    def cached_tokens(self) -> int:
        details = (self.usage or {}).get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)


def _choice_text(choice: dict[str, Any]) -> str:
    part = choice.get("message") or choice.get("delta") or choice
    return str(part.get("content") or part.get("text") or "")


class Client:
    """Requests to one router; streaming unless told otherwise."""

    def __init__(self, url: str, model: str, headers: dict[str, str] | None = None) -> None:
        self.model = model
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(base_url=url, timeout=120, limits=limits, headers=headers, trust_env=False)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def ask(self, prompt: Prompt, *, stream: bool = True, **fields: Any) -> Outcome:
        body = {"model": self.model, **prompt.body(**fields)}
        return await self.post(prompt.path, body, stream=stream)

    async def post(self, path: str, body: dict[str, Any], *, stream: bool = False) -> Outcome:
        if not stream:
            response = await self.http.post(path, json=body)
            return self._whole(response)
        body = {"stream": True, "stream_options": {"include_usage": True}, **body}
        async with self.http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                return self._whole(response)
            return await self.collect(response)

    @staticmethod
    def _whole(response: httpx.Response) -> Outcome:
        out = Outcome(response.status_code, content_type=response.headers.get("content-type", ""))
        out.body = response.json()
        assert isinstance(out.body, dict)
        out.error, out.usage = out.body.get("error"), out.body.get("usage")
        for choice in out.body.get("choices", ())[:1]:
            out.text, out.finish_reason = _choice_text(choice), choice["finish_reason"]
        return out

    @staticmethod
    async def collect(response: httpx.Response, stop_after: int | None = None) -> Outcome:
        """Read the SSE stream to its end, or only the first `stop_after` events that carry text."""
        out = Outcome(response.status_code, content_type=response.headers.get("content-type", ""))
        seen = 0
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                assert not line or line.startswith((":", "event:")), f"not SSE: {line!r}"
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                out.done += 1
                continue
            event = json.loads(data)
            out.events.append(event)
            out.times.append(time.monotonic())
            if "error" in event:
                out.error = event["error"]
                continue
            out.usage = event.get("usage") or out.usage
            for choice in event.get("choices", ()):
                text = _choice_text(choice)
                out.text += text
                seen += bool(text)
                out.finish_reason = choice.get("finish_reason") or out.finish_reason
            if stop_after is not None and seen >= stop_after:
                break
        return out
