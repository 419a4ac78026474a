"""Free runs: contiguous first, nothing lost, nothing given twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.runs import FreeRuns


def free_only(total: int, ids: set[int]) -> FreeRuns:
    runs = FreeRuns(total)
    runs.take(total)
    for block in ids:
        runs.give(block)
    return runs


def test_takes_the_smallest_run_that_holds_all() -> None:
    runs = free_only(20, {0, 1, 2, 3, 4, 10, 11, 12, 15, 16})
    assert runs.take(3) == [10, 11, 12]


def test_takes_the_largest_runs_where_no_run_holds_all() -> None:
    runs = free_only(20, {0, 1, 5, 6, 7, 8, 12, 13, 14})
    assert runs.take(8) == [5, 6, 7, 8, 12, 13, 14, 0]


def test_neighbours_merge_again() -> None:
    assert free_only(9, {0, 2, 4, 1, 3, 8}).runs() == [(0, 5), (8, 1)]


def test_giving_twice_or_taking_too_much_is_refused() -> None:
    runs = free_only(5, {1, 2})
    with pytest.raises(ValueError, match="free already"):
        runs.give(1)
    with pytest.raises(ValueError, match="free already"):
        runs.give(2)
    with pytest.raises(ValueError, match="3 blocks asked for, 2 are free"):
        runs.take(3)
    assert len(runs) == 2


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60))
def test_agrees_with_a_set(steps: list[tuple[bool, int]]) -> None:
    runs, free = FreeRuns(24), set(range(24))
    for take, number in steps:
        if take:
            if number <= len(free):
                got = runs.take(number)
                assert len(set(got)) == number
                assert set(got) <= free
                free -= set(got)
        elif number < 24 and number not in free:
            runs.give(number)
            free.add(number)
        assert {b for start, length in runs.runs() for b in range(start, start + length)} == free
        assert len(runs) == len(free)
