"""The data plane alone: writes of a fixed size into one region, their speed, and the CPU time that each costs P."""

from __future__ import annotations

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


def push(target: Target, size: int, count: int, fill: int | None = None) -> Turn:
    """Write `count` times `size` bytes, one place after the other, over and over. `fill`: what the bytes are."""
    lease = target.lease()
    places = target.memory.size // size
    most = max(1, STAGE_BYTES // size)
    start, cpu = time.perf_counter(), time.process_time()
    writer = target.writer.open(lease)
    for first in range(0, count, most):
        batch = range(first, min(first + most, count))
        staging = writer.stage(len(batch) * size)
        if fill is not None:
            staging[:] = fill
        writer.write(staging, [Run(0, (i - first) * size, i % places * size, size) for i in batch])
    writer.complete(TIMEOUT_S)
    return Turn(count, time.perf_counter() - start, time.process_time() - cpu)


def check(target: Target, size: int) -> None:
    """Raises RuntimeError where a write does not put its bytes, and only them, in place."""
    target.memory[: 2 * size] = 0x33
    push(target, size, 1, fill=0x5A)
    if not ((target.memory[:size] == 0x5A).all() and (target.memory[size : 2 * size] == 0x33).all()):
        raise RuntimeError(f"a write of {size} bytes did not land as it was made")


def measure(
    target: Target, sizes: Sequence[int], total: int, rounds: int, say: Callable[[str], None], beside: Beside | None
) -> list[dict[str, Any]]:
    """Medians over `rounds` turns, each of about `total` bytes. → one JSON object per size.

    `beside`, where there is one, takes turns with the writes; raises as `beside`.
    """
    if sizes:
        say(f"{'KiB':>6} {'writes':>7}{'GB/s':>9}{'CPU µs per write':>18}" + (f"{'ib_write_bw':>13}" if beside else ""))
    results = []
    for size in sizes:
        check(target, size)
        count = max(1, total // size)
        turns, others = [], []
        for _ in range(rounds):
            turns.append(push(target, size, count))
            if beside is not None:
                others.append(beside(size, count))
        row = summary(size, turns, others)
        results.append(row)
        say(_line(row))
    return results


def summary(size: int, turns: Sequence[Turn], others: Sequence[float]) -> dict[str, Any]:
    """Medians as a JSON object; with `others`, bytes per second of something else, the ratio to their median."""
    speed = statistics.median(size * turn.count / turn.seconds for turn in turns)
    row = {
        "write_bytes": size,
        "writes": turns[0].count,
        "gb_per_s": speed / 1e9,
        "cpu_us_per_write": statistics.median(turn.cpu_s / turn.count * 1e6 for turn in turns),
    }
    if others:
        other = statistics.median(others)
        row |= {"ib_write_bw_gb_per_s": other / 1e9, "speed_vs_ib_write_bw": speed / other}
    return row


def _line(row: dict[str, Any]) -> str:
    line = f"{row['write_bytes'] / 1024:6.0f} {row['writes']:7d}{row['gb_per_s']:9.3f}{row['cpu_us_per_write']:18.1f}"
    if "ib_write_bw_gb_per_s" not in row:
        return line
    return f"{line}{row['ib_write_bw_gb_per_s']:13.3f}, {row['speed_vs_ib_write_bw']:.2f}x of it"
