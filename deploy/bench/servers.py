"""The two systems of `hawk bench serve`: Hawk's three roles, and the same vLLM alone; started, awaited, stopped."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import httpx

from transport.errors import ConfigurationError


@dataclass(frozen=True)
class ServeSetup:
    """What both systems have in common. `cores`: the CPUs that each system as a whole may use."""

    model: Path
    name: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    chunk_tokens: int
    threads: int
    cores: tuple[int, ...]

    @property
    def environment(self) -> dict[str, str]:
        """Of every process: the same thread count, no spinning threads, no look at the network."""
        return {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(self.threads),
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        }


@dataclass
class Servers:
    """Context manager around the processes of one system; `url` serves OpenAI completions once `wait` returns."""

    setup: ServeSetup
    logs: Path
    name: str
    url: str = ""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def spawn(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start one process in its own group, on the set-up's cores, its output in a log file."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("HAWK_")}
        with (self.logs / f"{self.name}-{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                env=inherited | self.setup.environment | env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        os.sched_setaffinity(process.pid, self.setup.cores)
        self.processes[name] = process

    def wait(self, url: str, timeout_s: float = 300) -> None:
        """Until `url` answers 200. Raises ConfigurationError with the end of the log if a process died."""
        deadline = time.monotonic() + timeout_s
        while True:
            for name, process in self.processes.items():
                if process.poll() is not None:
                    log = (self.logs / f"{self.name}-{name}.log").read_text(errors="replace")
                    raise ConfigurationError(f"{self.name} {name} exited with {process.returncode}:\n{log[-3000:]}")
            try:
                if httpx.get(url, timeout=5, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if time.monotonic() > deadline:
                raise ConfigurationError(f"{self.name} was not ready within {timeout_s:g} s; logs are in {self.logs}")
            time.sleep(0.2)

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                pass
            finally:
                _kill_group(process)
        self.processes.clear()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """What a role left behind (vLLM's workers) ends with it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
    process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_vllm(setup: ServeSetup, logs: Path) -> Servers:
    """vLLM's own OpenAI server, alone, with the prefill worker's engine settings."""
    port = free_port()
    servers = Servers(setup, logs, "vllm", f"http://127.0.0.1:{port}")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", str(setup.model), "--served-model-name", setup.name, "--dtype", setup.dtype]
    command += ["--max-model-len", str(setup.max_model_len), "--max-num-seqs", str(setup.max_num_seqs)]
    command += ["--max-num-batched-tokens", str(setup.chunk_tokens), "--enforce-eager"]
    servers.spawn("server", command, {})
    return servers


def start_hawk(setup: ServeSetup, logs: Path) -> Servers:
    """One router, one prefill worker and one decode worker."""
    urls = {role: f"http://127.0.0.1:{free_port()}" for role in ("router", "prefill", "decode")}
    servers = Servers(setup, logs, "hawk", urls["router"])
    engine = {"dtype": setup.dtype, "max_model_len": setup.max_model_len, "threads": setup.threads}
    prefill = {"max_num_seqs": setup.max_num_seqs, "max_num_batched_tokens": setup.chunk_tokens}
    settings: dict[str, dict[str, object]] = {
        "decode": {**engine, "kv_dtype": setup.dtype, "max_batch": setup.max_num_seqs, "socket_dir": logs},
        "prefill": {**engine, **prefill},
        "router": {"prefill": urls["prefill"], "decode": urls["decode"]},
    }
    token = {"HAWK_TOKEN": secrets.token_hex(16)}
    for role, values in settings.items():
        common = {"port": urls[role].rpartition(":")[2], "model": setup.model, "served_name": setup.name, "name": role}
        env = {f"HAWK_{role}_{key}".upper(): str(value) for key, value in (common | values).items()}
        servers.spawn(role, [sys.executable, "-m", "deploy.cli", role], env | token)
    return servers
