"""Writers in processes of their own, driven over a pipe, for tests that stop, kill and fork them."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_harness import POISON, TOKEN, Events, Handed, Pool, VerbsBackend

from transport.backends import connect
from transport.backends.base import Run
from transport.backends.verbs.credit import RECEIVES
from transport.backends.verbs.queue_pair import Options, QueuePair
from transport.backends.verbs.receiver import VerbsReceiver
from transport.errors import HawkError, Overloaded
from transport.messages import Lease, PoolDescription, Writer

LIMIT_S = 60.0
"""Nothing here takes that long; a failure, not a measurement."""
PART = 16 * 1024
PARTS = 64
"""A push is so many writes of so many bytes."""
PATIENCE = Options(min_rnr_timer=0)
"""Of the receiver: a NIC that finds no receive for an immediate is asked to wait the longest there is, 0.66 s."""
RETRY_S = 1.0
"""By then it has tried again."""


def runs() -> list[Run]:
    """A push of region 0, every part of it out of the same staging."""
    return [Run(0, 0, index * PART, PART) for index in range(PARTS)]


def write(pipe: Connection, writer_json: str, value: int) -> None:
    """Obeys ("connect", pool json), ("open", lease json), ("fill",), ("push",) and ("burst",); answers "ok", or an
    error's code.

    "fill" writes region 0 once and answers when that is acknowledged. "push" writes it again and again until it is
    refused; it answers once as soon as it runs, and again when refused. "burst" is a push whose process stops itself
    when two rounds are posted, each behind more immediates than the receiver has receives for.
    """
    connected = lease = None
    while True:
        command, *arguments = pipe.recv()
        try:
            if command == "connect":
                pool = PoolDescription.model_validate_json(arguments[0])
                connected = connect(pool, Writer.model_validate_json(writer_json), TOKEN)
            elif command == "open":
                assert connected is not None
                lease = connected.open(Lease.model_validate_json(arguments[0]))
            else:
                assert lease is not None
                if command != "fill":
                    pipe.send("ok")
                for number in itertools.count(1):
                    if command == "burst" and number <= 2:
                        for _ in range(RECEIVES + 1):
                            lease._lane.pair.post((), wr_id=0, immediate=lease.epoch)  # type: ignore[attr-defined]
                    staging = lease.stage(PART)
                    staging[:] = value
                    lease.write(staging, runs())
                    if command == "fill":
                        lease.complete(LIMIT_S)
                        break
                    if command == "burst" and number == 2:
                        os.kill(os.getpid(), signal.SIGSTOP)
            pipe.send("ok")
        except HawkError as error:
            pipe.send(error.code)


class PatientBackend(VerbsBackend):
    def receiver(
        self, name: str, generation: str, token: str, regions: list[Handed], events: Events, slots: int
    ) -> VerbsReceiver:
        receiver = VerbsReceiver(
            name, generation, token, regions, events, port=self._port, slots=slots, options=PATIENCE
        )
        self._port = int(receiver.address.rpartition(":")[2])
        return receiver


class Process:
    """A writer; forked, because importing takes a guest ten seconds. Start it before there is anything to inherit."""

    def __init__(self, writer: Writer, value: int) -> None:
        self.writer = writer
        self.value = value
        fork = multiprocessing.get_context("fork")
        self.pipe: Connection
        self.pipe, theirs = fork.Pipe()
        self.process = fork.Process(target=write, args=(theirs, writer.model_dump_json(), value), daemon=True)
        self.process.start()
        theirs.close()

    async def answer(self) -> Any:
        return await asyncio.wait_for(asyncio.to_thread(self.pipe.recv), LIMIT_S)

    async def ask(self, *command: object) -> Any:
        self.pipe.send(command)
        return await self.answer()

    async def join(self, pool: Pool) -> None:
        assert await self.ask("connect", pool.description.model_dump_json()) == "ok"
        assert await pool.events.wait() == ("writer_joined", self.writer)

    async def open(self, lease: Lease) -> None:
        assert await self.ask("open", lease.model_dump_json()) == "ok"

    async def fill(self, pool: Pool) -> None:
        """Write region 0, all of it, as a lease that lands and is acknowledged."""
        asking = asyncio.create_task(self.ask("fill"))
        event = await asyncio.wait_for(pool.events.queue.get(), LIMIT_S)
        assert event[0] == "landed", event
        pool.receiver.acknowledge(str(event[1]))
        assert await asking == "ok"
        assert (pool.memory[0] == self.value).all()

    async def push(self, pool: Pool) -> None:
        """Be in the middle of a push, and have been round once."""
        assert await self.ask("push") == "ok"
        await arrives(pool.memory[0], self.value)

    async def burst(self, pool: Pool) -> None:
        """Be stopped with two rounds posted: the first arrives all the same, and the second would within RETRY_S."""
        with starved() as pairs:
            assert await self.ask("burst") == "ok"
            await self.stopped()
            await used_up(pairs)
            assert (pool.memory[0] == POISON).all()
            _post_receives(pairs[0], RECEIVES)  # enough for the first round's immediates, and not for the second's
            await arrives(pool.memory[0], self.value)
            await used_up(pairs)
            pool.memory[0][:] = POISON
            _post_receives(pairs[0], RECEIVES)  # the second round will arrive at the NIC's next try

    async def stop(self) -> None:
        """SIGSTOP, and wait until it has taken effect."""
        self.signal(signal.SIGSTOP)
        await self.stopped()

    async def stopped(self) -> None:
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            await asyncio.sleep(0.001)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


_post_receives = QueuePair.post_receives


@contextmanager
def starved() -> Iterator[list[QueuePair]]:
    """This process gives the NIC no receives for those that have been used up; the queue pairs that want some."""
    pairs: list[QueuePair] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QueuePair, "post_receives", lambda pair, count: pairs.append(pair))
        yield pairs


async def used_up(pairs: list[QueuePair]) -> None:
    """Wait until the one queue pair that wants receives has none left."""
    deadline = asyncio.get_running_loop().time() + LIMIT_S
    while not pairs or pairs[0].receives:
        assert asyncio.get_running_loop().time() < deadline, "the immediates did not arrive"
        await asyncio.sleep(0.001)


async def arrives(where: np.ndarray, value: int) -> None:
    """Wait until every byte has that value."""
    deadline = asyncio.get_running_loop().time() + LIMIT_S
    while not (where == value).all():
        assert asyncio.get_running_loop().time() < deadline, f"{value:#x} did not arrive"
        await asyncio.sleep(0.001)


async def lane_of(pool: Pool, lease_id: str, writer: Writer) -> Lease:
    """A lease on a lane that may still be in the making."""
    deadline = asyncio.get_running_loop().time() + LIMIT_S
    while True:
        try:
            return pool.grant(lease_id, writer)
        except Overloaded:
            assert asyncio.get_running_loop().time() < deadline, f"no lane of {writer.worker} came back"
            await asyncio.sleep(0.005)
