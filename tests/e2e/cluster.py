"""A cluster of real role processes on loopback, started, killed, restarted and always cleaned up by the tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
TOKEN = "end-to-end-token"
AUTH = {"Authorization": f"Bearer {TOKEN}"}

HAWK = ("-m", "deploy.cli")
"""What Python is to run for a role, before the role's name."""

#: one thread per process: the machine's cores are shared by all roles
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


class NotInTime(AssertionError):
    """Something the test waited for did not happen."""


def eventually(check: Callable[[], Any], what: str, timeout_s: float = 20.0, every_s: float = 0.1) -> Any:
    """Poll `check` until it returns something true and return that; for state only another process knows.

    An AssertionError inside `check` counts as "not yet"; the last one is shown when time is up.
    """
    deadline = time.monotonic() + timeout_s
    last: object = None
    while True:
        try:
            last = check()
            if last:
                return last
        except (AssertionError, httpx.TransportError) as error:
            last = error
        if time.monotonic() > deadline:
            raise NotInTime(f"{what}: not within {timeout_s} s; last: {last!r}")
        time.sleep(every_s)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Metrics(dict[str, list[tuple[Mapping[str, str], float]]]):
    """Samples of one scrape: name → [(labels, value)]."""

    @classmethod
    def parse(cls, text: str) -> Metrics:
        out = cls()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                out.setdefault(sample.name, []).append((sample.labels, sample.value))
        return out

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples of `name` whose labels include `labels`; KeyError names what there is."""
        if name not in self:
            raise KeyError(f"no metric {name!r}; there are {sorted(self)}")
        return sum(v for have, v in self[name] if all(have.get(k) == w for k, w in labels.items()))


@dataclass
class RoleProcess:
    """One role process and how to start it again."""

    name: str
    role: str
    port: int
    settings: dict[str, str]
    log: Path
    command: tuple[str, ...] = HAWK
    process: subprocess.Popen[bytes] | None = None
    group: list[psutil.Process] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def tail(self, size: int = 6000) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else "(no log)"
        return f"---- log of {self.name} (…{size} bytes)\n{text[-size:]}"


class Cluster:
    """Context manager: `add` the roles, `start` them together, and leave no process behind.

    Settings are passed as `HAWK_…` environment variables, as an operator would.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.roles: dict[str, RoleProcess] = {}
        self.http = httpx.Client(headers=AUTH, timeout=120, trust_env=False)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            for role in self.roles.values():
                print(role.tail())
        self.close()

    # ---- start and stop

    def add(self, name: str, role: str, *, command: tuple[str, ...] = HAWK, **settings: object) -> RoleProcess:
        """Describe a role process; `settings` are its settings by name."""
        port = free_port()
        values = {"host": "127.0.0.1", "port": port, "name": name, **settings}
        env = {f"HAWK_{role}_{key}".upper(): str(value) for key, value in values.items()} | {"HAWK_TOKEN": TOKEN}
        self.roles[name] = RoleProcess(name, role, port, env, self.directory / f"{name}.log", command)
        return self.roles[name]

    def start(self, *names: str) -> None:
        """Start the named roles (all that don't run, by default) without waiting for them."""
        for name in names or [n for n, r in self.roles.items() if not r.running]:
            role = self.roles[name]
            inherited = {k: v for k, v in os.environ.items() if not k.startswith("HAWK_")}
            with role.log.open("ab") as log:
                role.process = subprocess.Popen(
                    [sys.executable, *role.command, role.role],
                    cwd=self.directory,
                    env=inherited | ENVIRONMENT | {"PYTHONPATH": str(ROOT)} | role.settings,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def wait_ready(self, *names: str, timeout_s: float = 180) -> None:
        """Until `/ready` of the named roles (all by default) says 200; a role that died is shown at once."""
        for name in names or self.roles:
            eventually(lambda name=name: self._ready(name), f"/ready of {name}", timeout_s, every_s=0.2)

    def _ready(self, name: str) -> bool:
        role = self.roles[name]
        if not role.running:
            raise RuntimeError(f"{name} exited with {role.process and role.process.returncode}\n{role.tail()}")
        return self.ready_status(name) == 200

    def ready_status(self, name: str) -> int:
        return self.http.get(f"{self.roles[name].url}/ready").status_code

    def kill(self, name: str, sig: int = signal.SIGKILL, timeout_s: float = 20) -> None:
        """Signal the role's main process only, as the kernel's OOM killer would, and wait for its end.

        Its children (vLLM's engine core) must notice by themselves: `orphans` shows those that have not.
        """
        role = self.roles[name]
        assert role.process is not None
        role.group = psutil.Process(role.process.pid).children(recursive=True)
        role.process.send_signal(sig)
        role.process.wait(timeout_s)

    def orphans(self, name: str) -> list[psutil.Process]:
        """Children of the killed role that still run."""
        return [p for p in self.roles[name].group if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def signal_all(self, name: str, sig: int) -> None:
        """Signal the role's whole process group (SIGSTOP and SIGCONT: a hang)."""
        process = self.roles[name].process
        assert process is not None
        os.killpg(process.pid, sig)

    def restart(self, name: str) -> None:
        """Start again (after `kill`) with the same settings and port, and wait until it is ready."""
        assert not self.roles[name].running
        self.start(name)
        self.wait_ready(name)

    def remove(self, name: str) -> None:
        """Stop the role for good; shows its log where it did not end on SIGTERM."""
        role = self.roles.pop(name)
        if role.running and role.process is not None:
            role.process.terminate()
        if role.process is not None:
            self._end(role, time.monotonic() + 20)

    def close(self) -> None:
        for role in self.roles.values():
            if role.running and role.process is not None:
                role.process.terminate()
        deadline = time.monotonic() + 20
        for role in self.roles.values():
            if role.process is not None:
                self._end(role, deadline)
        self.http.close()

    @staticmethod
    def _end(role: RoleProcess, deadline: float) -> None:
        assert role.process is not None
        try:
            role.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(f"{role.name} did not stop on SIGTERM\n{role.tail()}")
        try:
            os.killpg(role.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return
        role.process.wait(10)

    # ---- look at it

    def url(self, name: str) -> str:
        return self.roles[name].url

    def metrics(self, name: str) -> Metrics:
        response = self.http.get(f"{self.url(name)}/metrics")
        response.raise_for_status()
        return Metrics.parse(response.text)
