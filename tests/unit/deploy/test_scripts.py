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


def test_the_lock_for_two_pythons_has_a_hash_or_two_for_every_pin() -> None:
    lines = (ROOT / "deploy/requirements/ttnn.in").read_text().splitlines()
    pins = {line for line in lines if "==" in line}
    locked = (ROOT / "deploy/requirements/ttnn.txt").read_text().replace(" \\\n", "").splitlines()[1:]
    assert {line.split("    --hash")[0] for line in locked} == pins
    counts = {line.split("==")[0]: line.count("--hash=sha256:") for line in locked}
    assert set(counts.values()) == {1, 2}
    assert counts["ttnn"] == counts["numpy"] == 2, "CPython 3.10's wheel and 3.12's"


def test_a_missing_python_for_ttnn_is_said_with_what_gives_one(checkout: Path) -> None:
    shutil.copytree(ROOT / "decode_worker/npu/tenstorrent", checkout / "decode_worker/npu/tenstorrent")
    script(checkout / "python", "exit 1")
    done = run("deploy/env.sh", "ttnn", cwd=checkout, PYTHON_TTNN=str(checkout / "python"))
    assert done.returncode == 1
    assert "needs CPython 3.12 or 3.10" in done.stderr
    assert str(checkout / "python") in done.stderr
    for way in ("PYTHON_TTNN=", "uv python install", "pyenv install", "apt install"):
        assert way in done.stderr
    assert not (checkout / ".venv-ttnn").exists()


def test_pyenvs_pythons_are_found_off_the_path(checkout: Path) -> None:
    shutil.copytree(ROOT / "decode_worker/npu/tenstorrent", checkout / "decode_worker/npu/tenstorrent")
    tools, version = checkout / "tools", checkout / "pyenv/versions/3.12.7/bin"
    version.mkdir(parents=True)
    tools.mkdir()
    for name in ("python3.12", "python3.10", "uv"):
        script(tools / name, "exit 127")
    script(tools / "pyenv", f"echo {checkout}/pyenv")
    script(
        version / "python3",
        f'case "$1" in -c) ;; --version) echo here ;; *) echo "$0" >{checkout}/used; exit 1 ;; esac',
    )
    done = run("deploy/env.sh", "ttnn", cwd=checkout, PATH=f"{tools}:{os.environ['PATH']}", PYTHON_TTNN="")
    assert done.returncode == 1
    assert (checkout / "used").read_text().strip() == str(version / "python3")


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
    assert {line.split()[0] for line in done.stdout.splitlines()} >= {
        "up",
        "test",
        "e2e",
        "ttnn",
        "lint",
        "bench",
        "clean",
    }
