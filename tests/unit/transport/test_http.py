"""The HTTP base of the roles, served by uvicorn: one error shape, the token, the body limit, probes, signals."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from session_harness import HEADERS, TOKEN, Recorder, worker

from transport.errors import ConfigurationError
from transport.http import bind, serve


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with (
        worker(Recorder(), max_body_bytes=1000) as url,
        httpx.AsyncClient(base_url=url, headers=HEADERS, trust_env=False) as client,
    ):
        yield client


def check_error(response: httpx.Response, status: int, code: str) -> str:
    """One shape for all errors → the message."""
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert error["code"] == code
    assert error["message"]
    return error["message"]


# ---- probes and the token --------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probes_are_open(client: httpx.AsyncClient, path: str) -> None:
    response = await client.get(path, headers={"Authorization": ""})
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"


async def test_ready_says_why_not() -> None:
    async with worker(Recorder(), ready="the model is loading") as url, httpx.AsyncClient(trust_env=False) as client:
        assert check_error(await client.get(f"{url}/ready"), 503, "not_ready") == "the model is loading"
        assert (await client.get(f"{url}/health")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/info", "/metrics", "/v1/session", "/nowhere", "/health/../metrics"])
@pytest.mark.parametrize("header", ["", "Bearer wrong", "Basic x"])
async def test_everything_else_needs_the_token(client: httpx.AsyncClient, path: str, header: str) -> None:
    response = await client.get(path, headers={"Authorization": header})
    check_error(response, 401, "authentication_failed")
    assert response.headers["www-authenticate"] == "Bearer"


async def test_with_the_token(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/info")).json() == {"worker": "prefill-0"}
    metrics = await client.get("/metrics")
    assert metrics.status_code == 200
    assert metrics.headers["content-type"].startswith("text/plain")


async def test_metrics_may_be_public() -> None:
    async with worker(Recorder(), metrics_public=True) as url, httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"{url}/metrics")).status_code == 200
        check_error(await client.get(f"{url}/v1/info"), 401, "authentication_failed")


# ---- bad requests ----------------------------------------------------------------------------------


async def test_unknown_paths_and_methods(client: httpx.AsyncClient) -> None:
    check_error(await client.get("/nowhere"), 404, "not_found")
    response = await client.post("/v1/info")
    check_error(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "GET"


@pytest.mark.parametrize("body", [b"{", b"", b"\xff\xfe", b"[" * 400, b'{"a": 1e999}', b"nul", b'{"a": NaN}'])
async def test_a_body_that_is_no_valid_json_is_a_400(client: httpx.AsyncClient, body: bytes) -> None:
    response = await client.post("/echo", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_a_number_of_ten_thousand_digits_is_a_400() -> None:
    async with worker(Recorder()) as url, httpx.AsyncClient(headers=HEADERS, trust_env=False) as client:
        body = b'{"a": ' + b"9" * 10_000 + b"}"
        response = await client.post(f"{url}/echo", content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400


@pytest.mark.parametrize("body", [{"a": "x"}, [], "text", None, {"\ud800": "x"}])
async def test_a_wrong_type_is_a_400(client: httpx.AsyncClient, body: object) -> None:
    response = await client.post("/echo", content=json.dumps(body), headers={"Content-Type": "application/json"})
    check_error(response, 400, "invalid_request")


async def test_the_field_is_named(client: httpx.AsyncClient) -> None:
    response = await client.post("/echo", json={"count": "many"})
    assert "count" in check_error(response, 400, "invalid_request")
    assert response.json()["error"]["param"] == "count"


async def test_a_bug_is_a_500_without_its_text(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert "secret" not in check_error(await client.get("/broken"), 500, "internal_error")
    assert "a bug with a secret in it" in caplog.text


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [1001, 5_000_000])
async def test_case_62_a_body_over_the_limit_is_a_413(client: httpx.AsyncClient, chunked: bool, size: int) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, size, 65536):
            yield b"x" * min(65536, size - start)

    response = await client.post("/echo", content=chunks() if chunked else b"x" * size)
    assert "1000 bytes" in check_error(response, 413, "payload_too_large")


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_at_the_limit_passes(client: httpx.AsyncClient, chunked: bool) -> None:
    body = b'{"a": 1' + b" " * 992 + b"}"
    assert len(body) == 1000

    async def chunks() -> AsyncIterator[bytes]:
        yield body[:500]
        yield body[500:]

    headers = {"Content-Type": "application/json"}
    response = await client.post("/echo", content=chunks() if chunked else body, headers=headers)
    assert response.json() == {"a": 1}


async def test_without_the_token_no_body_is_read(client: httpx.AsyncClient) -> None:
    url = client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n")
    status = await asyncio.wait_for(reader.readline(), 10)
    assert b" 401 " in status
    writer.close()


# ---- serving ---------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_named() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"port {port} on 127\.0\.0\.1 is taken"):
            bind("127.0.0.1", port)


def test_an_address_that_is_not_ours_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot listen on 203\.0\.113\.1"):
        bind("203.0.113.1", 0)


async def test_a_peer_that_stops_reading_is_reset() -> None:
    failed = asyncio.get_running_loop().create_future()

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
        except OSError as error:
            failed.set_result(error)

    listener = bind("127.0.0.1", 0, unread_timeout_s=0.5)
    async with await asyncio.start_server(pour, sock=listener):
        with socket.create_connection(listener.getsockname()):
            assert isinstance(await asyncio.wait_for(failed, 10), TimeoutError)


async def never(scope: object, receive: object, send: object) -> None:
    """An app that does nothing but start and stop."""
    while (await receive())["type"] != "lifespan.shutdown":  # type: ignore[operator]
        await send({"type": "lifespan.startup.complete"})  # type: ignore[operator]
    await send({"type": "lifespan.shutdown.complete"})  # type: ignore[operator]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_then_serve_returns(number: int) -> None:
    steps: list[str] = []

    async def drain() -> None:
        steps.append("draining")
        await asyncio.sleep(0)
        steps.append("drained")

    await serve(never, "127.0.0.1", 0, drain=drain, on_started=lambda port: os.kill(os.getpid(), number))
    assert steps == ["draining", "drained"]


async def test_a_drain_that_hangs_ends_with_its_grace() -> None:
    async def drain() -> None:
        await asyncio.Event().wait()

    async with asyncio.timeout(10):
        await serve(
            never,
            "127.0.0.1",
            0,
            drain=drain,
            grace_s=0.05,
            on_started=lambda port: os.kill(os.getpid(), signal.SIGTERM),
        )


async def test_a_second_signal_ends_at_once() -> None:
    async def drain() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    async with asyncio.timeout(10):
        await serve(never, "127.0.0.1", 0, drain=drain, on_started=lambda port: os.kill(os.getpid(), signal.SIGTERM))


def test_the_token_is_not_in_the_settings_text() -> None:
    from session_harness import settings

    assert TOKEN not in repr(settings())
    assert TOKEN not in settings().model_dump_json()


async def test_a_body_that_does_not_arrive_is_a_408() -> None:
    async with worker(Recorder(), body_timeout_s=0.2) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        lines = [
            "POST /echo HTTP/1.1",
            f"Host: {host}",
            f"Authorization: Bearer {TOKEN}",
            "Content-Length: 10",
            "",
            "{",
        ]
        writer.write("\r\n".join(lines).encode())
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 5)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"body_timeout"' in answer
