"""The harness on the host: what it says where no guest can be had, and what it makes of a guest's report."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from . import host, junit, machine

REPORT = """<testsuites><testsuite>
<testcase classname="tests.vm.guest.test_good" name="test_a"/>
<testcase classname="tests.vm.guest.test_bad" name="test_b"><failure message="m">assert 1 == 2</failure></testcase>
<testcase classname="tests.vm.guest.test_bad" name="test_c"/>
<testcase classname="tests.vm.guest.test_left" name="test_d"><skipped message="no dma-buf here"/></testcase>
<testcase classname="tests.vm.guest.test_mute" name="test_e"><skipped message="unconditional skip"/></testcase>
<testcase classname="tests.vm.guest.test_grouped.TestGroup" name="test_f"/>
<testcase classname="" name="tests.vm.guest.test_broken"><error message="collection">ImportError</error></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def reports(tmp_path: Path) -> dict[str, junit.FileReport]:
    path = tmp_path / "junit.xml"
    path.write_text(REPORT)
    return junit.read(path)


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "missing_packages", lambda: ["qemu-system-x86", "perftest"])
    monkeypatch.setattr(host.shutil, "which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(host.Unavailable, match=r"apt-get install --no-install-recommends qemu-system-x86 perftest$"):
        host.check()


def test_another_distribution_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.shutil, "which", lambda name: None)
    with pytest.raises(host.Unavailable, match="Debian and Ubuntu only"):
        host.check()


def test_a_package_that_is_not_installed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = subprocess.CompletedProcess([], 1, stdout="installed cpio\nconfig-files kmod\n", stderr="")
    monkeypatch.setattr(host, "packages", lambda: ["cpio", "kmod", "perftest"])
    monkeypatch.setattr(host.subprocess, "run", lambda *args, **kwargs: answer)
    assert host.missing_packages() == ["kmod", "perftest"]


def test_a_mistyped_accelerator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAWK_VM_ACCEL", "kvn")
    machine.accelerator.cache_clear()
    with pytest.raises(host.Unavailable, match="HAWK_VM_ACCEL=kvn: expected kvm or tcg"):
        machine.accelerator()


@pytest.mark.parametrize("steady", [False, True])
def test_only_a_steady_guest_counts_instructions_and_that_emulated(
    steady: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "accelerator", lambda: "kvm")
    booted = machine.Kernel(tmp_path)
    line = machine._qemu(machine.Spec("true", tmp_path, steady=steady), booted)
    assert ("-icount" in line, "tcg,thread=single" in line, "kvm" in line) == (steady, steady, not steady)


def test_tests_are_counted_by_file(reports: dict[str, junit.FileReport]) -> None:
    assert reports["test_good"] == junit.FileReport(passed=1)
    assert reports["test_grouped"] == junit.FileReport(passed=1)


def test_a_failure_keeps_its_words(reports: dict[str, junit.FileReport]) -> None:
    assert reports["test_bad"] == junit.FileReport(passed=1, failures=["test_b: assert 1 == 2"])


def test_a_skip_keeps_its_reason(reports: dict[str, junit.FileReport]) -> None:
    assert reports["test_left"] == junit.FileReport(skips=["test_d: no dma-buf here"])


def test_a_skip_without_a_reason_is_a_failure(reports: dict[str, junit.FileReport]) -> None:
    assert reports["test_mute"].failures == ["test_e: skipped without a reason"]


def test_a_file_that_cannot_be_imported_is_a_failure_of_that_file(reports: dict[str, junit.FileReport]) -> None:
    assert "ImportError" in reports["test_broken"].failures[0]
