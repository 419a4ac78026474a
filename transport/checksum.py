"""The end-to-end checksum: xxh3_64 of what a piece puts into each region, computed where it is sent and where it lies.

Both ends make the same runs of a piece, so the bytes are hashed in the same order: as they lie in the sender's buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from transport.backends.base import Run

Bytes = npt.NDArray[np.uint8]
Read = Callable[[int, int, int], Bytes]
"""(region, offset, length) → the bytes that lie there."""


def sent(staging: Bytes, runs: Sequence[Run], num_regions: int) -> tuple[int, ...]:
    """Digests of what `runs` take out of `staging` (uint8 [n]), by region; 0 where a region gets nothing."""
    memory = staging.data
    digests: dict[int, xxhash.xxh3_64] = {}
    index = 0
    while index < len(runs):  # neighbours in the buffer are hashed in one go
        first = runs[index]
        end = first.local_offset + first.length
        index += 1
        while index < len(runs) and (runs[index].region, runs[index].local_offset) == (first.region, end):
            end += runs[index].length
            index += 1
        digest = digests.get(first.region)
        if digest is None:
            digest = digests[first.region] = xxhash.xxh3_64()
        digest.update(memory[first.local_offset : end])
    return _by_region(digests, num_regions)


def landed(read: Read, runs: Sequence[Run], num_regions: int) -> tuple[int, ...]:
    """The same of what lies where `runs` have put it."""
    digests: dict[int, xxhash.xxh3_64] = {}
    for run in runs:
        digest = digests.get(run.region)
        if digest is None:
            digest = digests[run.region] = xxhash.xxh3_64()
        digest.update(read(run.region, run.remote_offset, run.length).data)
    return _by_region(digests, num_regions)


def _by_region(digests: dict[int, xxhash.xxh3_64], num_regions: int) -> tuple[int, ...]:
    return tuple(digests[region].intdigest() if region in digests else 0 for region in range(num_regions))
