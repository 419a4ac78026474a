"""A decode worker without a device: blocks are counted, tokens are scripted, one frame per step."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass

from transport.errors import HawkError, Overloaded
from transport.geometry import KVGeometry
from transport.messages import (
    Decode,
    Endpoint,
    Lease,
    Message,
    ModelInfo,
    PoolDescription,
    PreemptedNotice,
    Region,
    Reserve,
    Reserved,
    ResidentBlocks,
    Role,
    Status,
    TokenItem,
    Tokens,
)
from transport.session.server import Session
from transport.testing.worker import FakeWorker


@dataclass
class Row:
    """A decoding request."""

    decode: Decode
    token: int
    count: int


class FakeDecode(FakeWorker):
    """Script:

    - `failures`: errors for the next reservations, one each; None lets one pass;
    - `gate`: closed (`clear()`), no reservation is answered; `step_s`: pause between steps;
    - `steps`: closed (`clear()`), no step is made, until `step()` is called;
    - `preempt`: how many requests to preempt, each after its next token.
    """

    role: Role = "decode"

    def __init__(self, name: str, model: ModelInfo, *, num_blocks: int = 1024, block_size: int = 32) -> None:
        super().__init__(name, model)
        self.geometry = KVGeometry(
            num_layers=1, num_kv_heads=1, head_dim=32, block_size=block_size, num_blocks=num_blocks, num_channels=1
        )
        self.free_blocks = num_blocks
        self.failures: deque[HawkError | None] = deque()
        self.gate = asyncio.Event()
        self.gate.set()
        self.steps = asyncio.Event()
        self.steps.set()
        self.step_s = 0.0
        self.preempt = 0
        self.resident: set[bytes] = set()
        self.rows: dict[str, Row] = {}
        self._blocks: dict[str, int] = {}
        self._lease_ids = itertools.count(1)
        self._late: set[asyncio.Task[None]] = set()
        self._stepper: asyncio.Task[None] | None = None

    def pool(self) -> PoolDescription:
        return PoolDescription(
            worker=self.name,
            generation=self.generation,
            kv_path="hawk",
            geometry=self.geometry,
            bases=(0, 0),
            channels=(Region(address=0, rkey=0, length=1),),
            endpoint=Endpoint(backend="shm", address=f"/fake/{self.name}"),
            model=self.model,
        )

    def status(self) -> Status:
        return Status(
            ready=self.ready,
            draining=self.draining,
            running=len(self.rows),
            waiting=len(self.held) - len(self.rows),
            free_blocks=self.free_blocks,
            total_blocks=self.geometry.num_blocks,
        )

    async def handle(self, session: Session, message: Message) -> None:
        if isinstance(message, Reserve):
            await self._reserve(session, message)
        elif isinstance(message, Decode) and message.request_id in self.held:
            self.rows[message.request_id] = Row(message, message.token_id, message.generated)
            if self._stepper is None or self._stepper.done():
                self._stepper = asyncio.create_task(self._run())

    async def _reserve(self, session: Session, message: Reserve) -> None:
        failure = self.failures.popleft() if self.failures else None
        if failure is not None:
            raise failure
        need = -(-message.prompt_tokens // self.geometry.block_size)
        if need > self.free_blocks:
            raise Overloaded(f"{need} blocks are needed, {self.free_blocks} of {self.geometry.num_blocks} are free")
        self.free_blocks -= need
        self._blocks[message.request_id] = need
        self.held[message.request_id] = session
        resident = list(itertools.takewhile(self.resident.__contains__, message.block_hashes))
        lease = Lease(
            id=f"lease-{next(self._lease_ids)}",
            worker=self.name,
            generation=self.generation,
            block_ids=tuple(range(need)),
            prompt_tokens=message.prompt_tokens,
            resident_tokens=len(resident) * self.geometry.block_size,
            ttl_s=30.0,
            slot=0,
        )
        if self.gate.is_set():
            session.send(Reserved(request_id=message.request_id, lease=lease))
        else:
            self._late.add(asyncio.create_task(self._answer_late(session, message.request_id, lease)))

    async def _answer_late(self, session: Session, request_id: str, lease: Lease) -> None:
        await self.gate.wait()
        if request_id in self.held:
            session.send(Reserved(request_id=request_id, lease=lease))

    def declare_resident(self, *hashes: bytes) -> None:
        """Tell every router that these blocks are here."""
        self.resident.update(hashes)
        for session in self.sessions:
            session.send(ResidentBlocks(added=hashes))

    async def drop(self, request_id: str) -> None:
        await super().drop(request_id)
        self.rows.pop(request_id, None)
        self.free_blocks += self._blocks.pop(request_id, 0)

    # ---- decoding

    async def _run(self) -> None:
        while self.rows:
            await asyncio.sleep(self.step_s)
            await self.steps.wait()
            await self.step()

    async def step(self) -> None:
        """One token for every row; one frame for each session."""
        frames: dict[Session, list[TokenItem]] = {}
        preempted: list[tuple[Session, str]] = []
        for request_id, row in list(self.rows.items()):
            session = self.held[request_id]
            sampling = row.decode.sampling
            row.token, row.count = self.successor(row.token), row.count + 1
            finish = self.finish(row.token, row.count, sampling)
            logprob = self.logprob(row.token, sampling)
            item = TokenItem(request_id, [row.token], finish, None if logprob is None else [logprob])
            frames.setdefault(session, []).append(item)
            if finish is not None:
                await self.drop(request_id)
            elif self.preempt > 0:
                self.preempt -= 1
                preempted.append((session, request_id))
                await self.drop(request_id)
        for session, items in frames.items():
            session.send(Tokens(items))
        for session, request_id in preempted:
            session.send(PreemptedNotice(request_id=request_id))
        await self.changed()
