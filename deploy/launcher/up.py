"""`hawk up`: check, start, wait until the cluster answers, watch over it, stop it without leaving a process."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import signal
import sys
import threading
import time
import urllib.parse
from collections.abc import Sequence
from textwrap import shorten
from typing import Any

from deploy.home import home
from deploy.launcher.checks import check
from deploy.launcher.plan import Member, plan
from deploy.launcher.processes import EXIT_S, Processes, Running
from deploy.launcher.settings import UpSettings
from deploy.launcher.status import StatusLine
from deploy.machine import cores
from transport.settings import load

POLL_S = 0.25
PROBE_TIMEOUT_S = 2.0
HINTS = {
    "ImportError": "the environment is broken: delete .venv and run `make up` again, or see `hawk doctor`",
    "ModuleNotFoundError": "the environment is incomplete: delete .venv and run `make up` again",
    "MemoryError": "memory ran out: lower HAWK_PREFILL_KV_CACHE_GIB or HAWK_DECODE_KV_BYTES",
    "is taken": "another process took the port meanwhile: make up PORT=… uses other ports",
}


ONE_SIGNAL_S = 0.5


class Interrupted(Exception):
    """A second signal: stop at once."""


def main(argv: Sequence[str]) -> int:
    """0 after Ctrl-C or SIGTERM, 1 when a role died or the cluster did not become ready in time."""
    settings = load(UpSettings, list(argv), prog="hawk up")
    config = _config_path(argv)
    members = plan(settings, os.environ, cores(), config)
    check(settings, members)
    stop = _stop_on_signals()
    directory = home() / "run" / str(settings.port)
    try:
        with Processes(directory, settings.grace_s + EXIT_S) as processes:
            processes.start(members)
            status = _serve(settings, processes, stop)
            _say("stopping …")
    except Interrupted:
        _say("killed what had not stopped yet")
        return 130
    _say("all processes have ended")
    return status


def _serve(settings: UpSettings, processes: Processes, stop: threading.Event) -> int:
    """From the first process to the signal that ends it, or to a role's death."""
    line = StatusLine()
    _say(f"starting {', '.join(one.member.name for one in processes.running)}; logs in {processes.directory}")
    while not stop.is_set():
        if dead := processes.dead():
            line.clear()
            return _report_death(dead)
        doing = {one.member.name: _doing(one) for one in processes.running}
        line.show(doing)
        if all(what == "ready" for what in doing.values()):
            line.clear()
            _announce(processes, line.elapsed_s)
            return _watch(processes, stop)
        if line.elapsed_s > settings.ready_timeout_s:
            line.clear()
            _say(f"not ready after {settings.ready_timeout_s:g} s: {doing}; see the logs in {processes.directory}")
            return 1
        stop.wait(POLL_S)
    line.clear()
    return 0


def _watch(processes: Processes, stop: threading.Event) -> int:
    while not stop.wait(POLL_S):
        if dead := processes.dead():
            return _report_death(dead)
    return 0


def _report_death(dead: Running) -> int:
    code, tail = dead.process.returncode, dead.tail()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
    print(f"\n---- end of {dead.log}\n{tail.rstrip()}\n----", file=sys.stderr)
    _say(f"{dead.member.name} {how}; stopping the others. Its log: {dead.log}")
    for sign, hint in HINTS.items():
        if sign in tail:
            _say(hint)
            break
    if code == -signal.SIGKILL:
        _say("SIGKILL that nobody sent is usually the kernel's answer to memory running out: see `dmesg`")
    return 1


def _doing(one: Running) -> str:
    """ "ready", why it is not, or what it said last."""
    try:
        status, body = _get(one.member, "/ready")
    except OSError:
        return shorten(one.last_message(), 60, placeholder=" …") or "starting"
    if status == 200:
        return "ready"
    return str(body.get("error", {}).get("message") or f"answers {status}")


def _get(member: Member, path: str) -> tuple[int, dict[str, Any]]:
    """Raises OSError while nobody listens."""
    url = urllib.parse.urlsplit(member.url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = json.loads(response.read())
        return response.status, body if isinstance(body, dict) else {}
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()


def _announce(processes: Processes, seconds: float) -> None:
    """A request that works as it stands."""
    router = next(one.member for one in processes.running if one.member.role == "router")
    body = {
        "model": router.settings.model_name,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 32,
        "temperature": 0,
    }
    command = ["curl", "-s", f"{router.url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    if router.settings.api_keys:
        command += ["-H", "Authorization: Bearer YOUR_API_KEY"]
    command += ["-d", json.dumps(body)]
    print(f"\nReady after {seconds:.0f} s. Try:\n\n    {shlex.join(command)}\n\nCtrl-C stops everything.\n", flush=True)


def _stop_on_signals() -> threading.Event:
    """Set by the first SIGINT, SIGTERM or SIGHUP; the second one raises Interrupted.

    What comes within ONE_SIGNAL_S of the first is the same wish: a signal to the whole process group reaches us
    from its sender and from `make`, which passes its own on.
    """
    stop = threading.Event()
    first = 0.0

    def handle(number: int, frame: object) -> None:
        nonlocal first
        if not stop.is_set():
            first = time.monotonic()
            stop.set()
        elif time.monotonic() - first > ONE_SIGNAL_S:
            raise Interrupted

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handle)
    return stop


def _config_path(argv: Sequence[str]) -> str | None:
    """The value of --config, which `load` reads but does not hand out."""
    for i, arg in enumerate(argv):
        if arg == "--config" and i + 1 < len(argv):
            return argv[i + 1]
        if arg.startswith("--config="):
            return arg.partition("=")[2]
    return os.environ.get("HAWK_CONFIG")


def _say(text: str) -> None:
    print(f"hawk up: {text}", file=sys.stderr, flush=True)
