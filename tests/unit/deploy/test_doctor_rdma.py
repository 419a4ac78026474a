"""`hawk doctor rdma`: what it makes of a survey, on machines with RDMA and without."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from deploy import cli, doctor, doctor_rdma
from deploy.finding import Finding
from transport.backends.verbs.devices import Nic
from transport.backends.verbs.memlock import Memlock
from transport.backends.verbs.survey import DeviceSurvey, DmaBuf, GidSurvey, PortSurvey, Survey

UNLIMITED = Memlock(None, None, exempt=False)
GIDS = (
    GidSurvey(0, "fe80::1", "RoCE v2", None, "eth0"),
    GidSurvey(3, "::ffff:10.0.0.7", "RoCE v2", "10.0.0.7", "eth0"),
)
PORT = PortSurvey(1, "ethernet", "active", "LinkUp", "200 Gb/sec", 0, 4096, 4096, GIDS)
DEVICE = DeviceSurvey(
    "mlx5_0", "mlx5_core", "CA", "aa:bb", "/dev/infiniband/uverbs0", None, DmaBuf(True, "tried"), (PORT,)
)
NIC = Nic("mlx5_0", 1, "ethernet", 3, "::ffff:10.0.0.7", "RoCE v2", "10.0.0.7", 0, 4096, "eth0", "aa:bb")
USABLE = Survey(
    kernel="6.1",
    library="44.0 (/usr)",
    library_problem=None,
    devices=(DEVICE,),
    memlock=UNLIMITED,
    peer_memory=("nvidia_peermem",),
    modules=("ib_core", "mlx5_ib"),
    chosen=(NIC,),
    why=("the first active port",),
    problem=None,
)
WITHOUT = replace(USABLE, devices=(), peer_memory=(), modules=(), chosen=(), why=(), problem="no RDMA: load a driver")

Look = Callable[[Survey], None]


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Look:
    """`look(survey)`: what the doctor finds here is this."""

    def set_survey(seen: Survey) -> None:
        monkeypatch.setattr(doctor_rdma, "survey", lambda names=(): seen)

    return set_survey


def finding(seen: Survey, check: str) -> Finding:
    return next(finding for finding in doctor_rdma.judge(seen) if finding.check == check)


def test_a_usable_machine_names_what_is_used_and_why(look: Look, capsys: pytest.CaptureFixture[str]) -> None:
    look(USABLE)
    assert cli.main(["doctor", "rdma"]) == 0
    text = capsys.readouterr().out
    assert "mlx5_0 port 1, GID 3 ::ffff:10.0.0.7 (RoCE v2, 10.0.0.7), MTU 4096 bytes, eth0" in text
    assert "the first active port" in text
    assert "nvidia_peermem" in text


def test_the_chosen_gid_is_marked_in_its_table(look: Look, capsys: pytest.CaptureFixture[str]) -> None:
    look(USABLE)
    doctor_rdma.main([])
    table = [line for line in capsys.readouterr().out.splitlines() if ": fe80" in line or ": ::ffff" in line]
    assert ["→" in line for line in table] == [False, True]


def test_infiniband_is_named_by_its_lid(look: Look, capsys: pytest.CaptureFixture[str]) -> None:
    port = replace(PORT, link_layer="infiniband", lid=17)
    nic = replace(NIC, link_layer="infiniband", gid_index=None, lid=17, netdev=None)
    look(replace(USABLE, devices=(replace(DEVICE, ports=(port,)),), chosen=(nic,)))
    assert doctor_rdma.main([]) == 0
    text = capsys.readouterr().out
    assert "mlx5_0 port 1, LID 17, MTU 4096 bytes" in text
    assert [line for line in text.splitlines() if line.startswith("→ port 1")]


def test_json_holds_findings_and_the_whole_survey(look: Look, capsys: pytest.CaptureFixture[str]) -> None:
    look(USABLE)
    assert doctor_rdma.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["survey"]["chosen"][0]["gid_index"] == 3
    assert report["survey"]["devices"][0]["ports"][0]["gids"][0]["gid"] == "fe80::1"
    assert {found["check"] for found in report["findings"]} >= {"pyverbs", "use", "memlock", "dma-buf", "peer memory"}


@pytest.mark.parametrize("flag", [[], ["--json"]])
def test_a_machine_without_rdma_is_status_1(flag: list[str], look: Look, capsys: pytest.CaptureFixture[str]) -> None:
    look(WITHOUT)
    assert doctor_rdma.main(flag) == 1
    assert "no RDMA: load a driver" in capsys.readouterr().out


def test_a_machine_without_rdma_is_told_what_needs_none(look: Look, capsys: pytest.CaptureFixture[str]) -> None:
    look(WITHOUT)
    doctor_rdma.main([])
    assert "shm (one host) and nixl (any network) work without" in capsys.readouterr().out


def test_named_nics_reach_the_survey(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(doctor_rdma, "survey", lambda names=(): asked.append(tuple(names)) or USABLE)
    doctor_rdma.main(["mlx5_0:1", "mlx5_1:1:3"])
    assert asked == [("mlx5_0:1", "mlx5_1:1:3")]


def test_pyverbs_that_cannot_be_used_is_a_failure_with_advice() -> None:
    seen = replace(USABLE, library=None, library_problem="apt install python3-pyverbs", chosen=())
    assert finding(seen, "pyverbs") == Finding("pyverbs", "fail", "cannot be used", "apt install python3-pyverbs")


@pytest.mark.parametrize(
    ("memlock", "level"),
    [
        (UNLIMITED, "ok"),
        (Memlock(64 << 10, 64 << 10, exempt=True), "ok"),
        (Memlock(8 << 20, 8 << 20, exempt=False), "fail"),
        (Memlock(1 << 30, 1 << 30, exempt=False), "warn"),
    ],
)
def test_a_memlock_limit_counts_where_it_binds(memlock: Memlock, level: str) -> None:
    found = finding(replace(USABLE, memlock=memlock), "memlock")
    assert found.level == level
    assert ("LimitMEMLOCK=infinity" in found.advice) == (level != "ok")


@pytest.mark.parametrize(("supported", "level"), [(True, "ok"), (False, "warn"), (None, "warn")])
def test_dmabuf_is_no_condition(supported: bool | None, level: str) -> None:
    device = replace(DEVICE, dmabuf=DmaBuf(supported, "tried"))
    assert finding(replace(USABLE, devices=(device,)), "dma-buf").level == level


def test_a_device_that_cannot_be_opened_says_why(look: Look, capsys: pytest.CaptureFixture[str]) -> None:
    device = replace(DEVICE, problem="permission denied: join the group rdma")
    look(replace(USABLE, devices=(device,), chosen=(), problem="mlx5_0 cannot be opened"))
    assert doctor_rdma.main([]) == 1
    assert "cannot be opened: permission denied: join the group rdma" in capsys.readouterr().out


def test_the_general_doctor_has_a_line_for_rdma(look: Look) -> None:
    look(USABLE)
    assert doctor.check_rdma().level == "ok"
    assert "mlx5_0 port 1" in doctor.check_rdma().found


def test_the_general_doctor_does_not_fail_for_want_of_rdma(look: Look) -> None:
    look(WITHOUT)
    assert doctor.check_rdma() == Finding("rdma", "ok", "no RDMA devices; shm and nixl need none")
    look(replace(USABLE, chosen=(), problem="no active port"))
    assert doctor.check_rdma().level == "warn"
