"""Scheduler side: follows each request through the engine's scheduler and decides which blocks go when.

Knows vLLM's objects by their attributes only, so that it can be tested without the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prefill_worker.connector.step import PushRange, Step
from prefill_worker.push.push import BlockRange
from transport.geometry.kv import TILE
from transport.messages import Lease

HEARTBEAT_S = 1.0


@dataclass(slots=True)
class Tracked:
    """One request in the engine. `pushed`: tokens up to which ranges were handed to the worker side."""

    prompt_tokens: int
    arrived: float
    transfer_id: str | None = None
    lease: Lease | None = None
    blocks: list[int] = field(default_factory=list)
    pushed: int = 0
    begun: bool = False
    ended: bool = False
    first_scheduled: float | None = None


class SchedulerSide:
    """`on_held(requests, blocks)` is called whenever the blocks held beyond their request's end change.

    It is called once a second besides while the engine makes steps: its silence tells of an engine that hangs.
    """

    def __init__(self, on_held: Callable[[int, int], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_held = on_held
        self._clock = clock
        self._requests: dict[str, Tracked] = {}
        self._held: dict[str, int] = {}
        self._cancelled: list[str] = []
        self._said = clock()

    @property
    def holds_blocks(self) -> bool:
        return bool(self._held)

    def add(self, request: Any) -> None:
        """A request arrived; `kv_transfer_params` names its transfer and lease if it has one."""
        tracked = Tracked(request.num_prompt_tokens, self._clock())
        params = request.kv_transfer_params
        if params:
            tracked.transfer_id = params["transfer_id"]
            tracked.lease = Lease.model_validate(params["lease"])
            tracked.pushed = tracked.lease.resident_tokens
        self._requests[request.request_id] = tracked

    def step(self, output: Any) -> Step:
        """`output`: vLLM's SchedulerOutput of the step that is about to run."""
        if self._clock() - self._said >= HEARTBEAT_S:
            self._say_held()
        step = Step(cancelled=self._cancelled)
        self._cancelled = []
        for request_id in output.preempted_req_ids or ():
            self._rewind(request_id, step)
        for new in output.scheduled_new_reqs:
            self._schedule(new.req_id, new.num_computed_tokens, output, step, table=new.block_ids)
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            resumed = request_id in cached.resumed_req_ids
            table, added = (cached.new_block_ids[i], None) if resumed else (None, cached.new_block_ids[i])
            self._schedule(request_id, cached.num_computed_tokens[i], output, step, table=table, added=added)
        return step

    def finish(self, request_id: str, handed_over: bool, num_blocks: int) -> tuple[bool, dict[str, float] | None]:
        """The request ended → (keep its blocks until `release`?, timings in seconds).

        `handed_over` is False when it was aborted, or when its first token ended it: then nobody wants the KV.
        """
        tracked = self._requests.pop(request_id, None)
        if tracked is None:
            return False, None
        if tracked.begun:
            if not handed_over:
                assert tracked.transfer_id is not None
                self._cancelled.append(tracked.transfer_id)
            self._held[request_id] = num_blocks
            self._say_held()
        return tracked.begun, self._timings(tracked)

    def release(self, request_ids: set[str]) -> None:
        """The worker side is done with these requests' blocks."""
        for request_id in request_ids:
            self._held.pop(request_id, None)
        if request_ids:
            self._say_held()

    def _rewind(self, request_id: str, step: Step) -> None:
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        tracked.blocks = []
        if tracked.lease is not None and tracked.begun:
            tracked.pushed, tracked.ended = tracked.lease.resident_tokens, False
            step.rewound.append(request_id)

    def _schedule(
        self,
        request_id: str,
        computed: int,
        output: Any,
        step: Step,
        *,
        table: Any = None,
        added: Any = None,
    ) -> None:
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        if tracked.first_scheduled is None:
            tracked.first_scheduled = self._clock()
        if tracked.lease is None or tracked.transfer_id is None:
            return
        if table is not None:
            tracked.blocks = list(table[0])
        elif added is not None:
            tracked.blocks.extend(added[0])
        stop = min(computed + output.num_scheduled_tokens[request_id], tracked.prompt_tokens)
        last = stop == tracked.prompt_tokens
        if not last:
            stop -= stop % TILE
        if tracked.ended or (stop <= tracked.pushed and not last):
            return
        # Blocks that came from the prefix cache are in the table though never scheduled: they go with the first range.
        blocks = BlockRange(min(tracked.pushed, stop), stop, tuple(tracked.blocks), last)
        step.ranges.append(PushRange(request_id, tracked.transfer_id, tracked.lease, blocks))
        tracked.pushed, tracked.ended, tracked.begun = stop, last, True

    def _timings(self, tracked: Tracked) -> dict[str, float] | None:
        if tracked.first_scheduled is None:
            return None
        now = self._clock()
        return {"queue": tracked.first_scheduled - tracked.arrived, "prefill": now - tracked.first_scheduled}

    def _say_held(self) -> None:
        self._said = self._clock()
        self._on_held(len(self._held), sum(self._held.values()))
