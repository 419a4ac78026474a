"""The launcher's processes: none outlives it, its death included; deaths are noticed; logs are kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from deploy.launcher.plan import Member
from deploy.launcher.processes import Processes

IGNORES_TERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
)
SLEEPS = "import time; print('up', flush=True); time.sleep(99)"
FORKS = """
import os, time
child = os.fork()
if child:
    print('up', child, flush=True)
time.sleep(99)
"""


def member(name: str, code: str, cpus: tuple[int, ...] | None = None) -> Member:
    return Member(name, code, "127.0.0.1", 1, cpus, dict(os.environ), SimpleNamespace())


def run_code(member: Member) -> list[str]:
    """The tests' members carry the code they run as their role."""
    return [sys.executable, "-c", member.role]


def eventually(check: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def ended(pid: int) -> bool:
    """Gone, or dead and only waiting to be reaped by whoever adopted it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def started(tmp_path: Path) -> Callable[..., Processes]:
    def start(*codes: str, grace_s: float = 10.0) -> Processes:
        processes = Processes(tmp_path / "run", grace_s, run_code)
        processes.start([member(f"m{i}", code) for i, code in enumerate(codes)])
        for one in processes.running:
            eventually(lambda one=one: "up" in one.tail())
        return processes

    return start


def test_stop_ends_all_with_sigterm(started: Callable[..., Processes]) -> None:
    processes = started(SLEEPS, SLEEPS)
    children = [one.process for one in processes.running]
    began = time.monotonic()
    processes.stop()
    assert [child.returncode for child in children] == [-signal.SIGTERM] * 2
    assert time.monotonic() - began < 5


def test_stop_kills_what_ignores_sigterm(started: Callable[..., Processes]) -> None:
    processes = started(IGNORES_TERM, grace_s=0.3)
    child = processes.running[0].process
    processes.stop()
    assert child.returncode == -signal.SIGKILL


def test_stop_takes_grandchildren_along(started: Callable[..., Processes]) -> None:
    processes = started(FORKS)
    grandchild = int(processes.running[0].tail().split()[1])
    processes.stop()
    eventually(lambda: ended(grandchild))


def test_leaving_the_context_by_an_error_stops_all(started: Callable[..., Processes]) -> None:
    processes = started(SLEEPS)
    pid = processes.running[0].process.pid
    with pytest.raises(RuntimeError), processes:
        raise RuntimeError
    assert ended(pid)


def test_none_survives_the_launchers_sigkill(tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from tests_launcher import member, run_code, IGNORES_TERM, Processes
        processes = Processes(Path({str(tmp_path)!r}), 10.0, run_code)
        processes.start([member("a", IGNORES_TERM), member("b", IGNORES_TERM)])
        print(*(one.process.pid for one in processes.running), flush=True)
        time.sleep(99)
    """)
    (tmp_path / "tests_launcher.py").write_text(Path(__file__).read_text())
    launcher = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert launcher.stdout is not None
    pids = [int(pid) for pid in launcher.stdout.readline().split()]
    assert len(pids) == 2
    eventually(lambda: all("up" in (tmp_path / f"{name}.log").read_text() for name in "ab"))
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    for pid in pids:
        eventually(lambda pid=pid: ended(pid))


def test_a_death_is_noticed_with_its_log(started: Callable[..., Processes]) -> None:
    processes = started(SLEEPS, "import sys; print('up: out of luck'); sys.exit(3)")
    with processes:
        eventually(lambda: processes.dead() is not None)
        dead = processes.dead()
        assert dead is not None
        assert (dead.member.name, dead.process.returncode) == ("m1", 3)
        assert "out of luck" in dead.tail()


def test_the_previous_log_is_kept(tmp_path: Path) -> None:
    for text in ("first up", "second up"):
        with Processes(tmp_path, 10.0, run_code) as processes:
            processes.start([member("m", f"print({text!r})")])
            processes.running[0].process.wait()
    assert (tmp_path / "m.log").read_text() == "second up\n"
    assert (tmp_path / "m.log.1").read_text() == "first up\n"


def test_only_the_roles_own_messages_count(tmp_path: Path) -> None:
    lines = "2026-01-01T00:00:00.000Z INFO    decode decode_worker.app: loading\\nnoise: x\\n"
    lines += "2026-01-01T00:00:00.000Z INFO    decode vllm.core: chatter"
    with Processes(tmp_path, 10.0, run_code) as processes:
        processes.start([member("m", f"print('''{lines}''')"), member("n", "pass")])
        for one in processes.running:
            one.process.wait()
        assert [one.last_message() for one in processes.running] == ["loading", ""]


def test_a_member_runs_on_its_cpus_alone(tmp_path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    with Processes(tmp_path, 10.0, run_code) as processes:
        processes.start([member("m", "import os; print(os.sched_getaffinity(0))", (cpu,))])
        processes.running[0].process.wait()
        assert processes.running[0].tail().strip() == f"{{{cpu}}}"
