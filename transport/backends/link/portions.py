"""Runs in portions of a bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from transport.backends.base import Run


def portions(runs: Sequence[Run], most: int) -> Iterator[list[Run]]:
    """The runs in order, in portions of at most `most` bytes; longer runs are cut."""
    part: list[Run] = []
    left = most
    for run in runs:
        position = 0
        while position < run.length:
            length = min(left, run.length - position)
            part.append(Run(run.region, run.local_offset + position, run.remote_offset + position, length))
            position += length
            left -= length
            if not left:
                yield part
                part, left = [], most
    if part:
        yield part
