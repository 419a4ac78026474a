"""The shell scripts: what they say and exit with when something is missing."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run(*command: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=60)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """As much of a fresh clone as the environment needs."""
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def test_a_python_that_does_not_fit_is_said(checkout: Path) -> None:
    tools = checkout / "tools"
    tools.mkdir()
    for name in ("python3", "python3.11"):
        script(tools / name, 'if [ "$1" = --version ]; then echo "Python 3.9.1"; else exit 1; fi')
    done = run("deploy/env.sh", cwd=checkout, PATH=f"{tools}:{os.environ['PATH']}", PYTHON="")
    assert done.returncode == 1
    assert "needs CPython 3.11" in done.stderr
    assert "Python 3.9.1" in done.stderr


def test_a_venv_module_without_pip_is_said(checkout: Path) -> None:
    script(
        checkout / "python", 'if [ "$1" = -m ]; then exit 1; elif [ "$1" = --version ]; then echo "Python 3.11.2"; fi'
    )
    done = run("deploy/env.sh", cwd=checkout, PYTHON=str(checkout / "python"))
    assert done.returncode == 1
    assert "python3.11-venv" in done.stderr
    assert not (checkout / ".venv").exists()


def test_every_pin_of_the_lock_has_a_hash() -> None:
    for name in ("pip", "engine", "runtime", "dev"):
        pins = [line for line in (ROOT / f"deploy/requirements/{name}.in").read_text().splitlines() if "==" in line]
        locked = (ROOT / f"deploy/requirements/{name}.txt").read_text()
        assert locked.count("--hash=sha256:") == locked.count("==") == len(pins), name
        for pin in pins:
            assert pin.lower().replace("-", "_") in locked.lower().replace("-", "_")


def test_smoke_fails_where_nobody_answers() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = run("deploy/smoke.sh", f"http://127.0.0.1:{port}")
    assert done.returncode == 1
    assert f"no router answers at http://127.0.0.1:{port}" in done.stderr
    assert "FAIL" not in done.stdout, "one reason is enough"


def test_smoke_wants_a_url() -> None:
    assert run("deploy/smoke.sh", "localhost").returncode == 2


def test_make_help_lists_the_targets() -> None:
    done = run("make", "help")
    assert done.returncode == 0
    assert {line.split()[0] for line in done.stdout.splitlines()} >= {"up", "test", "e2e", "lint", "bench", "clean"}
