"""Continuous batching: requests join and leave between engine steps; the latest gives way when blocks run out."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from decode_worker.batch import Batch, Row
from decode_worker.engines.base import DecodeBatch, Engine
from decode_worker.lease import LeaseRecord, LeaseState, Owner
from decode_worker.leases import LeaseTable
from decode_worker.sampler import NO_TOKEN, SamplingParams, choose
from transport import prefix
from transport.errors import EngineFailed
from transport.messages import Decode, FinishReason, Logprob, TokenItem

Emit = Callable[[Owner, list[TokenItem]], None]


class Scheduler:
    """Drives the engine over the landed leases. Everything but the step itself runs in the event loop's thread.

    `emit(owner, items)` is called once per step and owner; `on_preempt(lease)` after a lease was preempted;
    `on_step(rows, seconds)` after each step. `root` is the hash before a prompt's first block.
    """

    def __init__(
        self,
        engine: Engine,
        leases: LeaseTable,
        *,
        max_batch: int,
        max_model_len: int,
        eos_ids: frozenset[int],
        root: bytes,
        emit: Emit,
        on_preempt: Callable[[LeaseRecord], None],
        on_step: Callable[[int, float], None] = lambda rows, seconds: None,
    ) -> None:
        self._engine, self._leases = engine, leases
        self._block_size = engine.geometry.block_size
        self._max_model_len, self._eos_ids, self._root = max_model_len, eos_ids, root
        self._emit, self._on_preempt, self._on_step = emit, on_preempt, on_step
        self._batch = Batch(max_batch, -(-max_model_len // self._block_size))
        self._waiting: deque[Row] = deque()
        self._wake = asyncio.Event()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._step_began: float | None = None

    @property
    def running(self) -> int:
        return len(self._batch)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def stepping_for(self) -> float:
        """Seconds the step in progress has taken so far; 0 between steps."""
        return 0.0 if self._step_began is None else time.monotonic() - self._step_began

    def start(self, lease: LeaseRecord, request: Decode) -> None:
        """Queue a landed lease. A request that is over with its first token ends here, with no token more."""
        sampling = request.sampling
        stop_ids = frozenset(sampling.stop_token_ids)
        row = Row(
            lease=lease,
            params=SamplingParams.of(sampling),
            token=request.token_id,
            position=lease.prompt_tokens,
            generated=request.generated,
            max_tokens=sampling.max_tokens,
            stop_ids=stop_ids if sampling.ignore_eos else stop_ids | self._eos_ids,
            chain=self._chain_of(lease),
            tail=list(lease.tail_tokens),
        )
        if finish := row.verdict(self._max_model_len):
            self._leases.finish(lease, finish)
            self._emit(lease.owner, [TokenItem(lease.request_id, [], finish)])
            return
        lease.state = LeaseState.DECODING
        self._waiting.append(row)
        self.wake()

    def wake(self) -> None:
        """Something changed: a lease ended, or blocks came back."""
        self._wake.set()

    async def run(self) -> None:
        """Step for ever. Raises what the engine raises: the scheduler is of no use then."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            self._drop_ended()
            self._join()
            self._make_room()
            if not self._batch.rows:
                await self._wake.wait()
                continue
            leases = [row.lease for row in self._batch.rows]
            arrays, params = self._batch.arrays(), [row.params for row in self._batch.rows]
            for lease in leases:
                self._leases.pin(lease)
            began = self._step_began = time.monotonic()
            try:
                tokens, logprobs = await loop.run_in_executor(self._executor, self._step, arrays, params)
                self._apply(tokens, logprobs)
            finally:
                self._step_began = None
                for lease in leases:
                    self._leases.unpin(lease)
            self._on_step(len(leases), time.monotonic() - began)

    def close(self) -> None:
        """Wait for the step in progress and stop the engine's thread."""
        self._executor.shutdown(wait=True)

    # ---- between steps

    def _drop_ended(self) -> None:
        for index in range(len(self._batch) - 1, -1, -1):
            if self._batch.rows[index].lease.state is not LeaseState.DECODING:
                self._batch.remove(index)
        if any(row.lease.state is not LeaseState.DECODING for row in self._waiting):
            self._waiting = deque(row for row in self._waiting if row.lease.state is LeaseState.DECODING)

    def _join(self) -> None:
        while self._waiting and len(self._batch) < self._batch.capacity:
            self._batch.add(self._waiting.popleft())

    def _make_room(self) -> None:
        """A block for every row's next token, the earliest requests first; `victim` by victim gives its blocks up."""
        size = self._block_size
        short = [row for row in self._batch.rows if row.position // size >= len(row.lease.blocks)]
        if not short:
            return
        for row in sorted(short, key=lambda row: row.lease.arrival):
            while row.lease.state is LeaseState.DECODING and not self._leases.grow(row.lease):
                victim = self._leases.victim() or row.lease
                self._leases.finish(victim, "preempted")
                self._on_preempt(victim)
        self._drop_ended()
        for index in range(len(self._batch)):
            self._batch.refresh(index)

    # ---- the step

    def _step(self, arrays: DecodeBatch, params: list[SamplingParams]) -> tuple[list[int], list[Logprob | None]]:
        return choose(self._engine.step(arrays), params, arrays.positions)

    def _apply(self, tokens: list[int], logprobs: list[Logprob | None]) -> None:
        """Take in a step's tokens: hash full blocks, finish what is finished, tell the owners."""
        for row in self._batch.rows:
            if row.chain is not None and row.lease.state is LeaseState.DECODING:
                self._cached(row)
        self._batch.advance(tokens)
        frames: dict[Owner, list[TokenItem]] = {}
        for row, token, logprob in zip(self._batch.rows, tokens, logprobs, strict=True):
            lease = row.lease
            if lease.state is not LeaseState.DECODING:
                continue  # cancelled during the step
            if token == NO_TOKEN:
                self._leases.corrupt(lease, EngineFailed(f"logits at position {row.position - 1} are not finite"))
                continue
            finish: FinishReason | None = row.verdict(self._max_model_len)
            item = TokenItem(lease.request_id, [token], finish, None if logprob is None else [logprob])
            frames.setdefault(lease.owner, []).append(item)
            if finish is not None:
                self._leases.finish(lease, finish)
        for owner, items in frames.items():
            self._emit(owner, items)

    def _cached(self, row: Row) -> None:
        """`row.token` is in the cache now; a block that it filled becomes findable."""
        row.tail.append(row.token)
        if len(row.tail) == self._block_size and row.chain is not None:
            row.chain = prefix.chain(row.chain, row.tail)
            self._leases.blocks.register(row.lease.blocks[row.position // self._block_size], row.chain)
            row.tail = []

    def _chain_of(self, lease: LeaseRecord) -> bytes | None:
        if lease.block_hashes:
            return lease.block_hashes[-1]
        hashed = len(lease.tail_tokens) == lease.prompt_tokens
        return self._root if hashed else None
