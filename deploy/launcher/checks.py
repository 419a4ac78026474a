"""What is checked before anything is started, so that a failure names its cause and what to do."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from deploy.launcher.plan import Member
from deploy.launcher.settings import UpSettings
from deploy.machine import GIB, available_memory, gib, port_is_free, port_owner
from transport.errors import ConfigurationError

#: modules each role needs and that are worth naming before it starts
MODULES = {
    "router": ("fastapi", "uvicorn", "websockets", "msgpack", "tokenizers", "jinja2"),
    "prefill": ("vllm", "torch", "transformers", "numba"),
    "decode": ("numba", "llvmlite", "msgpack"),
}
#: resident memory of a role without weights and KV (measured), in bytes
RUNTIME = {"router": 0.2 * GIB, "prefill": 1.4 * GIB, "decode": 0.6 * GIB}
BYTES_PER_WEIGHT = {"float32": 4, "float16": 2, "bfloat16": 2, "auto": 2}


def check(settings: UpSettings, members: Sequence[Member]) -> None:
    """Raises ConfigurationError with the first obstacle and the way around it."""
    check_modules(members)
    check_ports(settings, members)
    if settings.check_memory:
        check_memory(members, available_memory())


def check_modules(members: Sequence[Member]) -> None:
    for role in sorted({member.role for member in members}):
        missing = [name for name in MODULES[role] if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigurationError(
                f"the {role} role needs {', '.join(missing)}, not installed here: "
                "run `make up` in a checkout, which installs what the lock lists, or see `hawk doctor`"
            )


def check_ports(settings: UpSettings, members: Sequence[Member]) -> None:
    for member in reversed(members):  # the router first: its port is the one that the user knows
        if port_is_free(member.host, member.port):
            continue
        owner = port_owner(member.port)
        port = _free_base(settings)
        raise ConfigurationError(
            f"port {member.port}, for {member.name}, is taken{' by ' + owner if owner else ''}. "
            f"Stop that process, or use other ports: make up PORT={port} (hawk up --port {port})"
        )


def _free_base(settings: UpSettings) -> int:
    """A router port from which on all roles' default ports are free."""
    for base in range(settings.port + 10, 60000, 10):
        wanted = [base, *(base + 100 + i for i in range(settings.prefill))]
        wanted += [base + 200 + i for i in range(settings.decode)]
        if all(port_is_free("127.0.0.1", port) for port in wanted):
            return base
    return 9000


def check_memory(members: Sequence[Member], available: int) -> None:
    needs = {member.name: estimate(member) for member in members}
    total = sum(needs.values())
    if total <= available:
        return
    table = ", ".join(f"{name} {gib(size)}" for name, size in needs.items())
    raise ConfigurationError(
        f"not enough memory: about {gib(total)} needed ({table}), {gib(available)} available. Lower "
        "HAWK_PREFILL_KV_CACHE_GIB, HAWK_DECODE_KV_BYTES or the number of workers "
        "(PREFILL=, DECODE=), or start anyway with hawk up --no-check-memory"
    )


def estimate(member: Member) -> int:
    """Bytes this process will hold: runtime, weights at its dtype, KV."""
    settings = member.settings
    size = RUNTIME[member.role]
    if member.role == "router":
        return int(size)
    size += _weights(settings.model) * BYTES_PER_WEIGHT[settings.dtype]
    if member.role == "prefill":
        return int(size + settings.kv_cache_gib * GIB)
    geometry = settings.geometry()
    pool = geometry.num_blocks * geometry.block_bytes
    beside = {"hawk": 0, "relay": pool}  # the relay's host memory mirrors the pool
    return int(size + pool + beside.get(settings.kv_path, settings.staging_bytes))


def _weights(model: Path) -> int:
    """Number of parameters, from the size of the (16-bit) weight files."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors")) // 2
