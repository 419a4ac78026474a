"""Writes alone: what is pushed, what the rows say, and how perftest's report is read."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import pytest

from deploy.bench import perftest, transfer_writes
from deploy.bench.transfer_writes import Target, Turn
from transport.backends.base import Run

REPORT = """\
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      16               33.17              33.15              0.000530
---------------------------------------------------------------------------------------
"""


class Pool:
    """A pool writer and its only lease: stores at once, except for the runs in `lost`."""

    def __init__(self, memory: np.ndarray, lost: Sequence[int] = (), shift: int = 0) -> None:
        self.memory, self.runs, self._lost, self._shift = memory, [], lost, shift
        self.completed = 0

    def open(self, lease: object) -> Pool:
        return self

    def stage(self, num_bytes: int) -> np.ndarray:
        assert num_bytes <= transfer_writes.STAGE_BYTES
        return np.zeros(num_bytes, np.uint8)

    def write(self, staging: np.ndarray, runs: Sequence[Run]) -> None:
        for run in runs:
            if len(self.runs) not in self._lost:
                at = run.remote_offset + self._shift
                self.memory[at : at + run.length] = staging[run.local_offset : run.local_offset + run.length]
            self.runs.append(run)

    def complete(self, timeout_s: float) -> None:
        self.completed += 1


def target(pool: Pool) -> Target:
    return Target(pool, lambda: None, pool.memory)  # type: ignore[arg-type]


def test_writes_go_round_the_region_in_batches_of_the_staging() -> None:
    pool = Pool(np.zeros(5 << 20, np.uint8))
    turn = transfer_writes.push(target(pool), 1 << 20, 7)
    assert [run.remote_offset >> 20 for run in pool.runs] == [0, 1, 2, 3, 4, 0, 1]
    assert [run.local_offset >> 20 for run in pool.runs] == [0, 1, 2, 3, 0, 1, 2]
    assert (turn.count, pool.completed) == (7, 1)


@pytest.mark.parametrize(
    ("fault", "says"),
    [({}, None), ({"lost": [0]}, "did not land"), ({"shift": 1}, "did not land")],
    ids=["sound", "lost", "shifted"],
)
def test_a_write_that_does_not_land_as_made_is_found(fault: dict[str, object], says: str | None) -> None:
    pool = Pool(np.zeros(1 << 20, np.uint8), **fault)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=says) if says else contextlib.nullcontext():
        transfer_writes.check(target(pool), 4096)


def test_each_size_takes_turns_with_what_stands_beside_it() -> None:
    pool = Pool(np.zeros(1 << 20, np.uint8))
    asked: list[tuple[int, int]] = []

    def beside(size: int, count: int) -> float:
        asked.append((size, count))
        return 1e9

    rows = transfer_writes.measure(target(pool), [4096, 8192], 65536, 2, lambda line: None, beside)
    assert asked == [(4096, 16), (4096, 16), (8192, 8), (8192, 8)]
    assert [row["ib_write_bw_gb_per_s"] for row in rows] == [1.0, 1.0]


def test_a_row_has_medians_and_the_median_of_the_pairs_ratios() -> None:
    """Of pairs, not of sides: a machine that is slow for both does not change the ratio."""
    turns = [Turn(10, 1.0, 0.1), Turn(10, 2.0, 0.2), Turn(10, 4.0, 0.4)]  # 10000, 5000 and 2500 bytes per second
    row = transfer_writes.summary(1000, turns, [20000.0, 5000.0, 2000.0])
    assert row["gb_per_s"] == pytest.approx(5e-6)
    assert row["ib_write_bw_gb_per_s"] == pytest.approx(5e-6)
    assert row["cpu_us_per_write"] == pytest.approx(20000)
    assert row["speed_vs_ib_write_bw"] == pytest.approx(1.0)
    assert row["speed_vs_ib_write_bw_range"] == pytest.approx([0.5, 1.25])
    assert row["speed_vs_ib_write_bw_95"] is None


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, None), (5, None), (6, [0, 5]), (8, [0, 7]), (9, [1, 7]), (15, [3, 11]), (20, [5, 14])],
    ids=str,
)
def test_the_interval_of_a_median_is_that_of_the_sign_test(count: int, expected: list[int] | None) -> None:
    """Ranks out of the tables for 95%, counted from 0."""
    assert transfer_writes.median_interval(range(count)) == expected


def test_a_line_has_a_column_for_each_of_the_header(capsys: pytest.CaptureFixture[str]) -> None:
    pool = Pool(np.zeros(1 << 20, np.uint8))
    lines: list[str] = []
    transfer_writes.measure(target(pool), [4096], 65536, 6, lines.append, lambda size, count: 1e9)
    header, row = lines
    assert header.endswith("lowest, highest")
    assert len(row) == len(header)
    assert [word for word in row.split() if word.endswith("x")]
    assert " to " in row


@pytest.mark.parametrize("unit", ["MB", "MiB"])
def test_the_average_is_read_out_of_the_report(unit: str) -> None:
    """Both names mean 2**20: 16 writes at 0.00053 million a second are 34.7 million bytes a second."""
    assert perftest.average(REPORT.replace("MB", unit), 65536) == pytest.approx(33.15 * (1 << 20))


@pytest.mark.parametrize(
    "output", ["", REPORT.replace("65536", "131072"), REPORT.replace("33.15", "0.00"), REPORT.replace("MB", "Gb")]
)
def test_a_report_without_the_size_is_refused_with_what_it_says(output: str) -> None:
    with pytest.raises(RuntimeError, match="reports no bandwidth for 65536 bytes"):
        perftest.average(output, 65536)
