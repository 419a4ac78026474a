"""The transfer benchmark moves what it says by every path, and its ratios are those of its rows."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from deploy.bench import transfer
from deploy.bench.transfer import MIB, Row
from deploy.bench.transfer_pools import PATHS
from prefill_worker.push.pieces import Piece, PieceWriter

WRITES = ("--write-sizes", "64", "--write-total", "0.5", "--write-turns", "2")


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, float]]:
    return outcome(capsys, *flags)["results"]


def outcome(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, list[dict[str, float]]]:
    assert transfer.main(["--json", "--layers", "2", "--rounds", "1", "--sizes", "0.5", "1", *WRITES, *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_names_every_path_and_size(capsys: pytest.CaptureFixture[str]) -> None:
    results = run(capsys)
    expected = {(path, int(size * MIB)) for size in (0.5, 1) for path in ("gg-direct", "gn-hawk", "gg-host", "gn-host")}
    assert {(row["path"], row["bytes"]) for row in results} == expected
    for row in results:
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
        assert row["landed_bytes"] == row["bytes"]  # bf16 stays bf16


@pytest.mark.parametrize("pages", ["nhd", "vec", "amx"])
def test_every_page_layout_lands_as_block_floats_in_seven_channels(
    capsys: pytest.CaptureFixture[str], pages: str
) -> None:
    """`main` itself compares what landed with the reference."""
    results = run(capsys, "--pages", pages, "--kv-dtype", "bfp8_b", "--channels", "7", "--block-size", "32")
    hawk = next(row for row in results if row["path"] == "gn-hawk")
    assert hawk["landed_bytes"] == hawk["bytes"] // 2048 * 1088


@pytest.mark.parametrize("slots", ["1", "2"])
def test_a_request_may_be_larger_than_its_staging_slots(capsys: pytest.CaptureFixture[str], slots: str) -> None:
    """1 MiB through slots of 128 KiB; `main` compares here too."""
    results = run(capsys, "--slots", slots, "--slot-bytes", str(MIB // 8))
    assert {row["landed_bytes"] for row in results if row["path"] == "gn-host"} == {MIB // 2, MIB}


@pytest.mark.parametrize("transport", ["shm", "nixl"])
def test_every_path_lands_by_either_transport_and_so_do_writes_alone(
    capsys: pytest.CaptureFixture[str], transport: str
) -> None:
    measured = outcome(capsys, "--transport", transport, "--write-sizes", "64", "1024", "--write-total", "2")
    assert {row["path"] for row in measured["results"]} == set(PATHS)
    assert [(row["write_bytes"], row["writes"]) for row in measured["writes"]] == [(65536, 32), (MIB, 2)]
    for row in measured["writes"]:
        assert "speed_vs_ib_write_bw" not in row  # there is nothing of its kind to compare with
        assert row["cpu_us_per_write"] > 0


def test_writes_alone_are_measured_where_no_size_of_kv_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    measured = outcome(capsys, "--sizes")
    assert measured["results"] == []
    assert [(row["write_bytes"], row["turns"]) for row in measured["writes"]] == [(65536, 2)]


def test_a_transport_that_cannot_be_had_here_is_said_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """The receiving process is where it fails first."""
    assert transfer.main(["--transport", "verbs", "--nic", "no-such-nic", "--layers", "2", "--sizes", "0.5"]) == 1
    assert capsys.readouterr().err.startswith("hawk bench transfer: ")


def test_a_path_that_lands_something_else_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PieceWriter.write

    def skips_pieces(pieces: PieceWriter, blocks: Sequence[int], piece: Piece) -> int:
        return 0 if piece.start else real(pieces, blocks, piece)

    monkeypatch.setattr(PieceWriter, "write", skips_pieces)
    monkeypatch.setattr(transfer, "CHUNK_BYTES", MIB // 8)
    with pytest.raises(RuntimeError, match="is not what was pushed"):
        transfer.main(["--json", "--layers", "2", "--rounds", "1", "--sizes", "1"])


def test_ratios_are_against_gg_host_gg_direct_and_memcpy() -> None:
    host, direct, hawk = Row("gg-host", 100, 4.0, 100), Row("gg-direct", 100, 1.0, 100), Row("gn-hawk", 100, 2.0, 50)
    row = hawk.json(host, direct, memcpy_s=0.5)
    assert row["latency_vs_gg_host"] == 0.5
    assert row["speed_vs_gg_direct"] == 0.5
    assert row["speed_vs_memcpy"] == 0.25


@pytest.mark.parametrize(
    "flags",
    [
        ["--sizes", "0"],
        ["--rounds", "0"],
        ["--channels", "-1"],
        ["--block-size", "48"],
        ["--slots", "0"],
        ["--write-turns", "0"],
        ["--write-sizes", "64", "-1"],
        ["--write-sizes", "1024", "--write-total", "0.5"],
        ["--transport", "carrier-pigeon"],
    ],
)
def test_senseless_flags_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        transfer.parse(flags)
