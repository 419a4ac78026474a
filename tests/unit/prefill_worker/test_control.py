"""The control socket: both ends over a real Unix socket, and what each does when the other is gone."""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import stat
import struct
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prefill_fakes import KV, WRITER, pool_of

from prefill_worker.control import frames
from prefill_worker.control.engine_end import EngineEnd
from prefill_worker.control.messages import Held, Joined, LocalKV, Start
from prefill_worker.control.service_end import ServiceEnd
from transport.errors import EngineFailed, ProtocolError
from transport.messages import Cancel, Message, OpenPool, Pushed

START = Start(
    token="t",
    writer=WRITER,
    fingerprint="f",
    hold_ttl_s=1,
    push_chunk_bytes=1,
    push_threads=1,
    push_staging_bytes=1,
)


class Engine:
    """Both parts of an engine, in threads of this process."""

    def __init__(self, path: str, kv: LocalKV | None = KV) -> None:
        self.received: queue.Queue[Message] = queue.Queue()
        self.gone = threading.Event()
        joined = Joined(part="worker", rank=0, pid=os.getpid(), kv=kv)
        self.worker = EngineEnd(path, joined, self.received.put, self.gone.set)
        joined = Joined(part="scheduler", rank=0, pid=os.getpid())
        self.scheduler = EngineEnd(path, joined, lambda message: None, lambda: None)

    async def next(self) -> Message:
        return await asyncio.to_thread(self.received.get, timeout=10)


class Service:
    def __init__(self) -> None:
        self.end = ServiceEnd()
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()

    async def serve(self, timeout_s: float = 10) -> LocalKV:
        return await self.end.serve(START, self.messages.put_nowait, self.lost.put_nowait, timeout_s)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    service = Service()
    yield service
    service.end.stop_watching()
    await service.end.wait_closed()
    service.end.close()


async def test_messages_pass_both_ways_in_order(service: Service) -> None:
    engine = Engine(service.end.path)  # connects before anybody accepts, as the engine does
    assert await service.serve() == KV
    assert await engine.next() == START
    service.end.send(OpenPool(pool=pool_of()))
    service.end.send(Cancel(request_id="t1"))
    assert isinstance(await engine.next(), OpenPool)
    assert await engine.next() == Cancel(request_id="t1")
    pushed = Pushed(request_id="t1", lease_id="l", bytes=1, seconds=0.5)
    engine.worker.send(pushed)
    assert await asyncio.wait_for(service.messages.get(), 10) == pushed
    engine.scheduler.send(Held(requests=1, blocks=2))
    assert await asyncio.wait_for(service.messages.get(), 10) == Held(requests=1, blocks=2)


async def test_the_socket_is_private_and_leaves_nothing_behind(service: Service) -> None:
    directory = Path(service.end.path).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    service.end.close()
    assert not directory.exists()


async def test_the_service_notices_a_dead_engine(service: Service) -> None:
    engine = Engine(service.end.path)
    await service.serve()
    engine.worker._socket.shutdown(socket.SHUT_RDWR)
    assert "worker" in await asyncio.wait_for(service.lost.get(), 10)


async def test_an_engine_that_is_shut_down_is_no_loss(service: Service) -> None:
    engine = Engine(service.end.path)
    await service.serve()
    service.end.stop_watching()
    engine.worker.close()
    engine.scheduler.close()
    await service.end.wait_closed()
    assert service.lost.empty()
    assert not engine.gone.is_set()


async def test_the_engine_notices_a_dead_service(service: Service) -> None:
    engine = Engine(service.end.path)
    await service.serve()
    service.end.stop_watching()
    await service.end.wait_closed()
    assert await asyncio.to_thread(engine.gone.wait, 10)


async def test_an_engine_that_never_reports_is_an_error(service: Service) -> None:
    with pytest.raises(EngineFailed, match="did not report"):
        await service.serve(timeout_s=0.05)


async def test_an_engine_must_describe_its_cache(service: Service) -> None:
    Engine(service.end.path, kv=None)
    with pytest.raises(EngineFailed, match="KV cache"):
        await service.serve()


async def test_a_stranger_on_the_socket_gets_nothing(service: Service) -> None:
    Engine(service.end.path)
    await service.serve()
    reader, writer = await asyncio.open_unix_connection(service.end.path)
    writer.write(frames.encode(Held(requests=0, blocks=0)))  # not how an engine begins
    assert await asyncio.wait_for(reader.read(), 10) == b""
    assert service.lost.empty()
    writer.close()


def test_what_no_end_would_send_is_refused() -> None:
    with pytest.raises(ProtocolError, match="are allowed"):
        frames.body_length(struct.pack(">I", frames.MAX_FRAME_BYTES + 1))
    for body in (b"", b"\x93\x01\x02\x03", b"\x92\xa4Held\x80", b"\x92\xa6Attach\x80", os.urandom(64)):
        with pytest.raises(ProtocolError):
            frames.decode(body)


def test_every_message_survives_the_wire() -> None:
    for message in (START, Held(requests=0, blocks=0), OpenPool(pool=pool_of()), Cancel(request_id="t")):
        data = frames.encode(message)
        assert frames.body_length(data[: frames.HEADER_BYTES]) == len(data) - frames.HEADER_BYTES
        assert frames.decode(data[frames.HEADER_BYTES :]) == message
