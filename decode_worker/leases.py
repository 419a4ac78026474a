"""Leases: who may write, or decode from, which blocks; and their return in every case.

    reserved → writing → landed → decoding → freed
         └────────┴─────────┴─────────┴────→ fencing → freed

(`writing` is seen only where the data plane reports progress before the end.)

A lease's blocks go back to the pool only when nothing can touch them any more: the writer's last byte has
landed or the fence has returned, and no engine step or re-layout is in progress (`pins`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from decode_worker.admission import blocks_for, check
from decode_worker.blocks import BlockPool, OutOfBlocks
from decode_worker.lease import LeaseCounts, LeaseLimits, LeaseRecord, LeaseState, Owner
from decode_worker.staging import StagingArea
from transport.backends.base import Receiver
from transport.errors import HawkError, LeaseExpired, Overloaded, ProtocolError, PushFailed
from transport.messages import Lease, Reserve, Writer

log = logging.getLogger(__name__)

REMEMBERED = 4096
"""Ended leases whose ids are remembered, so that late messages find a sensible answer."""

FENCE_RETRY_S = 1.0


Ended = Callable[[LeaseRecord, HawkError], None]


class LeaseTable:
    """All leases of one pool. Everything here runs in the event loop's thread.

    `on_failed(lease, error)` is called when a lease ends for a reason its owner does not know yet (expired,
    push failed, writer lost). `on_free()` is called whenever blocks came back. A lease takes as many slots, and of as
    many bytes, in `staging` as `staging_room(prompt_tokens, resident_tokens)` says.
    """

    def __init__(
        self,
        blocks: BlockPool,
        receiver: Receiver,
        *,
        worker: str,
        generation: str,
        block_size: int,
        max_model_len: int,
        limits: LeaseLimits,
        on_failed: Ended,
        on_free: Callable[[], None],
        staging: StagingArea | None = None,
        staging_room: Callable[[int, int], tuple[int, int]] = lambda prompt, resident: (1, prompt),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.blocks = blocks
        self.limits = limits
        self.counts = LeaseCounts()
        self._receiver = receiver
        self._worker, self._generation = worker, generation
        self._block_size, self._max_model_len = block_size, max_model_len
        self._on_failed, self._on_free = on_failed, on_free
        self._staging, self._staging_room = staging, staging_room
        self._clock = clock
        self._ids, self._arrivals = itertools.count(1), itertools.count(1)
        self._leases: dict[str, LeaseRecord] = {}
        self._by_request: dict[tuple[Owner, str], LeaseRecord] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._fences: set[asyncio.Task[None]] = set()

    # ---- looking

    def __len__(self) -> int:
        """Leases whose blocks are not back yet."""
        return len(self._leases)

    def get(self, lease_id: str) -> LeaseRecord | None:
        return self._leases.get(lease_id)

    def of_request(self, owner: Owner, request_id: str) -> LeaseRecord | None:
        """The live lease of a request; None once it has ended."""
        return self._by_request.get((owner, request_id))

    def was_here(self, lease_id: str) -> bool:
        """Whether a lease of this name ended a while ago: its owner was told, or ended it itself."""
        return lease_id in self._gone

    def live(self) -> list[LeaseRecord]:
        """Leases that have not ended."""
        return [lease for lease in self._leases.values() if lease.state is not LeaseState.FENCING]

    def age(self, lease: LeaseRecord) -> float:
        """Seconds since the reservation."""
        return self._clock() - lease.created

    def since_written(self, lease: LeaseRecord) -> float:
        """Seconds since the writer's last byte was there."""
        return self._clock() - lease.written

    def by_state(self) -> Counter[LeaseState]:
        return Counter(lease.state for lease in self._leases.values())

    def victim(self) -> LeaseRecord | None:
        """Whom to preempt: of the leases that have landed, the least often preempted, of these the latest."""
        return min(self._decodable(), key=lambda lease: (lease.preemptions, -lease.arrival), default=None)

    @property
    def admissible(self) -> int:
        """Blocks a new reservation may take. Running requests keep one each to grow into, and the watermark."""
        if not self._leases:
            return self.blocks.available
        running = sum(1 for _ in self._decodable())
        reserve = max(running, int(self.limits.watermark * self.blocks.total))
        return max(0, self.blocks.available - reserve)

    # ---- life

    def reserve(self, owner: Owner, request: Reserve) -> Lease:
        """Blocks for the prompt and one more token, sharing what is resident, and the right to write them.

        Raises ContextLengthExceeded where the request can never fit, Overloaded where there is no room now,
        WorkerLost where the writer is not connected, ProtocolError or InvalidRequest for a bad message.
        Nothing is held then.
        """
        if older := self.of_request(owner, request.request_id):
            self._end(older, "replaced")
            raise ProtocolError(f"request {request.request_id} had a lease already; it is ended")
        check(request, self._block_size, self._max_model_len, self.blocks.total)
        prefix = self.blocks.find(request.block_hashes)
        fresh = room = blocks_for(request.prompt_tokens + 1, self._block_size) - len(prefix)
        if request.preemptions:  # comes back only when there is room for all of it, lest it be preempted again
            room = blocks_for(request.prompt_tokens + request.max_tokens - 1, self._block_size) - len(prefix)
        if self.blocks.needed(prefix, room) > self.admissible:
            raise Overloaded(f"{room} KV blocks needed, {self.admissible} of {self.blocks.total} to be had now")
        now = self._clock()
        lease = LeaseRecord(
            id=f"{self._worker}-{self._generation[:8]}-{next(self._ids)}",
            request_id=request.request_id,
            owner=owner,
            arrival=next(self._arrivals),
            preemptions=request.preemptions,
            writer=request.writer,
            prompt_tokens=request.prompt_tokens,
            resident_tokens=len(prefix) * self._block_size,
            block_hashes=request.block_hashes,
            tail_tokens=request.tail_tokens,
            blocks=self.blocks.allocate(fresh, prefix),
            created=now,
            deadline=now + self.limits.ttl_s,
        )
        self._leases[lease.id] = lease
        self._by_request[owner, request.request_id] = lease
        try:
            if self._staging is not None:
                lease.staging = self._staging.take(*self._staging_room(lease.prompt_tokens, lease.resident_tokens))
            slot = self._receiver.grant(lease.id, request.writer)
        except BaseException:
            self._end(lease, "refused")
            raise
        lease.granted = True
        return Lease(
            id=lease.id,
            worker=self._worker,
            generation=self._generation,
            block_ids=tuple(lease.blocks),
            prompt_tokens=lease.prompt_tokens,
            resident_tokens=lease.resident_tokens,
            ttl_s=self.limits.ttl_s,
            slot=slot,
            staging_offset=lease.staging.offset if lease.staging else None,
            staging_slots=lease.staging.count if lease.staging else 0,
            staging_slot_bytes=lease.staging.slot_bytes if lease.staging else 0,
        )

    def written(self, lease_id: str) -> LeaseRecord | None:
        """The writer's last byte is there: it may stop. None if the lease has ended meanwhile."""
        lease = self._leases.get(lease_id)
        if lease is None or not self._open(lease):
            self.counts.late["landed"] += 1
            return None
        lease.granted = False
        lease.state = LeaseState.WRITING
        lease.written = self._clock()
        self._receiver.acknowledge(lease_id)
        return lease

    def land(self, lease: LeaseRecord) -> None:
        """The KV is in the blocks, behind the barrier: from now on it may be decoded, and its blocks shared."""
        if lease.state is not LeaseState.WRITING:
            return
        lease.state = LeaseState.LANDED
        self._give_staging(lease)
        for block, digest in zip(lease.blocks, lease.block_hashes, strict=False):
            self.blocks.register(block, digest)

    def grow(self, lease: LeaseRecord) -> bool:
        """One more block for a decoding lease; False if none is to be had."""
        try:
            lease.blocks += self.blocks.allocate(1)
        except OutOfBlocks:
            return False
        return True

    def finish(self, lease: LeaseRecord, how: str) -> None:
        """End a lease in whatever state, at its owner's wish or because its request is complete. Idempotent."""
        self._end(lease, how)

    def fail(self, lease: LeaseRecord, error: HawkError) -> None:
        """End a lease because of `error`, and have its owner told; does nothing once it has ended."""
        if lease.state not in (LeaseState.FENCING, LeaseState.FREED):
            self._end(lease, error.code)
            self._on_failed(lease, error)

    def corrupt(self, lease: LeaseRecord, error: HawkError) -> None:
        """End a lease whose KV proved to be of no use; its blocks will not be found by other requests either."""
        self.blocks.forget(lease.blocks)
        self.fail(lease, error)

    def pin(self, lease: LeaseRecord) -> None:
        """Somebody reads or writes the blocks now; pairs with `unpin`."""
        lease.pins += 1

    def unpin(self, lease: LeaseRecord) -> None:
        lease.pins -= 1
        self._free_if_idle(lease)

    # ---- ends that come from elsewhere

    def push_failed(self, lease_id: str, reason: str) -> None:
        lease = self._leases.get(lease_id)
        if lease is None or not self._open(lease):
            self.counts.late["push_failed"] += 1
            return
        self.fail(lease, PushFailed(reason))

    def writer_lost(self, writer: Writer) -> None:
        for lease in self.live():
            if lease.writer == writer and self._open(lease):
                self.fail(lease, PushFailed(f"prefill worker {writer.worker} was lost before its push had landed"))

    def close_owner(self, owner: Owner) -> None:
        """The router is gone: all it had ends."""
        for lease in [lease for lease in self.live() if lease.owner is owner]:
            self._end(lease, "session_closed")

    def refresh(self, owner: Owner) -> None:
        """The router is alive: its leases live on for another TTL."""
        deadline = self._clock() + self.limits.ttl_s
        for lease in self._leases.values():
            if lease.owner is owner:
                lease.deadline = deadline

    def progress(self, lease_id: str) -> LeaseRecord | None:
        """The writer is at work; None if the lease has ended meanwhile."""
        lease = self._leases.get(lease_id)
        if lease is None or not self._open(lease):
            return None
        lease.state = LeaseState.WRITING
        lease.deadline = self._clock() + self.limits.ttl_s
        return lease

    def reap(self) -> float:
        """End what has expired → seconds until the next lease can expire."""
        now = self._clock()
        soonest = min(self.limits.ttl_s, self.limits.max_hold_s)
        for lease in self.live():
            waiting = lease.decode is None or lease.state in (LeaseState.RESERVED, LeaseState.WRITING)
            cap = lease.created + self.limits.max_hold_s
            deadline = min(lease.deadline, cap) if waiting else lease.deadline
            if deadline <= now:
                why = "was not used in time" if deadline == cap else "was not refreshed"
                self.fail(lease, LeaseExpired(f"lease {lease.id} {why} ({lease.state.value})"))
            else:
                soonest = min(soonest, deadline - now)
        return soonest

    async def reap_forever(self) -> None:
        """The independent reaper: needs no traffic. A refresh can only postpone a deadline, so no wake is missed."""
        while True:
            await asyncio.sleep(max(self.reap(), 0.001))

    async def close(self) -> None:
        """End everything; waits for the fences."""
        for lease in self.live():
            self._end(lease, "closed")
        while self._fences:
            await asyncio.wait(self._fences)

    # ---- helpers

    @staticmethod
    def _open(lease: LeaseRecord) -> bool:
        """Whether the writer's part is still going on."""
        return lease.granted and lease.state in (LeaseState.RESERVED, LeaseState.WRITING)

    def _decodable(self) -> Iterable[LeaseRecord]:
        states = (LeaseState.LANDED, LeaseState.DECODING)
        return (lease for lease in self._leases.values() if lease.state in states)

    def _end(self, lease: LeaseRecord, how: str) -> None:
        if lease.state in (LeaseState.FENCING, LeaseState.FREED):
            return
        lease.state = LeaseState.FENCING
        self.counts.ended[how] += 1
        self._by_request.pop((lease.owner, lease.request_id), None)
        self._gone[lease.id] = None
        if len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)
        if lease.granted:
            self.counts.fences += 1
            task = asyncio.ensure_future(self._fence(lease))
            self._fences.add(task)
            task.add_done_callback(self._fences.discard)
        else:
            self._free_if_idle(lease)

    async def _fence(self, lease: LeaseRecord) -> None:
        """Keeps this lease's blocks, and nothing else, for as long as its writer may still write."""
        while True:
            try:
                await self._receiver.fence(lease.id)
                break
            except Exception:
                self.counts.fence_errors += 1
                log.exception("fence of lease %s failed; its blocks stay until it succeeds", lease.id)
                await asyncio.sleep(FENCE_RETRY_S)
        lease.granted = False
        self._free_if_idle(lease)

    def _free_if_idle(self, lease: LeaseRecord) -> None:
        if lease.state is not LeaseState.FENCING or lease.granted or lease.pins:
            return
        lease.state = LeaseState.FREED
        del self._leases[lease.id]
        self.blocks.release(lease.blocks)
        self._give_staging(lease)
        self._on_free()

    def _give_staging(self, lease: LeaseRecord) -> None:
        if lease.staging is not None and self._staging is not None:
            self._staging.give(lease.staging)
            lease.staging = None
