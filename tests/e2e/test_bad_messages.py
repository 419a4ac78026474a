"""Well-formed session messages with senseless content: refused one by one, with the reason, and nothing leaked."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
from websockets.asyncio.client import ClientConnection, connect

from transport.messages import (
    PROTOCOL_VERSION,
    Attach,
    Cancel,
    ClosePool,
    Decode,
    Failed,
    Hello,
    Lease,
    Message,
    OpenPool,
    Ping,
    Pong,
    PoolRefused,
    Prefill,
    Reserve,
    Sampling,
    Writer,
)
from transport.session.frames import decode, encode

from .cluster import AUTH
from .topology import MAX_MODEL_LEN, Deployment

pytestmark = pytest.mark.e2e

M = TypeVar("M", bound=Message)
GREEDY = Sampling(max_tokens=4, temperature=0)
LEASE = Lease(
    id="no-such-lease",
    worker="nobody",
    generation="0",
    block_ids=(0,),
    prompt_tokens=3,
    resident_tokens=0,
    ttl_s=1,
    slot=0,
)


class Peer:
    """A router's end of a session, by hand."""

    def __init__(self, ws: ClientConnection, hello: Hello) -> None:
        self.ws, self.hello = ws, hello

    async def ask(self, message: Message, kind: type[M], **fields: Any) -> M:
        """Send, and wait for the answer of that type with those fields."""
        await self.ws.send(encode(message))
        async with asyncio.timeout(20):
            while True:
                answer = decode(bytes(await self.ws.recv()))
                if isinstance(answer, kind) and all(getattr(answer, k) == v for k, v in fields.items()):
                    return answer

    async def refused(self, message: Message) -> str:
        """The error code with which a request is refused."""
        failed = await self.ask(message, Failed, request_id=message.request_id)  # type: ignore[attr-defined]
        assert failed.error.message
        return failed.error.code

    async def alive(self) -> None:
        assert (await self.ask(Ping(seq=7), Pong, seq=7)).status.ready


@asynccontextmanager
async def session(deployment: Deployment, name: str) -> AsyncIterator[Peer]:
    async with connect(deployment.session_url(name), additional_headers=AUTH, proxy=None) as ws:
        await ws.send(encode(Attach(protocol=PROTOCOL_VERSION, router="bad", generation="0")))
        hello = decode(bytes(await ws.recv()))
        assert isinstance(hello, Hello)
        yield Peer(ws, hello)
    await deployment.until_idle()
    deployment.assert_ready()


async def test_prefill_refuses(deployment: Deployment) -> None:
    async with session(deployment, "p0") as peer:

        def prefill(token_ids: tuple[int, ...], sampling: Sampling = GREEDY, lease: Lease | None = None) -> Prefill:
            return Prefill(request_id="bad", token_ids=token_ids, sampling=sampling, lease=lease)

        assert await peer.refused(prefill(())) in ("invalid_request", "protocol_error")
        assert await peer.refused(prefill((49152,))) == "invalid_request"
        assert await peer.refused(prefill((2**31 - 1,))) == "invalid_request"
        assert await peer.refused(prefill((5,) * (MAX_MODEL_LEN + 1))) == "context_length_exceeded"
        assert await peer.refused(prefill((5, 6, 7), lease=LEASE)) == "unknown_pool"
        await peer.ws.send(encode(Cancel(request_id="never heard of")))
        await peer.ws.send(encode(ClosePool(worker="nobody", generation="0")))
        await peer.alive()


async def test_prefill_refuses_pools_it_cannot_reach_or_fill(deployment: Deployment) -> None:
    async with session(deployment, "d0") as decode_peer, session(deployment, "p0") as peer:
        pool = decode_peer.hello.pool
        assert pool is not None

        async def refused(**changes: Any) -> str:
            changed = pool.model_copy(update={"worker": "elsewhere", **changes})
            return (await peer.ask(OpenPool(pool=changed), PoolRefused, worker=changed.worker)).error.code

        nowhere = pool.endpoint.model_copy(update={"address": "/nowhere/hawk.sock"})
        assert await refused(endpoint=nowhere)
        assert await refused(endpoint=nowhere.model_copy(update={"address": "x" * 5000}))
        assert await refused(geometry=dataclasses.replace(pool.geometry, num_layers=29)) == "geometry_mismatch"
        assert await refused(model=pool.model.model_copy(update={"fingerprint": "other"})) == "geometry_mismatch"
        await peer.alive()


async def test_decode_refuses(deployment: Deployment) -> None:
    async with session(deployment, "p0") as prefill_peer:
        known = Writer(worker=prefill_peer.hello.worker, generation=prefill_peer.hello.generation)
    async with session(deployment, "d0") as peer:

        def reserve(tokens: int, *, tail: int = 0, writer: Writer = known, max_tokens: int = 4) -> Reserve:
            hashes = tuple(n.to_bytes(16, "big") for n in range(min(tokens, 4096) // 32))
            return Reserve(
                request_id="bad",
                prompt_tokens=tokens,
                max_tokens=max_tokens,
                block_hashes=hashes,
                tail_tokens=(5,) * tail,
                writer=writer,
            )

        assert await peer.refused(reserve(2**40)) in ("context_length_exceeded", "protocol_error")
        assert await peer.refused(reserve(MAX_MODEL_LEN, max_tokens=2)) == "context_length_exceeded"
        assert await peer.refused(reserve(64, max_tokens=2**60)) == "context_length_exceeded"
        assert await peer.refused(reserve(64, tail=5)) == "protocol_error"
        assert await peer.refused(reserve(32, writer=Writer(worker="stranger", generation="0"))) == "worker_lost"
        stale = Writer(worker=known.worker, generation="0")
        assert await peer.refused(reserve(32, writer=stale)) in ("worker_lost", "stale_generation")
        unknown = Decode(request_id="bad", lease_id="none", token_id=5, generated=1, sampling=GREEDY)
        assert await peer.refused(unknown) == "lease_revoked"
        await peer.ws.send(encode(Cancel(request_id="never heard of")))
        await peer.alive()


@pytest.mark.parametrize("name", ["p0", "d0"])
async def test_messages_for_another_role(deployment: Deployment, name: str) -> None:
    """They end the request, or the session, with a reason; never the worker."""
    wrong: Message = (
        Decode(request_id="bad", lease_id="none", token_id=5, generated=1, sampling=GREEDY)
        if name == "p0"
        else Prefill(request_id="bad", token_ids=(5,), sampling=GREEDY)
    )
    async with session(deployment, name) as peer:
        assert await peer.refused(wrong) == "protocol_error"
