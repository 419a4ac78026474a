"""The files in inside/, each run by the pytest of .venv-ttnn in a process of its own: one device, one process."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from vm import junit  # tests/vm: what a pytest elsewhere reported, as results here

CHECKOUT = Path(__file__).parents[2]
FILES = {path.stem: path for path in sorted((Path(__file__).parent / "inside").glob("test_*.py"))}
LIMIT_S = 240

pytestmark = [pytest.mark.ttnn, pytest.mark.timeout(LIMIT_S + 60)]


@pytest.mark.parametrize("name", FILES)
def test_passes_in_venv_ttnn(name: str, ttnn_python: Path, tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    command = [ttnn_python, "-m", "pytest", "-v", f"--junitxml={report}", FILES[name].relative_to(CHECKOUT)]
    environment = {key: value for key, value in os.environ.items() if key != "HAWK_REQUIRE"}  # it is for this pytest
    done = subprocess.run(
        command, cwd=CHECKOUT, env=environment, timeout=LIMIT_S, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    print(done.stdout.decode(errors="replace"))
    results = junit.read(report).get(name) if report.exists() else None
    assert results is not None, f"no test of {name} ran to its end: pytest exited with {done.returncode}"
    assert not results.failures, "\n\n".join(results.failures)
    if results.skips:
        pytest.skip("; ".join(results.skips))
    assert results.passed
    assert done.returncode == 0, "all tests passed, but the process did not end well"
