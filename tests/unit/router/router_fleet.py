"""A router with fake workers behind it, all in the test's event loop, spoken to over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from router.app import Router, router_app
from router.settings import RouterSettings
from transport.model import model_info
from transport.serve import bind
from transport.testing import FakeDecode, FakePrefill, FakeWorker, Hosted

TOKEN = "unit-test-token"
AUTH = {"Authorization": f"Bearer {TOKEN}"}
EOS = 257
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.first %}{{ raise_exception('user first') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_model(directory: Path) -> Path:
    """A model directory with a byte-level tokenizer: one token per byte (0…255), and EOS as a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    vocab["<pad>"] = 256
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    assert tokenizer.token_to_id("<eos>") == EOS
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"max_position_embeddings": 512, "vocab_size": 300, "num_attention_heads": 1, "eos_token_id": EOS}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": TEMPLATE}))
    return directory


class Fleet:
    """Add workers, `start` the router, ask it; `close` ends everything."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.model = model_info(model_dir, model_dir.name)
        self.tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self.prefill: list[FakePrefill] = []
        self.decode: list[FakeDecode] = []
        self.hosts: dict[FakeWorker, Hosted] = {}
        self.stack = AsyncExitStack()
        self.router: Router
        self.http: httpx.AsyncClient
        self.url = ""

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def host(self, worker: FakeWorker, port: int = 0) -> Hosted:
        host = Hosted(worker, TOKEN, port)
        self.hosts[worker] = host
        return host

    def add_prefill(self) -> FakePrefill:
        worker = FakePrefill(f"p{len(self.prefill)}", self.model)
        worker.successor = self.successor
        self.prefill.append(worker)
        self.host(worker)
        return worker

    def add_decode(self, **shape: int) -> FakeDecode:
        worker = FakeDecode(f"d{len(self.decode)}", self.model, **shape)
        worker.successor = self.successor
        self.decode.append(worker)
        self.host(worker)
        return worker

    def successor(self, token: int) -> int:
        """The fake model says the alphabet: after a comes b, after z or anything else comes a."""
        char = self.tokenizer.id_to_token(token) or ""
        following = chr(ord(char) + 1) if len(char) == 1 and "a" <= char < "z" else "a"
        return self.tokenizer.token_to_id(following)

    def restart(self, worker: FakeWorker) -> Any:
        """A new life of the worker (another generation) on the same port."""
        port = self.hosts.pop(worker).port
        kind, name = type(worker), worker.name
        fresh = kind(name, self.model)
        fresh.successor = worker.successor
        fleet = self.prefill if isinstance(worker, FakePrefill) else self.decode
        fleet[fleet.index(worker)] = fresh  # type: ignore[call-overload]
        self.host(fresh, port)
        return fresh

    async def start(self, *, wait: bool = True, **settings: Any) -> None:
        values: dict[str, Any] = {
            "model": self.model_dir,
            "name": "router-under-test",
            "token": TOKEN,
            "prefill": [self.hosts[w].url for w in self.prefill],
            "decode": [self.hosts[w].url for w in self.decode],
            "ping_interval_s": 0.1,
            "dead_after_s": 2.0,
            "reconnect_max_s": 0.1,
            "grace_s": 2.0,
            **settings,
        }
        app = router_app(RouterSettings.model_validate(values))
        self.router = app.state.router
        self.url = await self.stack.enter_async_context(serving(app))
        self.http = await self.stack.enter_async_context(
            httpx.AsyncClient(base_url=self.url, timeout=20, trust_env=False)
        )
        if wait:
            await self.until(lambda: self.router.registry.not_ready() is None and self.all_open())

    def all_open(self) -> bool:
        registry = self.router.registry
        return all(registry.pools.is_open(p, d) for p in registry.prefill for d in registry.decode)

    async def until(self, condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
        """Poll a condition on the router, whose insides have nothing to await."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.005)

    async def until_idle(self) -> None:
        """Neither the router nor any worker holds anything."""
        for worker in [*self.prefill, *self.decode]:
            await worker.until_free()
        await self.until(lambda: len(self.router.calls) == 0 and self.router.gate.inside == 0)
        assert all(p.in_flight == p.outstanding == 0 for p in self.router.registry.prefill)

    async def close(self) -> None:
        await self.stack.aclose()
        await asyncio.gather(*(host.stop() for host in self.hosts.values()))

    # ---- asking

    def body(self, prompt: str = "say a", **fields: Any) -> dict[str, Any]:
        return {"model": self.model_dir.name, "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}

    async def complete(self, prompt: str = "say a", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json=self.body(prompt, **fields))

    async def chat(self, content: Any = "say a", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def events(self, prompt: str = "say a", *, path: str = "/v1/completions", **fields: Any) -> list[Any]:
        """All events of a stream: dicts, and "[DONE]"."""
        body = self.body(prompt, stream=True, **fields)
        if "messages" in body:
            del body["prompt"]
        async with self.http.stream("POST", path, json=body) as response:
            assert response.status_code == 200, await response.aread()
            return [event async for event in sse(response)]

    async def metric(self, name: str, **labels: str) -> float:
        text = (await self.http.get("/metrics", headers=AUTH)).text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples if s.name == name]
        assert samples, f"no metric {name}"
        return sum(s.value for s in samples if labels.items() <= s.labels.items())


async def sse(response: httpx.Response) -> AsyncIterator[Any]:
    async for line in response.aiter_lines():
        if line:
            assert line.startswith("data: "), line
            yield line[6:] if line == "data: [DONE]" else json.loads(line[6:])


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [c for e in events if isinstance(e, dict) for c in e.get("choices", ()) if c["index"] == index]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)


def finish_of(events: list[Any], index: int = 0) -> list[str]:
    choices = [c for e in events if isinstance(e, dict) for c in e.get("choices", ()) if c["index"] == index]
    return [c["finish_reason"] for c in choices if c["finish_reason"]]


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """The app on a free port of this machine."""

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Any:
            yield

    listener = bind("127.0.0.1", 0)
    server = Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1, lifespan="on"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()
