"""Which pools a worker accepts, and how it tells that one is lost."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from prefill_fakes import GEOMETRY, KV, MODEL, MemoryPool, Reports, lease_of, pool_of

from prefill_worker.push.pools import Pools, check_pool
from transport.backends.base import OnLost, PoolWriter
from transport.errors import AuthenticationFailed, GeometryMismatch, StaleGeneration, UnknownPool
from transport.messages import PoolDescription, PoolOpened, PoolRefused, Region


class Plane:
    """Connects to memory; remembers how to break each connection."""

    def __init__(self) -> None:
        self.writers: list[MemoryPool] = []
        self.lost: list[OnLost] = []
        self.error: Exception | None = None

    def connect(self, pool: PoolDescription, on_lost: OnLost) -> PoolWriter:
        if self.error is not None:
            raise self.error
        self.writers.append(MemoryPool(pool))
        self.lost.append(on_lost)
        return self.writers[-1]


def make() -> tuple[Plane, Pools, Reports]:
    plane, reports = Plane(), Reports()
    return plane, Pools(KV, "f", plane.connect, reports), reports


def changed(**changes: Any) -> PoolDescription:
    return pool_of(geometry=dataclasses.replace(GEOMETRY, **changes))


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        (changed(num_kv_heads=4), "num_kv_heads 4, ours is 2"),
        (changed(head_dim=64), "head_dim 64, ours is 32"),
        (changed(num_layers=3), "num_layers 3, ours is 2"),
        (pool_of(model=MODEL.model_copy(update={"fingerprint": "x"})), "another model"),
        (pool_of(bases=(0,)), "1 tensors"),
        (pool_of(channels=()), "0 channels"),
        (pool_of(kv_path="host"), "staging"),
        (
            pool_of(kv_path="host", staging=Region(address=0, rkey=0, length=1), staging_dtype="bfloat16"),
            "stages bfloat16, our KV is float32",
        ),
    ],
)
def test_case_27_what_does_not_fit_is_refused_with_both_values(pool: PoolDescription, words: str) -> None:
    with pytest.raises(GeometryMismatch, match=words):
        check_pool(pool, KV, "f")
    _, pools, reports = make()
    pools.add(pool)
    (refused,) = reports
    assert isinstance(refused, PoolRefused)
    assert refused.error.code == "geometry_mismatch"


def test_block_size_channels_and_dtype_are_the_decode_workers_choice() -> None:
    check_pool(pool_of(geometry=dataclasses.replace(GEOMETRY, dtype="bfp8_b")), KV, "f")


@pytest.mark.parametrize(
    ("error", "code"), [(AuthenticationFailed("wrong token"), "authentication_failed"), (OSError("x"), "push_failed")]
)
def test_a_failed_connection_is_a_refusal(error: Exception, code: str) -> None:
    plane, pools, reports = make()
    plane.error = error
    pools.add(pool_of())
    (refused,) = reports
    assert isinstance(refused, PoolRefused)
    assert refused.error.code == code
    with pytest.raises(UnknownPool):
        pools.open(lease_of())


def test_a_lost_connection_is_said_once_and_closed() -> None:
    plane, pools, reports = make()
    pools.add(pool_of())
    plane.lost[0]("it died")
    plane.lost[0]("again")
    opened, refused = reports
    assert isinstance(opened, PoolOpened)
    assert isinstance(refused, PoolRefused)
    assert "it died" in refused.error.message
    assert not plane.writers[0].alive
    with pytest.raises(UnknownPool):
        pools.open(lease_of())


def test_a_connection_lost_before_it_was_known_is_said_too() -> None:
    plane, pools, reports = make()
    connect = plane.connect

    def brief(pool: PoolDescription, on_lost: OnLost) -> PoolWriter:
        writer = connect(pool, on_lost)
        on_lost("gone already")
        writer.close()
        return writer

    pools._connect = brief
    pools.add(pool_of())
    assert [type(message) for message in reports] == [PoolOpened, PoolRefused]


def test_case_18_a_new_generation_replaces_the_old_one() -> None:
    plane, pools, _ = make()
    pools.add(pool_of(generation="g0"))
    pools.add(pool_of(generation="g1"))
    assert [writer.alive for writer in plane.writers] == [False, True]
    plane.lost[0]("late news of the old one")
    assert pools.open(lease_of(generation="g1"))[0].generation == "g1"
    with pytest.raises(StaleGeneration, match="g0"):
        pools.open(lease_of(generation="g0"))


def test_removing_is_by_generation() -> None:
    plane, pools, _ = make()
    pools.add(pool_of(generation="g1"))
    pools.remove("d0", "g0")
    pools.remove("nobody", "g0")
    assert plane.writers[0].alive
    pools.remove("d0", "g1")
    assert not plane.writers[0].alive


def test_close_disconnects_from_all() -> None:
    plane, pools, _ = make()
    pools.add(pool_of("d0"))
    pools.add(pool_of("d1"))
    pools.close()
    assert [writer.alive for writer in plane.writers] == [False, False]
