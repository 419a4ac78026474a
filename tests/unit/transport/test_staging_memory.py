"""Staging memory: what is taken never overlaps, all of it comes back, and waiting ends."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.backends.link.staging import StagingMemory
from transport.errors import LeaseRevoked, PushFailed
from transport.kernels.source import LINE, address

SIZE = 1 << 16


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, SIZE // 6), st.integers(0, 3)), max_size=40))
def test_pieces_never_overlap_and_all_come_back(steps: list[tuple[int, int]]) -> None:
    memory = StagingMemory(SIZE)
    held: list[tuple[np.ndarray, int]] = []
    for number, (length, drop) in enumerate(steps):
        while len(held) > 3 or (held and drop == 0):
            array, value = held.pop(drop % len(held))
            assert (array == value).all()
            memory.give(memory.locate(array))
            drop = 1
        try:
            array = memory.take(length, 0)
        except PushFailed:  # too scattered for it now
            continue
        assert address(array) % LINE == 0
        array[:] = number
        held.append((array, number % 256))
    for array, value in held:
        assert (array == value).all()
        memory.give(memory.locate(array))
    assert memory.free == SIZE
    assert len(memory.take(SIZE, 0)) == SIZE


def test_a_waiting_thread_gets_what_is_given_back() -> None:
    memory = StagingMemory(SIZE)
    first = memory.take(SIZE, 0)
    got: list[np.ndarray] = []
    waiting = threading.Event()
    thread = threading.Thread(target=lambda: got.append(memory.take(10, 10, waiting.set)))
    thread.start()
    assert waiting.wait(10)
    memory.give(memory.locate(first))
    thread.join()
    assert len(got[0]) == 10


def test_waiting_ends_when_the_lease_does() -> None:
    memory = StagingMemory(SIZE)
    memory.take(SIZE, 0)

    def check() -> None:
        raise LeaseRevoked("fenced")

    with pytest.raises(LeaseRevoked):
        memory.take(1, 10, check)


def test_what_can_never_fit_is_refused_with_advice() -> None:
    with pytest.raises(PushFailed, match="raise staging_bytes"):
        StagingMemory(SIZE).take(SIZE + 1, 10)


def test_other_memory_is_not_located() -> None:
    memory = StagingMemory(SIZE)
    taken = memory.take(128, 0)
    assert memory.locate(taken) == 0
    assert memory.locate(taken[64:]) is None
    assert memory.locate(np.zeros(128, np.uint8)) is None
    memory.give(0)
    assert memory.locate(taken) is None
    with pytest.raises(ValueError, match="nothing is staged at 0"):
        memory.give(0)
