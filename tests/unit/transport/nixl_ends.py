"""Both ends of a NIXL data plane in processes of their own, driven over a pipe; for tests of their death."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from backend_harness import TOKEN, WRITER, NixlBackend

from transport.backends import connect
from transport.backends.base import Run
from transport.errors import HawkError
from transport.messages import Lease, PoolDescription


def write(pipe: Connection, pool_json: str, value: int) -> None:
    """Connects, then obeys ("open", lease json), ("push",) and ("return",); answers "ok", or an error's code.

    "push" writes region 0 again and again until it is refused; it answers once as soon as it runs, and again when
    refused. "return" leaves without closing anything.
    """
    connected = connect(PoolDescription.model_validate_json(pool_json), WRITER, TOKEN)
    pipe.send("ok")
    lease = None
    while True:
        command, *arguments = pipe.recv()
        try:
            if command == "open":
                lease = connected.open(Lease.model_validate_json(arguments[0]))
            elif command == "push":
                assert lease is not None
                staging = np.full(connected.lengths[0], value, np.uint8)  # type: ignore[attr-defined]
                pipe.send("ok")
                while True:
                    lease.write(staging, [Run(0, 0, 0, len(staging))])
            elif command == "return":
                return
            pipe.send("ok")
        except HawkError as error:
            pipe.send(error.code)


def receive(pipe: Connection, directory: str, length: int) -> None:
    """Describes its pool, grants a lease to the first writer and sends that, then waits to be killed."""

    async def serve() -> None:
        pool = await NixlBackend(Path(directory)).pool(lengths=(length,))
        pipe.send(pool.description.model_dump_json())
        await pool.events.wait()
        pipe.send(pool.grant("a").model_dump_json())
        await asyncio.Event().wait()

    asyncio.run(serve())
