"""HAWK_REQUIRE turns what a machine must not skip into a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
SKIPPED = """
import pytest

@pytest.mark.e2e
def test_needs_a_model():
    pytest.skip("no model here")

def test_other():
    pytest.skip("of no importance")
"""


def run(directory: Path, require: str, *args: str) -> subprocess.CompletedProcess[str]:
    (directory / "pytest.ini").write_text("[pytest]\nmarkers =\n    e2e: real roles\n    vm: a virtual machine\n")
    (directory / "conftest.py").write_text(CONFTEST.read_text())
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *args],
        cwd=directory,
        env=os.environ | {"HAWK_REQUIRE": require},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "test_it.py").write_text(SKIPPED)
    return tmp_path


def test_without_it_a_skip_is_a_skip(directory: Path) -> None:
    done = run(directory, "")
    assert done.returncode == 0
    assert "2 skipped" in done.stdout


def test_a_required_test_must_not_skip(directory: Path) -> None:
    done = run(directory, "e2e")
    assert done.returncode == 1
    assert "1 failed, 1 skipped" in done.stdout
    assert "no model here" in done.stdout


def test_a_required_group_must_not_be_empty(directory: Path) -> None:
    done = run(directory, "vm")
    assert done.returncode != 0
    assert "no test marked 'vm'" in done.stdout + done.stderr


def test_a_module_that_skips_itself_is_known_by_its_folder(directory: Path) -> None:
    (directory / "e2e").mkdir()
    (directory / "e2e" / "test_module.py").write_text("import pytest\npytest.skip('x', allow_module_level=True)\n")
    done = run(directory, "e2e", "--continue-on-collection-errors")
    assert done.returncode == 1
    assert "the module was skipped" in done.stdout


def test_an_unknown_name_is_refused(directory: Path) -> None:
    done = run(directory, "e3e")
    assert done.returncode != 0
    assert "e3e" in done.stdout + done.stderr
