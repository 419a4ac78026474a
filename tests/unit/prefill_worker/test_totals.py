"""Totals of the data plane: over all connections, those that are over included, and each NIC once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from prefill_worker.push import totals
from prefill_worker.push.totals import Totals
from transport.backends.verbs import hw_counters


class Connection:
    def __init__(self, nics: list[tuple[str, int]] | None = None, **counters: int) -> None:
        self.counters: Counter[str] = Counter(counters)
        self.nics = nics or []
        self.alive = True


def test_connections_that_are_over_keep_counting() -> None:
    counted = Totals()
    first, second = Connection(bytes=10, writes=1), Connection(bytes=5)
    counted.add(first)
    counted.add(second)
    assert counted.counters() == {"bytes": 15, "writes": 1}
    first.alive = False
    assert counted.counters() == {"bytes": 15, "writes": 1}
    second.counters["bytes"] += 1
    assert counted.counters() == {"bytes": 16, "writes": 1}


def test_a_nic_that_two_connections_use_is_counted_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "class/infiniband/mlx5_0/ports/1/hw_counters"
    folder.mkdir(parents=True)
    (folder / "local_ack_timeout_err").write_text("7\n")
    events = hw_counters.events
    monkeypatch.setattr(totals.hw_counters, "events", lambda nics: events(nics, tmp_path))
    counted = Totals()
    for _ in range(2):
        counted.add(Connection([("mlx5_0", 1)], bytes=1))
    assert counted.counters() == {"bytes": 2, "nic_mlx5_0_retries": 7}
