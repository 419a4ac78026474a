"""Whatever happens to leases, in whatever order: no block has two owners, and all come back in the end."""

from __future__ import annotations

import asyncio
from collections import Counter

from decode_fakes import BLOCK, WRITER, Router, reserve, table
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decode_worker.lease import LeaseRecord, LeaseState
from decode_worker.staging import StagingArea
from transport.errors import HawkError

TOTAL = 12
LIVE = (LeaseState.RESERVED, LeaseState.WRITING, LeaseState.LANDED, LeaseState.DECODING)
picks = st.integers(0, 99)
requests = st.lists(st.tuples(picks, st.integers(1, 130), st.integers(0, 2)), min_size=1, max_size=4)


class Leases(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self.set_up())
        self.all: list[LeaseRecord] = []
        self.pinned: list[LeaseRecord] = []

    async def set_up(self) -> None:
        self.leases, self.receiver, self.clock, _ = table(
            TOTAL, staging=StagingArea(64 * 1024), staging_room=lambda tokens, resident: (3, 86 * tokens)
        )
        self.routers = [Router(), Router()]

    def turn(self, call=None):
        """`call` inside the loop, then let the fences run."""

        async def inside():
            try:
                return call() if call else None
            finally:
                for _ in range(4):
                    await asyncio.sleep(0)

        return self.loop.run_until_complete(inside())

    def one_of(self, pick: int, *states: LeaseState) -> LeaseRecord | None:
        found = [lease for lease in self.all if lease.state in states]
        return found[pick % len(found)] if found else None

    @initialize(requests=requests, hold=st.booleans())
    def begin(self, requests: list[tuple[int, int, int]], hold: bool) -> None:
        self.receiver.hold = hold
        self.reserve(requests)

    @rule(requests=requests)
    def reserve(self, requests: list[tuple[int, int, int]]) -> None:
        for pick, tokens, kind in requests:
            prompt = [kind] * tokens  # three families of prompts that share prefixes
            request = reserve(f"r{len(self.all)}", prompt, 2 + pick, preemptions=kind)
            try:
                lease = self.turn(lambda p=pick, r=request: self.leases.reserve(self.routers[p % 2], r))
            except HawkError:
                continue
            self.all.append(self.leases.get(lease.id))

    @rule(pick=picks)
    def progress(self, pick: int) -> None:
        if lease := self.one_of(pick, LeaseState.RESERVED, LeaseState.WRITING):
            self.leases.progress(lease.id)

    @rule(pick=picks)
    def land(self, pick: int) -> None:
        lease = self.one_of(pick, LeaseState.RESERVED, LeaseState.WRITING)
        if lease and (written := self.leases.written(lease.id)):
            self.leases.land(written)

    @rule(pick=picks)
    def land_late(self, pick: int) -> None:
        if lease := self.one_of(pick, LeaseState.FENCING, LeaseState.FREED):
            assert self.leases.written(lease.id) is None

    @rule(pick=picks)
    def decode(self, pick: int) -> None:
        if lease := self.one_of(pick, LeaseState.LANDED):
            lease.state = LeaseState.DECODING

    @rule(pick=picks)
    def grow_or_preempt(self, pick: int) -> None:
        if (lease := self.one_of(pick, LeaseState.DECODING)) and not self.leases.grow(lease):
            victim = self.leases.victim()
            assert victim is not None
            self.leases.finish(victim, "preempted")

    @rule(pick=picks)
    def begin_use(self, pick: int) -> None:
        if lease := self.one_of(pick, *LIVE):
            self.leases.pin(lease)
            self.pinned.append(lease)

    @precondition(lambda self: self.pinned)
    @rule(pick=picks)
    def end_use(self, pick: int) -> None:
        self.leases.unpin(self.pinned.pop(pick % len(self.pinned)))

    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        if lease := self.one_of(pick, *LIVE):
            self.turn(lambda: self.leases.finish(lease, "cancelled"))

    @rule(pick=picks)
    def push_failed(self, pick: int) -> None:
        if lease := self.one_of(pick, *LeaseState):
            self.turn(lambda: self.leases.push_failed(lease.id, "why not"))

    @rule()
    def writer_lost(self) -> None:
        self.turn(lambda: self.leases.writer_lost(WRITER))

    @rule(pick=picks)
    def router_gone(self, pick: int) -> None:
        self.turn(lambda: self.leases.close_owner(self.routers[pick % 2]))

    @rule(seconds=st.floats(0, 60), pick=picks)
    def time_passes(self, seconds: float, pick: int) -> None:
        self.clock.now += seconds
        self.leases.refresh(self.routers[pick % 2])
        self.turn(self.leases.reap)

    @rule(hold=st.booleans())
    def fences(self, hold: bool) -> None:
        if hold:
            self.receiver._released.clear()
            self.receiver.hold = True
        else:
            self.turn(self.receiver.let_go)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        blocks = self.leases.blocks
        held = [lease for lease in self.all if lease.state is not LeaseState.FREED]
        assert {lease.id for lease in held} >= set(self.receiver.open)  # nobody writes what is freed
        uses = Counter(block for lease in held for block in lease.blocks)
        assert blocks.held == len(uses)
        for lease in held:
            shared = lease.blocks[: lease.prompt_tokens // BLOCK]
            own = set(lease.blocks[len(shared) :])
            assert all(uses[block] == 1 for block in own)  # what may still be written has one owner
            if lease.granted:
                written = set(lease.blocks[lease.resident_tokens // BLOCK :])
                assert all(uses[block] == 1 for block in written)
                assert lease.id in self.receiver.open

    def teardown(self) -> None:
        for lease in self.all:
            self.turn(lambda lease=lease: self.leases.finish(lease, "cancelled"))
        for lease in self.pinned:
            self.leases.unpin(lease)
        self.every_block_is_accounted_for()
        self.turn(self.receiver.let_go)
        assert self.leases.blocks.available == TOTAL
        assert self.leases._staging.free == 64 * 1024
        assert len(self.leases) == 0
        assert not self.receiver.open
        self.loop.close()


Leases.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLeases = Leases.TestCase
