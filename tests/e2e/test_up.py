"""`hawk up` as a user runs it: ready, its curl line works, the smoke test passes, and it leaves no process."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.machine import port_is_free
from deploy.model import ensure
from e2e.cluster import ROOT, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

SMALL = {"HAWK_PREFILL_MAX_MODEL_LEN": "512", "HAWK_DECODE_MAX_MODEL_LEN": "512", "HAWK_DECODE_NUM_BLOCKS": "64"}


class Up:
    """One `hawk up` process and what it has printed."""

    def __init__(self, port: int, home: Path, *flags: str) -> None:
        model = os.environ.get("HAWK_TEST_MODEL") or str(ensure())
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("HAWK_")}
        self.port = port
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", "up", "--port", str(port), "--model", model, *flags],
            cwd=home,
            env=inherited | SMALL | {"HAWK_HOME": str(home), "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as out:
            self.said.extend(iter(out.readline, ""))

    @property
    def text(self) -> str:
        return "".join(self.said)

    def wait_ready(self) -> None:
        eventually(lambda: "Ready after" in self.text or self.process.poll() is not None, "Ready after", 300)
        assert self.process.poll() is None, self.text

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait(self) -> int:
        status = self.process.wait(60)
        self._reader.join(10)
        return status


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def free_base() -> int:
    """A port from which on the ports of `hawk up` are free."""
    return next(p for p in range(21000, 30000, 10) if all(port_is_free("127.0.0.1", p + i) for i in (0, 100, 200)))


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Ready to answer; tests that end it come last."""
    one = Up(free_base(), tmp_path_factory.mktemp("up"))
    try:
        one.wait_ready()
        yield one
    finally:
        if one.process.poll() is None:
            one.process.terminate()
            one.process.wait(60)


def test_the_curl_line_works(up: Up) -> None:
    eventually(lambda: "Ctrl-C" in up.text, "the curl line")
    line = next(line for line in up.said if line.strip().startswith("curl "))
    done = subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_the_smoke_test_passes(up: Up) -> None:
    done = subprocess.run(
        [ROOT / "deploy/smoke.sh", f"http://127.0.0.1:{up.port}"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout


def test_logs_lie_by_role_and_the_token_is_nowhere(up: Up, tmp_path: Path) -> None:
    where = re.search(r"logs in (\S+)", up.text)
    assert where is not None
    directory = Path(where.group(1))
    assert {"router.log", "prefill-0.log", "decode-0.log"} <= {file.name for file in directory.iterdir()}
    assert directory.stat().st_mode & 0o077 == 0
    tokens = {process.environ()["HAWK_TOKEN"] for process in up.family() if "deploy.cli" in process.cmdline()}
    assert len(tokens) == 1
    token = tokens.pop()
    assert token not in up.text
    assert not any(token in file.read_text() for file in directory.iterdir())
    assert not any(token in " ".join(process.cmdline()) for process in up.family())


def test_a_second_one_on_the_same_ports_says_so(up: Up, tmp_path: Path) -> None:
    second = Up(up.port, tmp_path)
    assert second.wait() == 1
    assert re.search(r"port \d+, for [\w-]+, is taken by pid \d+.*PORT=\d+", second.text), second.text
    assert up.process.poll() is None


def test_sigterm_ends_all_processes(up: Up) -> None:
    family = up.family()
    assert len(family) >= 3
    up.process.terminate()
    assert up.wait() == 0, up.text
    assert "all processes have ended" in up.text
    assert alive(family) == []


def test_a_role_that_dies_ends_the_rest_and_is_named(tmp_path: Path) -> None:
    up = Up(free_base(), tmp_path)
    eventually(lambda: any("router" in one.cmdline() for one in up.family()), "the router's process", 60)
    family = up.family()
    next(one for one in family if "router" in one.cmdline()).send_signal(signal.SIGKILL)
    assert up.wait() == 1
    assert "router was killed by SIGKILL" in up.text
    assert alive(family) == []
