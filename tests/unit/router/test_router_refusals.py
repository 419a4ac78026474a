"""What the HTTP surface refuses, and how: always an OpenAI error object that names the field."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from router_fleet import AUTH, Fleet

from transport.messages import Prefill

HUGE = 10**30


def assert_error(response: httpx.Response, status: int, code: str | None = None, param: str | None = None) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert error["message"]
    if code is not None:
        assert error["code"] == code, error
    if param is not None:
        assert error["param"] == param, error


@pytest.fixture
async def lone(fleet: Fleet) -> Fleet:
    """A fleet whose P must never be asked."""
    await fleet.start()
    return fleet


NO_OBJECTS = (
    *(b"", b"{", b"\xff\xfe{}", b"[]", b"null", b'"x"', b"[" * 100_000, b'{"prompt": "\\ud800"}'),
    *(b'{"max_tokens": NaN}', b'{"temperature": 1e999}', b'{"a":1} {"a":2}'),
    b'{"max_tokens": ' + b"9" * 10_000 + b"}",
)
MESSAGES: tuple[Any, ...] = (
    *(None, 5, "hi", {}, [], [5], [{}], [{"role": "user"}], [{"content": "hi"}], [[]]),
    *([{"role": "nobody", "content": "x"}], [{"role": "user", "content": 5}], [{"role": "user", "content": [5]}]),
    *([{"role": "user", "content": [{"type": "text"}]}], [{"role": "assistant", "content": "I begin"}]),
)
UNSUPPORTED_MESSAGES: tuple[Any, ...] = (
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    {"role": "tool", "content": "x", "tool_call_id": "1"},
    {"role": "assistant", "content": "x", "tool_calls": [{}]},
)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/workers"])
async def test_bodies_that_are_no_json_object(lone: Fleet, path: str) -> None:
    for body in NO_OBJECTS:
        assert_error(await lone.http.post(path, content=body, headers=AUTH), 400)


#: field, values that are refused
FIELDS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("max_tokens", (0, -1, 1.5, "9", True, [], HUGE, 513)),
    ("temperature", (-0.1, 2.1, "1", True, HUGE)),
    ("top_p", (0, 1.1, "1", True)),
    ("top_k", (-2, 0.5, True, HUGE)),
    ("min_p", (-0.1, 1.1)),
    ("n", (0, -1, 129, 1.0, True)),
    ("seed", (1.5, "1", 2**63, HUGE)),
    ("stop", (5, "", [""], ["a"] * 17, [5], {}, "x" * 2000)),
    ("stop_token_ids", ([-1], [300], ["a"], 5)),
    ("stream", ("true", 1)),
    ("stream_options", ({"include_usage": True}, 5)),
    ("logprobs", (-1, 21, True)),
    ("model", (5, [])),
    ("prompt", (5, [], [[]], ["a", 1], [1.5], [-1], [300], [True], {}, "", ["a", []])),
)


async def test_completion_fields(lone: Fleet) -> None:
    for field, value in ((field, value) for field, values in FIELDS for value in values):
        for body in (lone.body() | {field: value}, lone.body(stream=True) | {field: value}):
            if field == "stream_options" and body.get("stream") and isinstance(value, dict):
                continue
            assert_error(await lone.http.post("/v1/completions", json=body), 400, param=field)
    assert lone.prefill[0].seen(Prefill) == []


async def test_messages(lone: Fleet) -> None:
    for messages in MESSAGES:
        response = await lone.http.post("/v1/chat/completions", json={"messages": messages})
        assert_error(response, 400, param="messages")


async def test_case_60_known_but_unsupported_messages(lone: Fleet) -> None:
    for message in UNSUPPORTED_MESSAGES:
        response = await lone.http.post("/v1/chat/completions", json={"messages": [message]})
        assert_error(response, 400, "unsupported_parameter", "messages")


#: field, a value that asks for something, one that does not
ON_AND_OFF: tuple[tuple[str, Any, Any], ...] = (
    ("frequency_penalty", 0.5, 0),
    ("presence_penalty", -1, 0.0),
    ("repetition_penalty", 1.1, 1),
    ("logit_bias", {"5": 1}, {}),
    ("tools", [{"type": "function"}], []),
    ("tool_choice", "required", "auto"),
    ("response_format", {"type": "json_object"}, {"type": "text"}),
    ("suffix", "x", ""),
    ("best_of", 2, 1),
    ("store", True, False),
    ("min_tokens", 1, 0),
    ("frequency_penalty", False, None),
)


async def test_case_60_known_fields_pass_only_when_they_ask_for_nothing(lone: Fleet) -> None:
    for field, on, off in ON_AND_OFF:
        assert_error(await lone.complete(**{field: on}), 400, "unsupported_parameter", field)
        assert (await lone.complete(**{field: off})).status_code == 200, field


async def test_case_60_unknown_fields_are_refused_and_harmless_ones_are_not(lone: Fleet) -> None:
    assert_error(await lone.complete(no_such_field=1), 400, param="no_such_field")
    assert_error(await lone.complete(no_such_field=None), 400, param="no_such_field")
    assert (await lone.complete(user="me", metadata={"a": "b"})).status_code == 200
    assert_error(await lone.complete(echo=True, logprobs=1), 400, "unsupported_parameter", "echo")
    assert_error(await lone.chat(top_logprobs=1), 400, param="top_logprobs")


async def test_case_67_routing_fields_are_stripped(lone: Fleet) -> None:
    """A client's worker fields and headers change nothing and reach no worker."""
    body = lone.body(kv_transfer_params={"do_remote_decode": True, "remote_host": "127.0.0.1"}, bootstrap_room=7)
    headers = {"x-prefiller-host-port": "127.0.0.1:1", "x-data-parallel-rank": "3"}
    answer = await lone.http.post("/v1/completions", json=body, headers=headers)
    assert answer.json()["choices"][0]["text"] == "bcde"
    [prefill] = lone.prefill[0].seen(Prefill)
    assert "remote" not in prefill.model_dump_json()
    assert "127.0.0.1" not in answer.text


async def test_unknown_model(lone: Fleet) -> None:
    for model in ("gpt-4", "", "x" * 10_000):
        assert_error(
            await lone.http.post("/v1/completions", json=lone.body() | {"model": model}), 404, "model_not_found"
        )


async def test_too_long(lone: Fleet) -> None:
    assert_error(await lone.complete("x" * 512), 400, "context_length_exceeded", "prompt")
    assert_error(await lone.complete("x" * 510, max_tokens=3), 400, "context_length_exceeded", "max_tokens")
    assert (await lone.complete("x" * 510, max_tokens=2)).status_code == 200


async def test_case_62_a_body_over_the_limit_is_413_as_json(fleet: Fleet) -> None:
    await fleet.start(max_body_bytes=100_000)

    async def drip() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 10_000

    assert_error(await fleet.http.post("/v1/completions", content=b" " * 200_000), 413, "payload_too_large")
    assert_error(await fleet.http.post("/v1/completions", content=drip()), 413, "payload_too_large")
    assert (await fleet.complete(["x" * 400] * 100)).status_code == 200  # type: ignore[arg-type]


async def test_paths_and_methods(lone: Fleet) -> None:
    assert_error(await lone.http.get("/v1/nothing"), 404)
    assert_error(await lone.http.get("/%00"), 404)
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert_error(await lone.http.get(path), 405)
    assert_error(await lone.http.post("/v1/models", json={}), 405)
    assert_error(await lone.http.post("/health", json={}), 405)


# ---- who may call what


async def test_tokens_and_keys(fleet: Fleet) -> None:
    await fleet.start(api_keys=["sk-one", "sk-two"])
    for path in ("/workers", "/metrics"):
        assert_error(await fleet.http.get(path), 401, "authentication_failed")
        assert_error(await fleet.http.get(path, headers={"Authorization": "Bearer sk-one"}), 401)
        assert (await fleet.http.get(path, headers=AUTH)).status_code == 200
    assert_error(await fleet.complete(), 401, "authentication_failed")
    for key, status in (("sk-one", 200), ("sk-two", 200), ("sk-three", 401)):
        response = await fleet.http.post(
            "/v1/completions", json=fleet.body(), headers={"Authorization": f"Bearer {key}"}
        )
        assert response.status_code == status
    for path in ("/health", "/ready"):
        assert (await fleet.http.get(path)).status_code == 200


# ---- administration


async def test_workers_are_added_and_removed(fleet: Fleet) -> None:
    await fleet.start()
    other = fleet.add_decode()
    url = fleet.hosts[other].url
    added = await fleet.http.post("/workers", json={"role": "decode", "url": url + "/"}, headers=AUTH)
    assert (added.status_code, added.json()["url"]) == (201, url)
    again = await fleet.http.post("/workers", json={"role": "decode", "url": url}, headers=AUTH)
    assert again.status_code == 200
    await fleet.until(fleet.all_open)
    workers = (await fleet.http.get("/workers", headers=AUTH)).json()
    assert [(w["role"], w["state"]) for w in workers] == [
        ("prefill", "ready"),
        ("decode", "ready"),
        ("decode", "ready"),
    ]
    assert workers[0]["pools"] == {w["url"]: "open" for w in workers[1:]}
    gone = await fleet.http.request("DELETE", "/workers", json={"url": fleet.hosts[fleet.decode[0]].url}, headers=AUTH)
    assert gone.status_code == 200
    await fleet.until(lambda: len(fleet.router.registry.decode) == 1)
    assert (await fleet.complete()).status_code == 200
    assert len(other.received) == 2
    assert_error(await fleet.http.delete("/workers?url=http://127.0.0.1:1", headers=AUTH), 404, "worker_not_found")


async def test_case_26_a_removed_worker_finishes_what_it_has(fleet: Fleet) -> None:
    fleet.decode[0].steps.clear()
    await fleet.start()
    task = asyncio.create_task(fleet.events(max_tokens=5))
    await fleet.decode[0].until(lambda: bool(fleet.decode[0].rows))
    await fleet.http.delete("/workers", params={"url": fleet.hosts[fleet.decode[0]].url}, headers=AUTH)
    assert (await fleet.complete()).status_code == 503
    fleet.decode[0].steps.set()
    events = await task
    assert events[-1] == "[DONE]"
    await fleet.until(lambda: fleet.router.registry.decode == [])


BAD_WORKERS: tuple[Any, ...] = (
    *({}, [], {"role": "decode"}, {"role": "decode", "url": 5}, {"role": "x", "url": "http://h:1"}),
    *(
        {"role": "decode", "url": u}
        for u in ("", "no url", "ftp://h/", "file:///etc", "http://h:99999", "http://h:1/path")
    ),
    {"role": "decode", "url": "http://127.0.0.1:1", "more": 1},
)


async def test_bad_workers(lone: Fleet) -> None:
    for body in BAD_WORKERS:
        assert_error(await lone.http.post("/workers", json=body, headers=AUTH), 400)
    assert len(lone.router.registry.workers) == 2


async def test_a_worker_has_one_role(lone: Fleet) -> None:
    url = lone.hosts[lone.decode[0]].url
    assert_error(await lone.http.post("/workers", json={"role": "prefill", "url": url}, headers=AUTH), 400)
