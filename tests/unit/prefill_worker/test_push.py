"""A push in each of its phases: what lands, what is held, what an abort, a fence or a silent peer does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from prefill_fakes import GEOMETRY, KV, MemoryLease, MemoryPool, Reports, lease_of, pages, pool_of

from prefill_worker.push.pools import Pools
from prefill_worker.push.push import BlockRange, Limits
from prefill_worker.push.pusher import Pusher
from transport.geometry.pages import unpack_pages
from transport.kernels.reference import read_kv
from transport.messages import Failed, PoolOpened, Pushed

TABLE = (5, 2, 9, 7)
ONE_TILE_ROW = 2 * GEOMETRY.num_tensors * 4096


class Rig:
    def __init__(self, *, ttl_s: float = 5.0, chunk_bytes: int = ONE_TILE_ROW, maps: bool = True) -> None:
        self.reports = Reports()
        self.pool = MemoryPool(pool_of(), maps)
        self.pools = Pools(KV, "f", lambda pool, on_lost: self.pool, lambda message: None)
        self.pools.add(self.pool.pool)
        self.pages = pages()
        limits = Limits(ttl_s, chunk_bytes, threading.Semaphore(1))
        self.pusher = Pusher(self.pools, self.pages, limits, self.reports)

    def push(self, start: int, stop: int, last: bool, *, tokens: int = 200, request: str = "r0") -> None:
        lease = lease_of(tokens, f"l-{request}")
        self.pusher.push(request, f"t-{request}", lease, BlockRange(start, stop, TABLE, last))

    def lease(self, request: str = "r0") -> MemoryLease:
        assert self.pool.opened.wait(10)
        return self.pool.leases[f"l-{request}"]

    def landed(self, tokens: int = 200) -> tuple[np.ndarray, np.ndarray]:
        return read_kv(self.pool.memory, self.pool.pool.bases, GEOMETRY, lease_of(tokens).block_ids, tokens)

    def engine_kv(self, tokens: int = 200) -> list[np.ndarray]:
        source = self.pages.source
        kv = [unpack_pages(layer[list(TABLE)], source.layout) for layer in source.layers]
        rows = [np.stack([layer[i].swapaxes(1, 2).reshape(-1, 2, 32) for layer in kv]) for i in (0, 1)]
        return [values[:, :tokens] for values in rows]

    def assert_landed(self, tokens: int = 200) -> None:
        for ours, theirs in zip(self.landed(tokens), self.engine_kv(tokens), strict=True):
            np.testing.assert_array_equal(ours, theirs)

    def hold(self, prepare: Callable[[MemoryLease], None]) -> None:
        self.pool.prepare = prepare


def until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("chunk_bytes", [1, ONE_TILE_ROW, 1 << 20])
def test_ranges_land_in_order_and_are_acknowledged(maps: bool, chunk_bytes: int) -> None:
    rig = Rig(maps=maps, chunk_bytes=chunk_bytes)
    rig.push(0, 64, False)
    rig.push(64, 192, False)
    rig.push(192, 200, True)
    pushed = rig.reports.wait()
    assert isinstance(pushed, Pushed)
    assert (pushed.request_id, pushed.lease_id) == ("t-r0", "l-r0")
    assert pushed.bytes == 7 * ONE_TILE_ROW
    rig.assert_landed()


def test_blocks_are_held_until_the_acknowledgement_and_the_engines_end() -> None:
    rig = Rig()
    rig.hold(lambda lease: lease.ack_gate.clear())
    rig.push(0, 200, True)
    assert rig.lease().completing.wait(10)
    assert rig.pusher.collect({"r0", "another"}) == set()
    rig.lease().ack_gate.set()
    rig.reports.wait()
    assert rig.pusher.collect(set()) == {"r0"}
    assert rig.pusher.collect(set()) == set()


def test_a_push_that_ends_first_waits_for_the_engines_word() -> None:
    rig = Rig()
    rig.push(0, 200, True)
    rig.reports.wait()
    assert rig.pusher.collect(set()) == set()
    assert rig.pusher.collect({"r0"}) == {"r0"}


def test_case_01_an_abort_while_waiting_for_the_engine() -> None:
    rig = Rig()
    rig.push(0, 64, False)
    until(lambda: rig.lease().log == ["chunk", "chunk"] and not rig.lease().in_chunk.is_set())
    rig.pusher.cancel("t-r0", "client gone")
    until(lambda: rig.pusher.collect({"r0"}) == {"r0"})
    until(lambda: rig.lease().aborted == "client gone")
    assert rig.reports == []


def test_case_10_an_abort_in_the_middle_of_a_chunk_frees_after_it() -> None:
    rig = Rig()
    rig.hold(lambda lease: lease.chunk_gate.clear())
    rig.push(0, 200, True)
    assert rig.lease().in_chunk.wait(10)
    rig.pusher.cancel("t-r0", "client gone")
    assert rig.pusher.collect({"r0"}) == set()  # the page is being read
    rig.lease().chunk_gate.set()
    until(lambda: rig.pusher.collect(set()) == {"r0"})
    until(lambda: rig.lease().log == ["chunk", "abort"])


def test_case_10_an_abort_while_the_acknowledgement_is_awaited_frees_at_once() -> None:
    rig = Rig(ttl_s=60)
    rig.hold(lambda lease: lease.ack_gate.clear())
    rig.push(0, 200, True)
    assert rig.lease().completing.wait(10)
    rig.pusher.cancel("t-r0", "client gone")
    assert rig.pusher.collect({"r0"}) == {"r0"}
    assert rig.lease().aborted == "client gone"
    assert rig.reports == []


def test_case_12_a_peer_that_never_acknowledges_costs_one_ttl() -> None:
    rig = Rig(ttl_s=0.05)
    rig.hold(lambda lease: lease.ack_gate.clear())
    rig.push(0, 200, True)
    failed = rig.reports.wait()
    assert isinstance(failed, Failed)
    assert failed.error.code == "push_failed"
    assert rig.lease().aborted is not None
    assert rig.pusher.collect({"r0"}) == {"r0"}


def test_case_12_a_slow_prefill_is_no_reason_to_give_up() -> None:
    rig = Rig(ttl_s=0.02)
    rig.push(0, 64, False)
    until(lambda: rig.lease().log == ["chunk", "chunk"])
    time.sleep(0.1)  # several TTLs without a new range
    rig.push(64, 200, True)
    assert isinstance(rig.reports.wait(), Pushed)


def test_case_08_no_turn_to_copy_ends_in_an_error() -> None:
    rig = Rig(ttl_s=0.05)
    rig.hold(lambda lease: lease.chunk_gate.clear() if lease.lease.id == "l-r0" else None)
    rig.push(0, 200, True)
    assert rig.lease().in_chunk.wait(10)
    rig.push(0, 200, True, request="r1")
    failed = rig.reports.wait()
    assert isinstance(failed, Failed)
    assert failed.request_id == "t-r1"
    rig.lease().chunk_gate.set()
    assert isinstance(rig.reports.wait(2), Pushed)


def test_case_09_a_fenced_lease_is_written_no_further() -> None:
    rig = Rig()

    def fence(lease: MemoryLease) -> None:
        lease.revoked = True

    rig.hold(fence)
    rig.push(0, 200, True)
    failed = rig.reports.wait()
    assert isinstance(failed, Failed)
    assert failed.error.code == "lease_revoked"
    assert all((memory == 0xA5).all() for memory in rig.pool.memory)


def test_preemption_takes_queued_ranges_back_and_waits_for_the_reader() -> None:
    rig = Rig()
    rig.hold(lambda lease: lease.chunk_gate.clear())
    rig.push(0, 192, False)
    assert rig.lease().in_chunk.wait(10)
    rewound = threading.Thread(target=rig.pusher.rewind, args=("r0",))
    rewound.start()
    rewound.join(0.05)
    assert rewound.is_alive()  # the engine must not overwrite the page in hand
    rig.lease().chunk_gate.set()
    rewound.join(10)
    assert rig.lease().log == ["chunk"]  # of six
    for layer in rig.pages.source.layers:  # the engine computes them anew, elsewhere or here
        np.multiply(layer, 2, out=layer)
    rig.push(0, 200, True)
    assert isinstance(rig.reports.wait(), Pushed)
    rig.assert_landed()


def test_rewinding_a_finished_push_changes_nothing() -> None:
    rig = Rig()
    rig.push(0, 200, True)
    rig.reports.wait()
    rig.pusher.rewind("r0")
    rig.push(0, 200, True)
    assert rig.pusher.collect({"r0"}) == {"r0"}
    assert len(rig.reports) == 1


def test_case_19_a_lease_of_an_older_generation_is_refused_by_name() -> None:
    rig = Rig()
    rig.pusher.push("r0", "t-r0", lease_of(64, generation="older"), BlockRange(0, 64, TABLE, True))
    failed = rig.reports.wait()
    assert isinstance(failed, Failed)
    assert failed.error.code == "stale_generation"
    rig.pusher.push("r1", "t-r1", lease_of(64, worker="d9"), BlockRange(0, 64, TABLE, True))
    failed = rig.reports.wait(2)
    assert isinstance(failed, Failed)
    assert failed.error.code == "unknown_pool"
    assert rig.pusher.collect({"r0", "r1"}) == {"r0", "r1"}


def test_a_defect_becomes_a_failed_push() -> None:
    rig = Rig()
    rig.pusher.push("r0", "t-r0", lease_of(200), BlockRange(0, 200, (1,), True))  # table too short
    failed = rig.reports.wait()
    assert isinstance(failed, Failed)
    assert failed.error.code == "push_failed"
    assert rig.pool.leases["l0"].aborted is not None


def test_closing_gives_up_every_push() -> None:
    rig = Rig(ttl_s=60)
    rig.hold(lambda lease: lease.ack_gate.clear())
    rig.push(0, 200, True)
    assert rig.lease().completing.wait(10)
    rig.pusher.close()
    assert rig.lease().aborted is not None


def test_pools_say_what_they_open() -> None:
    reports = Reports()
    pools = Pools(KV, "f", lambda pool, on_lost: MemoryPool(pool), reports)
    pools.add(pool_of())
    assert reports == [PoolOpened(worker="d0", generation="g0")]
