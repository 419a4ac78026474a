"""A prefill process reduced to its data plane, driven by commands over a pipe; run by the tests of process death."""

from __future__ import annotations

from multiprocessing.connection import Connection

import numpy as np

from transport.backends import connect
from transport.backends.base import Run
from transport.errors import HawkError
from transport.messages import Lease, PoolDescription, Writer


def main(pipe: Connection, pool_json: str, writer: Writer, token: str, value: int) -> None:
    """Commands: ("open", lease json), ("half",), ("rest",), ("push",). Answers: "ok", or an error's code.

    "half" opens a chunk, stores the first half of region 0 and answers with the chunk still open; "rest"
    stores the other half and closes it. "push" writes region 0 again and again until it is refused; it
    answers once as soon as it runs, and again when refused.
    """
    pool = PoolDescription.model_validate_json(pool_json)
    connected = connect(pool, writer, token)
    pipe.send("ok")
    lease = chunk = None
    while True:
        command, *arguments = pipe.recv()
        try:
            if command == "open":
                lease = connected.open(Lease.model_validate_json(arguments[0]))
            assert lease is not None
            assert lease.mapped is not None
            region = lease.mapped[0]
            middle = len(region) // 2
            if command == "half":
                chunk = lease.chunk()
                chunk.__enter__()
                region[:middle] = value
            elif command == "rest":
                assert chunk is not None
                region[middle:] = value
                chunk.__exit__(None, None, None)
            elif command == "push":
                staging = np.full(len(region), value, np.uint8)
                pipe.send("ok")
                while True:
                    lease.write(staging, [Run(0, 0, 0, len(region))])
            pipe.send("ok")
        except HawkError as error:
            pipe.send(error.code)
