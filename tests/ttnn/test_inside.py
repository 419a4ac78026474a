"""Tests that run in .venv-ttnn, by its own pytest: the files in inside/, and unit tests of what a decode node runs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from vm import junit  # tests/vm: what a pytest elsewhere reported, as results here

CHECKOUT = Path(__file__).parents[2]
TESTS = CHECKOUT / "tests"
FILES = {path.stem: path for path in sorted((TESTS / "ttnn" / "inside").glob("test_*.py"))}
LIMIT_S = 240

#: enough of the two packages to notice what another Python or numpy breaks; the rest takes minutes
UNIT_TESTS = [
    *(TESTS / "unit" / "transport" / f"test_{name}.py" for name in ("tiles", "geometry_kv", "settings", "checksum")),
    *(TESTS / "unit" / "decode_worker" / f"test_{name}.py" for name in ("leases", "scheduler", "worker", "cpu_linear")),
    *(TESTS / "unit" / "decode_worker" / f"test_{name}.py" for name in ("pool", "decode_app")),
]

pytestmark = [pytest.mark.ttnn, pytest.mark.timeout(LIMIT_S + 60)]


def run(python: Path, files: Sequence[Path], report: Path) -> dict[str, junit.FileReport]:
    """What the pytest of `python` says about `files`. Fails if that process dies, or fails and no test of its."""
    command = [python, "-m", "pytest", "-v", f"--junitxml={report}", *files]
    environment = {key: value for key, value in os.environ.items() if key != "HAWK_REQUIRE"}  # it is for this pytest
    done = subprocess.run(
        command, cwd=CHECKOUT, env=environment, timeout=LIMIT_S, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    print(done.stdout.decode(errors="replace"))
    results = junit.read(report) if report.exists() else {}
    failures = [text for result in results.values() for text in result.failures]
    assert not failures, "\n\n".join(failures)
    assert done.returncode == 0, f"that pytest exited with {done.returncode}"
    return results


@pytest.mark.parametrize("name", FILES)
def test_passes_in_venv_ttnn(name: str, ttnn_python: Path, tmp_path: Path) -> None:
    """One device, one process: each file has its own."""
    result = run(ttnn_python, [FILES[name]], tmp_path / "junit.xml")[name]
    if result.skips:
        pytest.skip("; ".join(result.skips))
    assert result.passed


def test_what_a_decode_node_runs_passes_there(ttnn_python: Path, tmp_path: Path) -> None:
    results = run(ttnn_python, UNIT_TESTS, tmp_path / "junit.xml")
    assert sorted(results) == sorted(path.stem for path in UNIT_TESTS)
    assert all(result.passed for result in results.values())
