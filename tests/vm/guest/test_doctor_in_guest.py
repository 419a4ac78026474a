"""`hawk doctor rdma` where there is a device: Soft-RoCE's."""

from __future__ import annotations

import json

import pytest

from deploy import cli


def test_the_device_and_the_gid_that_is_used_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "rdma"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("rxe0: rdma_rxe") for line in lines)
    [used] = [line for line in lines if line.startswith("  → GID")]
    assert "(RoCE v2, 10.99.0.1, veth0)" in used


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "rdma", "--json"]) == 0
    survey = json.loads(capsys.readouterr().out)["survey"]
    [nic] = survey["chosen"]
    assert (nic["device"], nic["ip"], nic["mtu"]) == ("rxe0", "10.99.0.1", 4096)
    assert survey["devices"][0]["dmabuf"]["supported"] is False
    assert {"rdma_rxe", "ib_uverbs"} <= set(survey["modules"])


def test_a_port_that_does_not_exist_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "rdma", "rxe0:2"]) == 1
    assert "rxe0 has no port 2" in capsys.readouterr().out
