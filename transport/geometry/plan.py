"""The transfer plan: which bytes of the staging buffer go where in the pool's channels, as few writes as possible."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from transport.backends.base import Run
from transport.geometry.kv import KVGeometry
from transport.geometry.units import Units, units_in_range

Ints = npt.NDArray[np.int64]


def plan(
    geometry: KVGeometry,
    bases: Sequence[int],
    dst_blocks: Sequence[int],
    start: int,
    stop: int,
    tensors: Sequence[int] | None = None,
) -> list[Run]:
    """The writes that put tokens [start, stop) of a request into blocks `dst_blocks`, for `tensors` (default: all).

    `bases[t]` is tensor t's byte offset in every channel. Local offsets follow the staging order of
    `transport.kernels`: [channel][tensor][slot ascending]. Blocks that lie next to each other share a run.
    `start` is a multiple of 32; the last tile is written whole. Raises ValueError on a range or block
    outside the table or pool.
    """
    chosen = all_tensors(geometry, tensors)
    if len(bases) != geometry.num_tensors:
        raise ValueError(f"{len(bases)} tensor bases, the pool has {geometry.num_tensors} tensors")
    units = units_in_range(geometry, dst_blocks, start, stop)
    base = np.asarray([bases[t] for t in chosen], np.int64)
    region, remote = [], []
    slots = units.slots.reshape(-1)[units.order] * units.unit_bytes
    ends = np.cumsum(units.counts)
    for channel, (end, count) in enumerate(zip(ends, units.counts, strict=True)):
        remote.append((base[:, None] + slots[end - count : end]).reshape(-1))
        region.append(np.full(len(base) * count, channel, np.int64))
    return merge(np.concatenate(region), np.concatenate(remote), units.unit_bytes)


def all_tensors(geometry: KVGeometry, tensors: Sequence[int] | None) -> Sequence[int]:
    """`tensors`, or every tensor of the pool. Raises ValueError where one does not exist."""
    if tensors is None:
        return range(geometry.num_tensors)
    if not tensors or min(tensors) < 0 or max(tensors) >= geometry.num_tensors:
        raise ValueError(f"tensors {list(tensors)} are not among the pool's {geometry.num_tensors}")
    return tensors


def merge(regions: Ints, remote: Ints, unit_bytes: int) -> list[Run]:
    """Units in staging order → runs: neighbours in the buffer that are neighbours in the region become one."""
    breaks = (np.diff(regions) != 0) | (np.diff(remote) != unit_bytes)
    first = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    lengths = np.diff(np.concatenate((first, [len(remote)]))) * unit_bytes
    local = first * unit_bytes
    rows = zip(regions[first].tolist(), local.tolist(), remote[first].tolist(), lengths.tolist(), strict=True)
    return [Run(*row) for row in rows]


def staging_size(units: Units, num_tensors: int) -> int:
    """Bytes of the staging buffer for `units` of that many tensors."""
    return units.size * units.unit_bytes * num_tensors
