"""Runs in portions: every byte once, in order, never more at a time than said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transport.backends.base import Run
from transport.backends.link.portions import portions

runs = st.builds(Run, st.integers(0, 3), st.integers(0, 100), st.integers(0, 100), st.integers(1, 50))


def bytes_of(some: list[Run]) -> list[tuple[int, int, int]]:
    """(region, byte here, byte there) of every byte."""
    return [(run.region, run.local_offset + i, run.remote_offset + i) for run in some for i in range(run.length)]


@given(st.lists(runs, max_size=10), st.integers(1, 120))
def test_portions_are_the_runs(some: list[Run], most: int) -> None:
    parts = list(portions(some, most))
    assert bytes_of([run for part in parts for run in part]) == bytes_of(some)
    sizes = [sum(run.length for run in part) for part in parts]
    assert all(size == most for size in sizes[:-1])
    assert all(0 < size <= most for size in sizes[-1:])
