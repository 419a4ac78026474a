"""A prefill worker's pusher on node B, a decode worker on node A: whole requests over the wire, then a fence across it.

Node B has recorded KV in vLLM's page layout in place of an engine, node A an engine that is never asked; everything
between (leases, pieces, transform, link, lanes, landing, checksum, re-layout) is the real thing. In the last part
node B's process is stopped in the middle of a push; its lease is fenced, the blocks are given away, and it goes on.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from node import NODE, PORT, Channel
from prometheus_client import CollectorRegistry

from decode_worker.engines.scripted import ScriptedEngine
from decode_worker.metrics import DecodeMetrics
from decode_worker.npu.emulated import EmulatedNpu
from decode_worker.pool import KVPool
from decode_worker.worker import DecodeWorker, WorkerLimits
from prefill_worker.control.messages import LocalKV
from prefill_worker.push.pieces import Pages
from prefill_worker.push.pools import Pools
from prefill_worker.push.push import BlockRange, Limits
from prefill_worker.push.pusher import Pusher
from transport.backends import connect
from transport.backends.base import Run
from transport.backends.verbs.receiver import VerbsReceiver
from transport.errors import HawkError
from transport.geometry import KVGeometry
from transport.geometry.pages import PageLayout
from transport.geometry.plan import plan
from transport.kernels import cpu, reference
from transport.kernels.source import Source
from transport.messages import Failed, Lease, ModelInfo, PoolDescription, PoolOpened, Pushed, Reserve, Reserved, Writer

TOKEN = "a-cluster-token-of-some-length"
WRITER = Writer(worker="p0", generation="g")
MODEL = ModelInfo(name="m", fingerprint="f", max_model_len=2048, vocab_size=1000)
GEOMETRY = KVGeometry(4, 3, 64, block_size=32, num_blocks=64, num_channels=8, dtype="float32")
LAYOUT = PageLayout(3, 64, block_size=128, packing="vec", dtype="float32")
LOCAL = LocalKV(num_layers=4, num_kv_heads=3, head_dim=64, block_size=128, num_blocks=8, dtype="float32")
TABLE = [5, 0, 3, 6]
PROMPT = 333
CUT = 256
CHUNK_BYTES = 256 * 1024
STALE, NEXT_OWNER = 0x11, 0x22
LIMIT_S = 60.0


def recorded() -> Source:
    """The same pages on both nodes."""
    rng = np.random.default_rng(7)
    shape = (LOCAL.num_blocks, LAYOUT.block_elements)
    return Source([rng.standard_normal(shape, np.float32) for _ in range(LOCAL.num_layers)], LAYOUT)


# ---- node A


class Router:
    """The owner of the leases."""

    def __init__(self) -> None:
        self.leases: asyncio.Queue[Lease] = asyncio.Queue()
        self.failures: asyncio.Queue[str] = asyncio.Queue()

    def send(self, message: object) -> None:
        if isinstance(message, Reserved):
            self.leases.put_nowait(message.lease)
        elif isinstance(message, Failed):
            self.failures.put_nowait(message.error.code)


class Decode:
    """A decode worker on an emulated NPU."""

    def __init__(self, name: str, kv_path: Any) -> None:
        self.device = EmulatedNpu(GEOMETRY.num_channels, 16 << 20)
        self.pool = KVPool(
            self.device,
            GEOMETRY,
            kv_path=kv_path,
            source_dtype="float32",
            staging_size=4 << 20,
            slots=3,
            slot_bytes=CHUNK_BYTES,
            checksum=kv_path != "contiguous",
        )
        self.memory = self.device.host_channels()
        self.router = Router()
        self.worker = DecodeWorker(
            name=name,
            generation=f"{name}-1",
            model=MODEL,
            eos_ids=frozenset(),
            pool=self.pool,
            engine=ScriptedEngine(self.memory, GEOMETRY, self.pool.bases, MODEL.vocab_size),
            make_receiver=lambda events: VerbsReceiver(
                name, f"{name}-1", TOKEN, self.pool.handed_out(), events, slots=4
            ),
            metrics=DecodeMetrics(CollectorRegistry()),
            limits=WorkerLimits(),
        )

    async def reserve(self, request_id: str, prompt: int = PROMPT) -> Lease:
        request = Reserve(
            request_id=request_id,
            prompt_tokens=prompt,
            max_tokens=8,
            block_hashes=(),
            tail_tokens=(),
            writer=WRITER,
        )
        await self.worker.on_message(self.router, request)
        return await asyncio.wait_for(self.router.leases.get(), LIMIT_S)

    async def until(self, what: str, condition: Any) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, what
            await asyncio.sleep(0.01)

    def kv(self, lease: Lease) -> Any:
        return reference.read_kv(self.memory, self.pool.bases, GEOMETRY, lease.block_ids, PROMPT)

    def expected(self, lease: Lease) -> Any:
        """The KV as the reference kernel puts it into a pool of its own."""
        memory = [np.zeros_like(channel) for channel in self.memory]
        reference.transform_into(memory, self.pool.bases, GEOMETRY, lease.block_ids, recorded(), TABLE, 0, PROMPT)
        return reference.read_kv(memory, self.pool.bases, GEOMETRY, lease.block_ids, PROMPT)


async def decode_node(channel: Channel, control: Channel) -> None:
    for kv_path in ("hawk", "relay", "host", "contiguous"):
        decode = Decode(f"d-{kv_path}", kv_path)
        await decode.worker.start()
        running = asyncio.create_task(decode.worker.run())
        await ask(channel, "pool", decode.worker.description.model_dump_json())
        for number in range(2):
            lease = await decode.reserve(f"r{number}")
            told = await ask(channel, "push", lease.model_dump_json())
            assert told == "ok", told
            record = decode.worker.leases.get(lease.id)
            assert record is not None
            await decode.until("landed", lambda record=record: record.state.value == "landed")
            for ours, theirs in zip(decode.kv(lease), decode.expected(lease), strict=True):
                assert np.array_equal(ours, theirs), f"{kv_path}: the KV that landed is not the KV that was sent"
            print(f"{kv_path}: request {number} landed, KV equal", flush=True)
        assert decode.router.failures.empty()
        if kv_path != "contiguous":
            await case_35_a_flipped_byte_is_caught(decode, channel)
        if kv_path == "hawk":
            await fence_across_the_wire(decode, channel, control)
        await ask(channel, "close", decode.worker.name)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await decode.worker.close()
        assert not len(decode.worker.leases)
    await ask(channel, "end", "")


async def case_35_a_flipped_byte_is_caught(decode: Decode, channel: Channel) -> None:
    """In a channel as it lands, or in a staging slot before it is moved: the request fails before it can decode."""
    lease = await decode.reserve("flipped")
    events = decode.worker.receiver.events
    staged = decode.pool.kv_path == "host"
    name = "announced" if staged else "landed"
    real = getattr(events, name)

    def flip(lease_id: str, *rest: object) -> None:
        if staged:
            assert lease.staging_offset is not None
            decode.pool.staging_memory[lease.staging_offset] ^= 1
        else:
            run = plan(GEOMETRY, decode.pool.bases, lease.block_ids, 0, PROMPT)[-1]
            mirror = decode.pool.mirror
            landed, start = (decode.memory, 0) if mirror is None else (mirror.channels, mirror.start)
            landed[run.region][run.remote_offset - start] ^= 1
        setattr(events, name, real)
        real(lease_id, *rest)

    setattr(events, name, flip)
    told = await ask(channel, "push", lease.model_dump_json())
    assert told == "ok" or staged, told  # a slot is looked at while the push still runs
    assert await asyncio.wait_for(decode.router.failures.get(), LIMIT_S) == "checksum_mismatch"
    await decode.until("the blocks are back", lambda: decode.worker.leases.get(lease.id) is None)
    print(f"{decode.pool.kv_path}: a flipped byte was caught", flush=True)


async def fence_across_the_wire(decode: Decode, channel: Channel, control: Channel) -> None:
    decode.worker.pool.checksum = False
    lease = await decode.reserve("stale")
    assert await ask(channel, "hammer", lease.model_dump_json()) == "ok"
    runs = plan(GEOMETRY, decode.pool.bases, lease.block_ids, 0, PROMPT)

    def bytes_of(run: Run) -> np.ndarray:
        return decode.memory[run.region][run.remote_offset : run.remote_offset + run.length]

    await decode.until("the stale writer's bytes", lambda: (bytes_of(runs[0]) == STALE).all())
    assert await ask(control, "stop") == "stopped"
    before = time.monotonic()
    record = decode.worker.leases.get(lease.id)
    assert record is not None
    decode.worker.leases.finish(record, "cancelled")
    await decode.until("the blocks are back", lambda: decode.worker.leases.get(lease.id) is None)
    print(f"a stopped writer's blocks came back after {(time.monotonic() - before) * 1000:.1f} ms", flush=True)
    for run in runs:
        bytes_of(run)[:] = NEXT_OWNER
    await asyncio.sleep(1.0)  # what its kernel had to send goes on without the process
    assert await ask(control, "go on") == "going on"
    told = await asyncio.to_thread(channel.receive)
    assert told == "lease_revoked", told
    for run in runs:
        assert (bytes_of(run) == NEXT_OWNER).all(), f"a fenced writer wrote into channel {run.region}"
    print("not one byte of the next owner has changed", flush=True)


async def ask(channel: Channel, *command: str) -> Any:
    await asyncio.to_thread(channel.send, command)
    return await asyncio.to_thread(channel.receive)


# ---- node B


def prefill_process() -> None:
    """What A asks for, done by the parts of a prefill worker's engine process."""
    channel = Channel()
    reports: queue.Queue[Any] = queue.Queue()
    pools = Pools(LOCAL, "f", lambda pool, on_lost: connect(pool, WRITER, TOKEN, on_lost=on_lost), reports.put)
    pusher = Pusher(pools, Pages(recorded(), cpu), Limits(LIMIT_S, CHUNK_BYTES, threading.Semaphore(1)), reports.put)
    number = 0
    while True:
        command, argument = channel.receive()
        if command == "pool":
            description = PoolDescription.model_validate_json(argument)
            pools.add(description)
            opened = reports.get(timeout=LIMIT_S)
            channel.send("ok" if isinstance(opened, PoolOpened) else str(opened))
        elif command == "push":
            number += 1
            lease = Lease.model_validate_json(argument)
            # As chunked prefill does: the first range while the rest is not there yet.
            pusher.push(f"e{number}", f"t{number}", lease, BlockRange(0, CUT, TABLE, False))
            pusher.push(f"e{number}", f"t{number}", lease, BlockRange(CUT, PROMPT, TABLE, True))
            pushed = reports.get(timeout=LIMIT_S)
            channel.send("ok" if isinstance(pushed, Pushed) else str(pushed))
        elif command == "hammer":
            hammer(channel, pools, Lease.model_validate_json(argument))
        elif command == "close":
            pools.remove(argument, f"{argument}-1")
            channel.send("ok")
        else:
            channel.send("ok")
            return


def hammer(channel: Channel, pools: Pools, lease: Lease) -> None:
    """Write the lease's blocks again and again until it is refused."""
    pool, writer = pools.open(lease)
    runs = plan(GEOMETRY, pool.bases, lease.block_ids, 0, PROMPT)
    staging = np.full(sum(run.length for run in runs), STALE, np.uint8)
    channel.send("ok")
    try:
        while True:
            writer.write(staging, runs)
    except HawkError as error:
        writer.abort(error.message)
        channel.send(error.code)


def prefill_node() -> None:
    """Stops and continues the process that prefills, as A says."""
    process = multiprocessing.get_context("fork").Process(target=prefill_process)
    process.start()
    control = Channel(PORT + 1)
    assert process.pid is not None
    assert control.receive() == ["stop"]
    os.kill(process.pid, signal.SIGSTOP)
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)
    control.send("stopped")
    assert control.receive() == ["go on"]
    os.kill(process.pid, signal.SIGCONT)
    control.send("going on")
    process.join()
    sys.exit(process.exitcode)


if __name__ == "__main__":
    if NODE == "A":
        asyncio.run(decode_node(Channel(), Channel(PORT + 1)))
    else:
        prefill_node()
