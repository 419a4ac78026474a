"""`hawk bench transfer --transport verbs` on Soft-RoCE: that it runs and compares, not how fast."""

from __future__ import annotations

import dataclasses
import json

import pytest

from deploy.bench import perftest, transfer
from transport.backends.verbs.devices import choose

MIB = 1 << 20


def test_kv_lands_by_every_path_and_writes_are_set_beside_ib_write_bw(capsys: pytest.CaptureFixture[str]) -> None:
    """`main` itself compares what landed with the reference."""
    tiny = ("--layers", "2", "--sizes", "0.25", "--rounds", "1", "--slots", "2", "--slot-bytes", str(MIB // 8))
    writes = ("--write-sizes", "64", "--write-total", "1", "--write-turns", "1")
    assert transfer.main(["--transport", "verbs", *tiny, *writes, "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert {row["path"]: row["landed_bytes"] for row in outcome["results"]} == dict.fromkeys(
        ("gg-host", "gn-host", "gg-direct", "gn-hawk"), MIB // 4
    )
    [row] = outcome["writes"]
    assert (row["write_bytes"], row["writes"], row["turns"]) == (65536, 16, 1)
    low, high = row["speed_vs_ib_write_bw_range"]
    assert 0 < low <= row["speed_vs_ib_write_bw"] <= high
    assert row["speed_vs_ib_write_bw_95"] is None  # one pair says nothing of the kind
    assert min(row["gb_per_s"], row["ib_write_bw_gb_per_s"], row["cpu_us_per_write"]) > 0


def test_what_ib_write_bw_says_when_it_fails_is_told() -> None:
    [nic] = choose()
    gone = dataclasses.replace(nic, device="rxe7")
    with pytest.raises(RuntimeError, match=r"(?s)ib_write_bw failed:.*rxe7"):
        perftest.ib_write_bw(gone, 65536, 5, perftest.Posting())
