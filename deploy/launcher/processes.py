"""The processes of a cluster: started so that none can outlive the launcher, watched, stopped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.launcher.plan import Member

PR_SET_PDEATHSIG = 1
TAIL_BYTES = 4000
#: a line of our own loggers as `transport.logging` writes it: time, level, role, logger, message
OWN_LINE = re.compile(r"^\S+Z [A-Z]+ +\w+ (?:router|prefill_worker|decode_worker|transport)[\w.]*: (.*)$", re.MULTILINE)
EXIT_S = 5.0
"""Seconds that a role gets on top of its grace, to close what it has open."""


@dataclass
class Running:
    """A started member and its log."""

    member: Member
    process: subprocess.Popen[bytes]
    log: Path

    def last_message(self) -> str:
        """The last message that the role itself logged ("" before the first); libraries' lines do not count."""
        found = OWN_LINE.findall(self.tail())
        return found[-1].strip() if found else ""

    def tail(self, size: int = TAIL_BYTES) -> str:
        with self.log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - size))
            return file.read().decode(errors="replace")


def role_command(member: Member) -> list[str]:
    """The role's process; all its settings are in its environment."""
    return [sys.executable, "-m", "deploy.cli", member.role]


class Processes:
    """Context manager: on exit every process is gone, whatever happened. `grace_s`: what roles get to finish."""

    def __init__(self, directory: Path, grace_s: float, command: Callable[[Member], list[str]] = role_command) -> None:
        self.directory = directory
        self.running: list[Running] = []
        self._grace_s = grace_s
        self._command = command

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, members: Sequence[Member]) -> None:
        """Each in a process group and session of its own, its output in `NAME.log` (the previous one is kept)."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        libc, launcher = ctypes.CDLL(None, use_errno=True), os.getpid()
        for member in members:
            log = self.directory / f"{member.name}.log"
            if log.exists():
                log.replace(log.with_suffix(".log.1"))

            def in_child(cpus: tuple[int, ...] | None = member.cpus) -> None:
                # The kernel kills the child when the launcher dies, even by SIGKILL.
                libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != launcher:
                    os._exit(1)
                if cpus is not None:
                    os.sched_setaffinity(0, cpus)

            with log.open("wb") as file:
                process = subprocess.Popen(
                    self._command(member),
                    env=dict(member.env),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=in_child,  # safe: the launcher has one thread
                )
            self.running.append(Running(member, process, log))

    def dead(self) -> Running | None:
        """The first process that ended by itself."""
        return next((one for one in self.running if one.process.poll() is not None), None)

    def stop(self) -> None:
        """SIGTERM to all, SIGKILL to the whole groups after the grace or at once when interrupted again."""
        try:
            for one in reversed(self.running):  # the router first: it tells its clients
                if one.process.poll() is None:
                    one.process.terminate()
            deadline = time.monotonic() + self._grace_s
            for one in self.running:
                try:
                    one.process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    break
        finally:
            for one in self.running:
                _kill_group(one.process)
            self.running.clear()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """What is left of the group: the leader, or children that it did not take along."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
