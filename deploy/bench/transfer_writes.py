"""The data plane alone: writes of a fixed size into one region, their speed, and the CPU time that each costs P.

Where something else does the same (perftest's `ib_write_bw`, on verbs), the two take turns: a turn of each makes a
pair, and pairs are compared, so that what a shared machine does over time falls on both sides.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transport.backends.base import PoolWriter, Run
from transport.messages import Lease

STAGE_BYTES = 4 * 1024 * 1024
"""Staged and posted at a time, as a piece of a push is."""
TIMEOUT_S = 120.0
CONFIDENCE = 0.95
#: (bytes of a write, how many) → bytes per second of something else that does the same
Beside = Callable[[int, int], float]


@dataclass(frozen=True)
class Target:
    """A pool with one region: its writer, new leases on it, and its memory as this process sees it."""

    writer: PoolWriter
    lease: Callable[[], Lease]
    memory: np.ndarray


@dataclass(frozen=True)
class Turn:
    """`count` writes, from the opening of their lease until the receiver has acknowledged them.

    `cpu_s`: of all threads of this process, the kernel's work for them included.
    """

    count: int
    seconds: float
    cpu_s: float


def batch(size: int) -> int:
    """Writes of `size` bytes that are staged at a time."""
    return max(1, STAGE_BYTES // size)


def push(target: Target, size: int, count: int, fill: int | None = None) -> Turn:
    """Write `count` times `size` bytes, one place after the other, over and over. `fill`: what the bytes are."""
    lease = target.lease()
    places = target.memory.size // size
    most = batch(size)
    start, cpu = time.perf_counter(), time.process_time()
    writer = target.writer.open(lease)
    for first in range(0, count, most):
        part = range(first, min(first + most, count))
        staging = writer.stage(len(part) * size)
        if fill is not None:
            staging[:] = fill
        writer.write(staging, [Run(0, (i - first) * size, i % places * size, size) for i in part])
    writer.complete(TIMEOUT_S)
    return Turn(count, time.perf_counter() - start, time.process_time() - cpu)


def check(target: Target, size: int) -> None:
    """Raises RuntimeError where a write does not put its bytes, and only them, in place."""
    target.memory[: 2 * size] = 0x33
    push(target, size, 1, fill=0x5A)
    if not ((target.memory[:size] == 0x5A).all() and (target.memory[size : 2 * size] == 0x33).all()):
        raise RuntimeError(f"a write of {size} bytes did not land as it was made")


def measure(
    target: Target, sizes: Sequence[int], total: int, turns: int, say: Callable[[str], None], beside: Beside | None
) -> list[dict[str, Any]]:
    """Medians over `turns`, each of about `total` bytes. → one JSON object per size.

    `beside`, where there is one, has a turn after each; raises as `beside`.
    """
    if sizes:
        say(_header(beside is not None))
    results = []
    for size in sizes:
        check(target, size)
        count = max(1, total // size)
        own, others = [], []
        for _ in range(turns):
            own.append(push(target, size, count))
            if beside is not None:
                others.append(beside(size, count))
        row = summary(size, own, others)
        results.append(row)
        say(_line(row))
    return results


def summary(size: int, turns: Sequence[Turn], others: Sequence[float]) -> dict[str, Any]:
    """Medians as a JSON object; with `others`, bytes per second of something else, the ratios of the pairs, too."""
    speeds = [size * turn.count / turn.seconds for turn in turns]
    row: dict[str, Any] = {
        "write_bytes": size,
        "writes": turns[0].count,
        "turns": len(turns),
        "gb_per_s": statistics.median(speeds) / 1e9,
        "cpu_us_per_write": statistics.median(turn.cpu_s / turn.count * 1e6 for turn in turns),
    }
    if others:
        ratios = sorted(speed / other for speed, other in zip(speeds, others, strict=True))
        row |= {
            "ib_write_bw_gb_per_s": statistics.median(others) / 1e9,
            "speed_vs_ib_write_bw": statistics.median(ratios),
            "speed_vs_ib_write_bw_95": median_interval(ratios),
            "speed_vs_ib_write_bw_range": [ratios[0], ratios[-1]],
        }
    return row


def median_interval(ordered: Sequence[float]) -> list[float] | None:
    """Two of the values, between which the median of all possible ones lies with CONFIDENCE, whatever their law.

    The median is below the k-th of n values if fewer than k of them are below it: as k heads or fewer in n tosses.
    None for fewer than six values: even the lowest and the highest do not say that much.
    """
    count, tail, rank = len(ordered), 0.0, 0
    while rank < count // 2:
        tail += math.comb(count, rank) / 2**count
        if 2 * tail > 1 - CONFIDENCE:
            break
        rank += 1
    return [ordered[rank - 1], ordered[count - rank]] if rank else None


def _header(beside: bool) -> str:
    line = f"{'KiB':>6} {'writes':>7} {'turns':>6}{'GB/s':>9}{'CPU µs per write':>18}"
    if not beside:
        return line
    return f"{line}{'ib_write_bw':>13}{'ratio':>8}{'95% of it':>13}{'lowest, highest':>17}"


def _line(row: dict[str, Any]) -> str:
    line = f"{row['write_bytes'] / 1024:6.0f} {row['writes']:7d} {row['turns']:6d}"
    line += f"{row['gb_per_s']:9.4f}{row['cpu_us_per_write']:18.1f}"
    if "ib_write_bw_gb_per_s" not in row:
        return line
    within, (low, high) = row["speed_vs_ib_write_bw_95"], row["speed_vs_ib_write_bw_range"]
    interval = f"{within[0]:.2f} to {within[1]:.2f}" if within else "too few"
    return (
        f"{line}{row['ib_write_bw_gb_per_s']:13.4f}{row['speed_vs_ib_write_bw']:7.2f}x"
        f"{interval:>13}{f'{low:.2f}, {high:.2f}':>17}"
    )
