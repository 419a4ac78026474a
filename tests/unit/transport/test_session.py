"""Sessions over real sockets: attaching, ordering, and every way in which one side leaves the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import pytest
import websockets
from session_harness import ATTACH, HEADERS, Recorder, Router, worker
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_websocket

from transport.errors import AuthenticationFailed, InvalidRequest, ProtocolError, WorkerLost
from transport.http import bind
from transport.messages import (
    PROTOCOL_VERSION,
    Attach,
    Cancel,
    Failed,
    Hello,
    Ping,
    Pong,
    Prefill,
    Sampling,
    TokenItem,
    Tokens,
)
from transport.session.client import SLOW_TO_COME_UP, _level, session_url
from transport.session.frames import decode, encode


@pytest.fixture
def handler() -> Recorder:
    return Recorder()


@pytest.fixture
async def url(handler: Recorder) -> AsyncIterator[str]:
    async with worker(handler, dead_after_s=1.0, ping_interval_s=0.05) as url:
        yield url


def raw(url: str) -> connect:
    """A WebSocket without our client around it."""
    return connect(session_url(url), additional_headers=HEADERS, proxy=None, max_size=None)


async def attached(connection: ClientConnection) -> Hello:
    await connection.send(encode(ATTACH))
    hello = decode(await connection.recv())
    assert isinstance(hello, Hello)
    return hello


async def closed(connection: ClientConnection) -> tuple[int, str]:
    """(code, reason) with which the worker closes."""
    async with asyncio.timeout(10):
        with contextlib.suppress(websockets.ConnectionClosed):
            while True:
                await connection.recv()
    assert connection.close_code is not None
    return connection.close_code, connection.close_reason or ""


# ---- attaching -------------------------------------------------------------------------------------


async def test_attach_is_answered_by_hello(url: str, handler: Recorder) -> None:
    async with Router(url) as router:
        hello = await router.expect("hello")
        assert hello == handler.hello()
        assert router.client.connected
        assert router.client.hello == hello
        session, _ = await handler.expect("open")
        assert (session.router, session.generation) == ("router-0", "r1")


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer ü"}])
async def test_a_wrong_token_is_refused_before_the_session(url: str, header: dict[str, str]) -> None:
    with pytest.raises(websockets.InvalidStatus) as caught:
        async with connect(session_url(url), additional_headers=header, proxy=None):
            pass
    assert caught.value.response.status_code == 403


async def test_the_client_says_that_its_token_was_refused(url: str) -> None:
    async with Router(url, token="wrong") as router:
        while router.client.error is None:
            await asyncio.sleep(0.01)
        assert isinstance(router.client.error, AuthenticationFailed)
        with pytest.raises(WorkerLost, match="refused the cluster token"):
            router.client.send(Cancel(request_id="r"))
        assert router.events.empty()


async def test_a_version_mismatch_names_both_versions(url: str) -> None:
    async with raw(url) as connection:
        await connection.send(encode(Attach(protocol=99, router="r", generation="g")))
        code, reason = await closed(connection)
    assert code == 4001
    assert "99" in reason
    assert str(PROTOCOL_VERSION) in reason


async def test_the_client_refuses_a_worker_of_another_version(url: str, handler: Recorder) -> None:
    hello = handler.hello().model_copy(update={"protocol": 99})
    handler.hello = lambda: hello  # type: ignore[method-assign]
    async with Router(url) as router:
        while not isinstance(router.client.error, ProtocolError):
            await asyncio.sleep(0.01)
        assert "99" in router.client.error.message
        assert not router.client.connected


@pytest.mark.parametrize("frame", [b"garbage", b"\x92\xa6Attach\x80", encode(Ping(seq=1)), "text"])
async def test_a_bad_first_frame_closes_that_session_only(url: str, frame: bytes | str) -> None:
    async with raw(url) as connection:
        await connection.send(frame)
        code, reason = await closed(connection)
    assert code == 4000
    assert reason
    async with Router(url) as router:
        await router.expect("hello")


@pytest.mark.parametrize("frame", [b"garbage", b"\x92\xa4Ping\x80", "text"])
async def test_a_bad_later_frame_closes_that_session_only(url: str, handler: Recorder, frame: bytes | str) -> None:
    async with Router(url) as router, raw(url) as connection:
        await router.expect("hello")
        await connection.send(encode(Attach(protocol=PROTOCOL_VERSION, router="other", generation="r1")))
        await connection.send(frame)
        code, _ = await closed(connection)
        assert code == 4000
        session, _ = await handler.expect("close")
        assert session.router == "other"
        assert router.client.connected


async def test_a_frame_over_the_limit_closes_the_session(handler: Recorder) -> None:
    async with worker(handler, max_frame_bytes=10_000) as url, raw(url) as connection:
        await attached(connection)
        await connection.send(b"x" * 20_000)
        code, _ = await closed(connection)
        assert code == 1009
        await handler.expect("close")


# ---- messages --------------------------------------------------------------------------------------


async def test_messages_keep_their_order_both_ways(url: str, handler: Recorder) -> None:
    handler.react = lambda session, message: session.send(message)
    async with Router(url) as router:
        await router.expect("hello")
        for index in range(500):
            router.client.send(Cancel(request_id=str(index)))
        for index in range(500):
            _, message = await handler.expect("message")
            assert message == Cancel(request_id=str(index))
            assert await router.expect("message") == message


async def test_tokens_and_a_million_token_prompt_pass(url: str, handler: Recorder) -> None:
    step = Tokens([TokenItem(str(index), [index]) for index in range(300)])
    handler.react = lambda session, message: session.send(step) if isinstance(message, Prefill) else None
    prompt = Prefill(request_id="r", token_ids=tuple(range(1_000_000)), sampling=Sampling(max_tokens=1))
    async with Router(url, dead_after_s=10.0) as router:
        await router.expect("hello")
        router.client.send(prompt)
        _, message = await handler.expect("message")
        assert message == prompt
        assert await router.expect("message") == step


async def test_a_ping_is_answered_with_the_status_though_a_message_is_being_handled(
    url: str, handler: Recorder
) -> None:
    release = asyncio.Event()
    handler.react = lambda session, message: release.wait() if isinstance(message, Cancel) else None
    async with raw(url) as connection:
        await attached(connection)
        await connection.send(encode(Cancel(request_id="slow")))
        await connection.send(encode(Ping(seq=7)))
        assert decode(await connection.recv()) == Pong(seq=7, status=handler.status())
        release.set()


async def test_an_error_with_a_request_becomes_failed(url: str, handler: Recorder) -> None:
    errors: list[Exception] = [InvalidRequest("too long", param="prompt"), RuntimeError("a bug")]

    def react(session: object, message: object) -> None:
        if isinstance(message, Cancel) and errors:
            raise errors.pop(0)

    handler.react = react
    async with Router(url) as router:
        await router.expect("hello")
        for code in ("invalid_request", "internal_error"):
            router.client.send(Cancel(request_id="r"))
            failed = await router.expect("message")
            assert isinstance(failed, Failed)
            assert (failed.request_id, failed.error.code) == ("r", code)
        assert router.client.connected


async def test_an_error_without_a_request_closes_the_session(url: str, handler: Recorder) -> None:
    def react(session: object, message: object) -> None:
        if isinstance(message, Ping) and message.seq == 5:
            raise RuntimeError("a bug")

    handler.react = react
    async with raw(url) as connection:
        await attached(connection)
        await connection.send(encode(Ping(seq=5)))
        code, reason = await closed(connection)
        assert (code, reason) == (4005, "RuntimeError: a bug")
        await handler.expect("close")


async def test_an_exception_in_the_routers_callback_ends_the_connection(url: str, handler: Recorder) -> None:
    """Half-taken token frames must become a failure, not wrong text."""
    async with Router(url) as router:
        await router.expect("hello")
        session, _ = await handler.expect("open")

        def broken(message: object) -> None:
            if isinstance(message, Tokens):
                raise RuntimeError("a bug")

        router.client._on_message = broken
        session.send(Tokens([TokenItem("r", [1])]))
        error = await router.expect("down")
        assert "a bug" in str(error)
        await router.expect("hello")


# ---- leaving ---------------------------------------------------------------------------------------


async def test_the_worker_learns_that_the_router_left(url: str, handler: Recorder) -> None:
    async with Router(url) as router:
        await router.expect("hello")
        opened, _ = await handler.expect("open")
    closed_session, _ = await handler.expect("close")
    assert closed_session is opened
    assert not opened.open
    opened.send(Cancel(request_id="r"))  # does nothing


async def test_clean_up_runs_though_a_message_is_being_handled(url: str, handler: Recorder) -> None:
    handler.react = lambda session, message: asyncio.Event().wait() if isinstance(message, Cancel) else None
    async with Router(url) as router:
        await router.expect("hello")
        router.client.send(Cancel(request_id="hangs"))
        await handler.expect("message")
    await handler.expect("close")


async def test_the_session_is_closed_though_its_clean_up_waits(url: str, handler: Recorder) -> None:
    """Clean-up may have to wait for a fence, as long as a stopped writer stays stopped."""
    release = asyncio.Event()

    async def on_close(session: object) -> None:
        await release.wait()

    handler.on_close = on_close  # type: ignore[method-assign]
    async with raw(url) as connection:
        await attached(connection)
        await connection.send(b"garbage")
        code, _ = await closed(connection)
        assert code == 4000
    release.set()


async def test_a_worker_that_cannot_greet_says_so(url: str, handler: Recorder) -> None:
    def broken() -> Hello:
        raise RuntimeError("no pool yet")

    handler.hello = broken  # type: ignore[method-assign]
    async with raw(url) as connection:
        await connection.send(encode(ATTACH))
        assert await closed(connection) == (4005, "RuntimeError: no pool yet")


async def test_a_silent_router_is_dropped(url: str, handler: Recorder) -> None:
    async with raw(url) as connection:
        await attached(connection)
        started = time.monotonic()
        code, reason = await closed(connection)
        assert code == 4002
        assert "no frame from router router-0" in reason
        assert 0.9 < time.monotonic() - started < 5
        await handler.expect("close")


async def test_case_21_a_silent_worker_is_left_and_found_again() -> None:
    """The worker accepts, greets, and then says nothing, as a stopped process does."""
    hello = Recorder().hello()

    async def mute(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.send(encode(hello))
        await connection.wait_closed()

    async with serve_websocket(mute, "127.0.0.1", 0, ping_interval=None) as server:
        port = server.sockets[0].getsockname()[1]
        async with Router(f"http://127.0.0.1:{port}", dead_after_s=0.3) as router:
            await router.expect("hello")
            error = await router.expect("down")
            assert isinstance(error, WorkerLost)
            assert "no frame from the worker" in error.message
            await router.expect("hello")


async def test_case_18_and_19_a_restarted_worker_is_reached_and_known_as_another(handler: Recorder) -> None:
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    async with worker(handler, sock) as url:
        router = Router(url)
        await router.__aenter__()
        first = await router.expect("hello")
    assert isinstance(await router.expect("down"), WorkerLost)
    with pytest.raises(WorkerLost):
        router.client.send(Cancel(request_id="r"))
    async with worker(Recorder("p2"), bind("127.0.0.1", port)):
        second = await router.expect("hello")
        await router.__aexit__()
    assert isinstance(first, Hello)
    assert isinstance(second, Hello)
    assert (first.generation, second.generation) == ("p1", "p2")


async def test_a_worker_that_is_not_there_yet_is_found_when_it_comes(handler: Recorder) -> None:
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    sock.close()
    async with Router(f"http://127.0.0.1:{port}") as router:
        while router.client.error is None:
            await asyncio.sleep(0.01)
        assert isinstance(router.client.error, WorkerLost)
        assert router.events.empty()  # it was never up, so it is not down
        async with worker(handler, bind("127.0.0.1", port)):
            await router.expect("hello")


async def test_a_router_that_comes_back_replaces_its_broken_session(url: str, handler: Recorder) -> None:
    async with raw(url) as old:
        await attached(old)
        opened, _ = await handler.expect("open")
        async with Router(url) as router:
            await router.expect("hello")
            code, _ = await closed(old)
            assert code == 4004
            gone, _ = await handler.expect("close")
            assert gone is opened


async def test_a_router_that_does_not_read_is_dropped_and_never_blocks(handler: Recorder) -> None:
    async with worker(handler, max_queue_bytes=1 << 20, dead_after_s=60.0) as url, raw(url) as connection:
        await attached(connection)
        session, _ = await handler.expect("open")
        connection.transport.pause_reading()
        big = Cancel(request_id="r", reason="x" * 100_000)
        started = time.monotonic()
        sent = 0
        while session.open:
            session.send(big)
            sent += 1
            assert sent < 1000, "the queue has no bound"
            await asyncio.sleep(0)
        assert time.monotonic() - started < 5
        await handler.expect("close")
        connection.transport.abort()


async def test_a_worker_that_does_not_read_is_dropped(handler: Recorder) -> None:
    async def deaf(connection: ServerConnection) -> None:
        await connection.recv()
        connection.transport.pause_reading()
        await connection.send(encode(handler.hello()))
        await connection.wait_closed()

    async with serve_websocket(deaf, "127.0.0.1", 0, ping_interval=None, close_timeout=0.1) as server:
        port = server.sockets[0].getsockname()[1]
        async with Router(f"http://127.0.0.1:{port}", dead_after_s=60.0, max_queue_bytes=1 << 20) as router:
            await router.expect("hello")
            big = Cancel(request_id="r", reason="x" * 100_000)

            async def flood() -> None:
                for _ in range(1000):
                    router.client.send(big)
                    await asyncio.sleep(0)

            with pytest.raises(WorkerLost, match="does not read"):
                await flood()
            assert isinstance(await router.expect("down"), WorkerLost)


async def test_time_in_which_the_process_itself_stood_still_does_not_count(url: str, handler: Recorder) -> None:
    """Both ends run in this loop: blocked for longer than `dead_after_s`, neither takes the other for dead."""
    async with Router(url) as router:
        await router.expect("hello")
        time.sleep(1.5)  # noqa: ASYNC251
        await asyncio.sleep(0.3)
        assert router.client.connected
        router.client.send(Cancel(request_id="r"))
        await handler.expect("message")


def test_urls() -> None:
    assert session_url("http://host:1/") == "ws://host:1/v1/session"
    assert session_url("https://host") == "wss://host/v1/session"
    for wrong in ("host:1", "ftp://host", "http://", ""):
        with pytest.raises(ValueError, match="must look like"):
            session_url(wrong)


def test_a_worker_that_is_still_starting_is_no_reason_to_warn() -> None:
    starting, refusing = WorkerLost("connection refused"), AuthenticationFailed("wrong token")
    assert _level(starting, was_up=False, failures=0) == logging.INFO
    assert _level(starting, was_up=False, failures=1) == logging.DEBUG
    assert _level(starting, was_up=False, failures=SLOW_TO_COME_UP) == logging.WARNING
    assert _level(starting, was_up=True, failures=0) == logging.WARNING
    assert _level(refusing, was_up=False, failures=0) == logging.WARNING
