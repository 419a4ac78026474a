"""`hawk doctor`: checks this machine and this installation, and says what to do about what it finds.

`hawk doctor rdma` is about RDMA alone, in more detail.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import mmap
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

from deploy.finding import Finding, table
from deploy.home import CHECKOUT, home
from deploy.machine import GIB, available_memory, cores, cpu_flags, gib, port_is_free, port_owner
from deploy.model import DEFAULT, models_dir, verify

PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", re.MULTILINE)
WANTED_MEMORY = 5 * GIB
PORTS = {"router": 8000, "prefill": 8100, "decode": 8200}
OPTIONAL_MODULES = {"numba": "kernels and the decode role", "vllm": "the prefill role", "tokenizers": "the router role"}


def check_python() -> Finding:
    version = f"{platform.python_implementation()} {platform.python_version()}, {sys.prefix}"
    if sys.version_info[:2] == (3, 11):
        return Finding("python", "ok", version)
    return Finding("python", "warn", version, "the lock, and with it vLLM for CPUs, is for CPython 3.11")


def check_packages() -> Finding:
    """Installed versions against the lock of this checkout."""
    if CHECKOUT is None:
        return Finding("packages", "warn", "no checkout, so no lock to compare with")
    wrong = []
    pins = [pin for lock in ("engine", "runtime") for pin in locked(lock)]
    for name, version in pins:
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        if found != version:
            wrong.append(f"{name} {found} instead of {version}")
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        return Finding("packages", "fail", "; ".join(wrong[:5]) + more, "rm -rf .venv && make env")
    return Finding("packages", "ok", f"all {len(pins)} as locked")


def locked(name: str) -> list[tuple[str, str]]:
    """(name, version) of each pin in a lock file."""
    assert CHECKOUT is not None
    return PIN.findall((CHECKOUT / "deploy" / "requirements" / f"{name}.txt").read_text())


def check_modules() -> Finding:
    missing = [f"{name} ({use})" for name, use in OPTIONAL_MODULES.items() if importlib.util.find_spec(name) is None]
    if missing:
        return Finding("imports", "warn", f"not installed: {', '.join(missing)}", "make env installs all of them")
    return Finding("imports", "ok", ", ".join(OPTIONAL_MODULES))


def check_memory() -> Finding:
    available = available_memory()
    if available >= WANTED_MEMORY:
        return Finding("memory", "ok", f"{gib(available)} available")
    return Finding(
        "memory",
        "warn",
        f"{gib(available)} available",
        f"hawk up with its defaults wants {gib(WANTED_MEMORY)}: lower HAWK_PREFILL_KV_CACHE_GIB, HAWK_DECODE_KV_BYTES",
    )


def check_cores() -> Finding:
    count = len(cores())
    if count >= 2:
        return Finding("cores", "ok", f"{count}")
    return Finding("cores", "warn", "1", "prefill and decode will take turns on it")


def check_isa() -> Finding:
    flags = cpu_flags()
    have = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if name in flags]
    if platform.machine() != "x86_64" or "avx2" not in flags:
        found = f"{platform.machine()} {' '.join(have)}".strip()
        return Finding("cpu", "fail", found, "vLLM's CPU build needs x86_64 with AVX2")
    if "avx512f" not in flags:
        return Finding("cpu", "warn", ", ".join(have), "without AVX-512, vLLM and the KV kernels are slower")
    return Finding("cpu", "ok", ", ".join(have))


def check_shared_memory() -> Finding:
    """The emulated NPU's channels are memfds, mapped by both workers."""
    try:
        fd = os.memfd_create("hawk-doctor")
        try:
            os.ftruncate(fd, 1 << 20)
            with mmap.mmap(fd, 1 << 20) as view:
                view[-1] = 1
        finally:
            os.close(fd)
    except (OSError, AttributeError) as error:
        return Finding("memfd", "fail", str(error), "the shm data plane needs memfd_create (Linux, not sandboxed away)")
    return Finding("memfd", "ok", "can be created and mapped")


def check_model() -> Finding:
    if not (models_dir() / DEFAULT).is_dir():
        return Finding("model", "warn", f"{DEFAULT} is not there yet", "hawk model pull (hawk up does it too)")
    if wrong := verify(DEFAULT):
        return Finding("model", "fail", f"{DEFAULT}: changed {', '.join(wrong)}", f"rm -r {models_dir() / DEFAULT}")
    return Finding("model", "ok", f"{DEFAULT}, checksums match")


def check_ports() -> Finding:
    taken = [
        f"{port} ({role}{', ' + owner if (owner := port_owner(port)) else ''})"
        for role, port in PORTS.items()
        if not port_is_free("127.0.0.1", port)
    ]
    if taken:
        return Finding("ports", "warn", f"taken: {', '.join(taken)}", "make up PORT=8010 uses 8010, 8110, 8210")
    return Finding("ports", "ok", f"{', '.join(str(port) for port in PORTS.values())} are free")


def check_home() -> Finding:
    directory = home()
    nearest = next(p for p in (directory, *directory.parents) if p.exists())
    if not os.access(nearest, os.W_OK):
        return Finding("home", "fail", f"{directory} is not writable", "HAWK_HOME=/a/writable/directory")
    free = os.statvfs(nearest)
    left = free.f_bavail * free.f_frsize
    if left < GIB:
        return Finding("home", "warn", f"{directory}, {gib(left)} free", "models and logs need about 1 GiB")
    return Finding("home", "ok", f"{directory}, {gib(left)} free")


def check_rdma() -> Finding:
    from deploy import doctor_rdma

    return doctor_rdma.summary()


CHECKS: Sequence[Callable[[], Finding]] = (
    check_python,
    check_packages,
    check_modules,
    check_cores,
    check_isa,
    check_memory,
    check_shared_memory,
    check_ports,
    check_home,
    check_model,
    check_rdma,
)


def main(argv: Sequence[str]) -> int:
    """0 when nothing fails (warnings included), 1 otherwise."""
    if argv and argv[0] == "rdma":
        from deploy import doctor_rdma

        return doctor_rdma.main(argv[1:])
    parser = argparse.ArgumentParser(prog="hawk doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help='print {"ok": …, "findings": […]}')
    args = parser.parse_args(argv)
    findings = [check() for check in CHECKS]
    ok = all(finding.level != "fail" for finding in findings)
    if args.json:
        print(json.dumps({"ok": ok, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(table(findings))
    return 0 if ok else 1
