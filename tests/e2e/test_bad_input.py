"""Bad input to every endpoint of every role: a clear 4xx with the error shape, never a 500, nothing leaked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgpack
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from transport.messages import PROTOCOL_VERSION, Attach
from transport.session.frames import encode
from transport.session.server import CLOSE_PROTOCOL

from .cluster import AUTH
from .topology import Deployment

pytestmark = pytest.mark.e2e

HUGE = 10**30
RAW: dict[str, bytes] = {
    "empty": b"",
    "open brace": b"{",
    "not utf-8": b"\xff\xfe{}",
    "array": b"[]",
    "string": b'"prompt"',
    "null": b"null",
    "deep nesting": b"[" * 100_000,
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "endless integer": b'{"max_tokens": ' + b"9" * 10_000 + b"}",
    "duplicate text": b'{"model": "x"} {"model": "x"}',
}

#: fields that make a good request bad, on both endpoints; each must be refused with 400
FIELDS: list[tuple[str, Any]] = [
    *[("max_tokens", v) for v in (0, -1, 1.5, "many", [], {}, HUGE, 10_000_000)],
    *[("temperature", v) for v in (-0.1, "hot", [], HUGE, {})],
    *[("top_p", v) for v in (0, -1, 1.01, "x", [])],
    *[("top_k", v) for v in (-5, 0.5, "x", HUGE)],
    *[("min_p", v) for v in (-0.1, 1.1, "x")],
    *[("n", v) for v in (0, -1, 100_000, "x", 1.5)],
    *[("stop", v) for v in (5, [5], {}, ["x"] * 10_000)],
    *[("seed", v) for v in ("x", 1.5, HUGE, [])],
    *[("stream", v) for v in ("perhaps", 7, [])],
    *[("stream_options", v) for v in ("x", 5, {"include_usage": "perhaps"})],
    *[("logprobs", v) for v in ("x", [], -1, HUGE)],
    ("no_such_field", 1),
]
PROMPTS: list[Any] = [None, 5, {}, [], [-1], [1.5], ["a", 1], [HUGE], [49152], [[]], [None], [{"a": 1}], [5] * 5000]
MESSAGES: list[Any] = [
    *(None, 5, "hi", {}, [], [5], [{}], [{"role": "user"}], [{"content": "hi"}], [[]]),
    [{"role": "nobody", "content": "hi"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": {"text": "hi"}}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]}],
    [{"role": "user", "content": [{"type": "nothing"}]}],
    [{"role": "user", "content": "word " * 5000}],
]


def assert_client_error(response: httpx.Response, what: object, *allowed: int) -> None:
    """A 4xx (one of `allowed`, if given) whose JSON body is an OpenAI error object with a message."""
    text = response.text[:300]
    assert 400 <= response.status_code < 500, f"{what!r}: {response.status_code} {text}"
    if allowed:
        assert response.status_code in allowed, f"{what!r}: {response.status_code} {text}"
    assert response.headers["content-type"].startswith("application/json"), f"{what!r}: {text}"
    error = response.json()["error"]
    assert error["message"], what
    assert isinstance(error["message"], str), what
    assert error["type"], what
    assert "Traceback" not in error["message"], what


@pytest.fixture
async def http(deployment: Deployment) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        yield client
    deployment.assert_idle()
    deployment.assert_ready()


async def test_raw_bodies(deployment: Deployment, http: httpx.AsyncClient) -> None:
    paths = [f"{deployment.url('r0')}{p}" for p in ("/v1/completions", "/v1/chat/completions", "/workers")]
    for url in paths:
        for what, body in RAW.items():
            response = await http.post(url, content=body, headers=AUTH | {"Content-Type": "application/json"})
            assert_client_error(response, (url, what), 400, 422)


async def test_not_a_number(deployment: Deployment, http: httpx.AsyncClient) -> None:
    for field in ("temperature", "top_p", "min_p", "max_tokens", "seed", "presence_penalty"):
        for value in ("NaN", "Infinity", "-Infinity", "1e999"):
            body = f'{{"model": "{deployment.model}", "prompt": [5], "{field}": {value}}}'
            response = await http.post(f"{deployment.url('r0')}/v1/completions", content=body)
            assert_client_error(response, (field, value), 400)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_fields(deployment: Deployment, http: httpx.AsyncClient, path: str) -> None:
    good: dict[str, Any] = {"model": deployment.model, "max_tokens": 2}
    if path == "/v1/completions":
        good["prompt"] = [5, 6, 7]
    else:
        good["messages"] = [{"role": "user", "content": "hi"}]
    for field, value in FIELDS:
        for stream in (False, True):
            body = good | {"stream": stream} | {field: value}
            response = await http.post(f"{deployment.url('r0')}{path}", json=body)
            assert_client_error(response, (field, value), 400)


async def test_prompts_and_messages(deployment: Deployment, http: httpx.AsyncClient) -> None:
    for prompt in PROMPTS:
        body = {"model": deployment.model, "prompt": prompt, "max_tokens": 2}
        assert_client_error(await http.post(f"{deployment.url('r0')}/v1/completions", json=body), prompt, 400)
    for messages in MESSAGES:
        body = {"model": deployment.model, "messages": messages, "max_tokens": 2}
        assert_client_error(await http.post(f"{deployment.url('r0')}/v1/chat/completions", json=body), messages, 400)


async def test_unknown_model(deployment: Deployment, http: httpx.AsyncClient) -> None:
    for model in ("gpt-unknown", "", "x" * 10_000, "../../etc/passwd"):
        body = {"model": model, "prompt": [5], "max_tokens": 2}
        assert_client_error(await http.post(f"{deployment.url('r0')}/v1/completions", json=body), model[:50], 404, 400)
        assert_client_error(await http.get(f"{deployment.url('r0')}/v1/models/{model or 'x'}"), model[:50], 404)
    for model in (5, [], {}):
        body = {"model": model, "prompt": [5], "max_tokens": 2}
        assert_client_error(await http.post(f"{deployment.url('r0')}/v1/completions", json=body), model, 400)


async def test_oversized_body(deployment: Deployment, http: httpx.AsyncClient) -> None:
    """Over the limit, both announced by Content-Length and streamed without one: 413 as JSON."""
    size = deployment.body_limit + 1024

    async def drip() -> AsyncIterator[bytes]:
        for _ in range(0, size, 65536):
            yield b" " * 65536

    url = f"{deployment.url('r0')}/v1/completions"
    assert_client_error(await http.post(url, content=b" " * size), "announced", 413)
    assert_client_error(await http.post(url, content=drip()), "chunked", 413)


async def test_methods_and_paths(deployment: Deployment, http: httpx.AsyncClient) -> None:
    for name in ("r0", "p0", "d0"):
        base = deployment.url(name)
        for path in ("/nothing", "/v1/nothing", "/v1/../etc/passwd", "/%00"):
            assert_client_error(await http.get(base + path, headers=AUTH), (name, path), 404, 405, 400)
        for path in ("/health", "/ready", "/metrics"):
            assert_client_error(await http.post(base + path, headers=AUTH, json={}), (name, path), 405)
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert_client_error(await http.get(deployment.url("r0") + path), path, 405)
    for name in ("p0", "d0"):
        assert_client_error(await http.post(deployment.url(name) + "/v1/info", headers=AUTH, json={}), name, 405)


async def test_missing_and_wrong_tokens(deployment: Deployment, http: httpx.AsyncClient) -> None:
    bad: list[dict[str, str]] = [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic " + AUTH["Authorization"].split()[1]},
        {"Authorization": "Bearer " + "x" * 5000},
    ]
    for headers in bad:
        for name in ("p0", "d0"):
            response = await http.get(deployment.url(name) + "/v1/info", headers=headers)
            assert_client_error(response, (name, headers), 401)
            with pytest.raises(InvalidStatus) as refused:
                async with connect(deployment.session_url(name), additional_headers=headers, proxy=None):
                    pass
            assert refused.value.response.status_code in (401, 403)
        for method in ("GET", "POST", "DELETE"):
            response = await http.request(method, deployment.url("r0") + "/workers", headers=headers)
            assert_client_error(response, (method, headers), 401)
        for name in ("r0", "p0", "d0"):
            response = await http.get(deployment.url(name) + "/metrics", headers=headers)
            assert_client_error(response, (name, headers), 401)
    assert (await http.get(deployment.url("p0") + "/v1/info", headers=AUTH)).status_code == 200


async def test_bad_workers(deployment: Deployment, http: httpx.AsyncClient) -> None:
    """The admin endpoint refuses what cannot be a worker, and the fleet stays as it was."""
    url = deployment.url("r0") + "/workers"
    before = (await http.get(url, headers=AUTH)).json()
    bad: list[Any] = [
        {},
        {"url": 5},
        {"url": ""},
        {"url": "not a url"},
        {"url": "ftp://127.0.0.1/"},
        {"url": "file:///etc"},
    ]
    bad += [[], None, {"url": "http://127.0.0.1:99999"}, {"url": deployment.url("d0"), "no_such_field": 1}]
    for body in bad:
        assert_client_error(await http.post(url, json=body, headers=AUTH), body, 400, 422)
    for body in ({"url": "http://127.0.0.1:1"}, {}, {"url": 5}, [], None):
        assert_client_error(await http.request("DELETE", url, json=body, headers=AUTH), body, 400, 404)
    assert len((await http.get(url, headers=AUTH)).json()) == len(before)


FRAMES: dict[str, bytes | str] = {
    "text": "hello",
    "empty": b"",
    "noise": bytes(range(256)),
    "truncated": msgpack.packb({"type": "attach"})[:-3],
    "number": msgpack.packb(5),
    "nil": msgpack.packb(None),
    "list": msgpack.packb([1, 2, 3]),
    "unknown type": msgpack.packb(["no_such_message", {}]),
    "unknown kind": msgpack.packb({"type": "no_such_message"}),
    "deep": b"\x91" * 10_000 + b"\x00",
    "bomb": b"\xdd\xff\xff\xff\xff",
    "large": msgpack.packb(b"x" * 3_000_000),
}


async def drain(ws: ClientConnection) -> None:
    """Read until the worker closes."""
    async with asyncio.timeout(10):
        while True:
            await ws.recv()


@pytest.mark.parametrize("name", ["p0", "d0"])
@pytest.mark.parametrize("attached", [False, True])
async def test_garbage_frames_end_the_session_and_nothing_else(
    deployment: Deployment, http: httpx.AsyncClient, name: str, attached: bool
) -> None:
    for what, frame in FRAMES.items():
        async with connect(deployment.session_url(name), additional_headers=AUTH, proxy=None, max_size=None) as ws:
            if attached:
                await ws.send(encode(Attach(protocol=PROTOCOL_VERSION, router="garbage", generation="0")))
                await ws.recv()
            await ws.send(frame)
            with pytest.raises(ConnectionClosed):
                await drain(ws)
        assert ws.close_code in (CLOSE_PROTOCOL, 1009), f"{what}: closed with {ws.close_code}, {ws.close_reason}"
    info = await http.get(deployment.url(name) + "/v1/info", headers=AUTH)
    assert info.status_code == 200
    json.loads(info.text)
