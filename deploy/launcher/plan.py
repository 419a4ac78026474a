"""Which processes make up the cluster: ports, CPUs, environment and settings of each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.launcher.settings import FORWARDED, UpSettings
from deploy.roles import settings_of
from transport.errors import ConfigurationError

LOOPBACK = "127.0.0.1"
WORKER_ROLES = ("prefill", "decode")
#: settings that `hawk up` decides itself: to set them for a role from outside is a contradiction
OWNED = {
    "router": ("host", "port", "name", "model", "prefill", "decode"),
    "prefill": ("host", "port", "name", "model"),
    "decode": ("host", "port", "name", "model"),
}


@dataclass(frozen=True)
class Member:
    """One process of the cluster. `cpus` None: any. `settings` as the process will see them."""

    name: str
    role: str
    host: str
    port: int
    cpus: tuple[int, ...] | None
    env: Mapping[str, str]
    settings: Any

    @property
    def url(self) -> str:
        """As seen from this machine."""
        host = LOOPBACK if self.host in ("0.0.0.0", "::") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def plan(settings: UpSettings, env: Mapping[str, str], cpus: Sequence[int], config: str | None) -> list[Member]:
    """Decode workers, then prefill workers, then the router: the order in which they are started.

    Raises ConfigurationError where the roles' own settings are wrong or contradict those of `hawk up`.
    """
    _refuse_owned(env)
    base = {key: value for key, value in env.items() if not key.startswith("HAWK_UP_") and key != "HAWK_TOKEN_FILE"}
    base |= {"HAWK_TOKEN": settings.secret, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    for name in ("log_level", "log_json"):
        if name in settings.model_fields_set:
            base[f"HAWK_{name.upper()}"] = str(getattr(settings, name))
    if config:
        base["HAWK_CONFIG"] = os.path.abspath(config)

    _, *worker_ports = settings.ports()
    names = [("prefill", i) for i in range(settings.prefill)] + [("decode", i) for i in range(settings.decode)]
    ports = dict(zip(names, worker_ports, strict=True))
    shares = cpu_shares(settings.prefill, settings.decode, cpus) if settings.pin else {}
    workers = [
        _member(settings, base, role, f"{role}-{i}", LOOPBACK, ports[role, i], shares.get((role, i)), {})
        for role in reversed(WORKER_ROLES)
        for i in range(getattr(settings, role))
    ]
    urls = {role: ",".join(m.url for m in workers if m.role == role) for role in WORKER_ROLES}
    return [*workers, _member(settings, base, "router", "router", settings.host, settings.port, None, urls)]


def cpu_shares(prefill: int, decode: int, cpus: Sequence[int]) -> dict[tuple[str, int], tuple[int, ...]]:
    """CPUs of each worker: equal runs of neighbours, or one each (in turn) where there are fewer than workers.

    Prefill and decode alternate, so that on two CPUs the prefill workers have the one and decode the other.
    The router is not pinned: it is idle most of the time.
    """
    order = sorted([("prefill", i) for i in range(prefill)] + [("decode", i) for i in range(decode)], key=_turn)
    size = len(cpus) // len(order)
    if size == 0:
        return {worker: (cpus[n % len(cpus)],) for n, worker in enumerate(order)}
    return {worker: tuple(cpus[n * size : (n + 1) * size]) for n, worker in enumerate(order)}


def _turn(worker: tuple[str, int]) -> tuple[int, int]:
    role, number = worker
    return number, WORKER_ROLES.index(role)


def _member(
    up: UpSettings,
    base: Mapping[str, str],
    role: str,
    name: str,
    host: str,
    port: int,
    cpus: tuple[int, ...] | None,
    extra: Mapping[str, str],
) -> Member:
    prefix = f"HAWK_{role.upper()}_"
    own = {"host": host, "port": str(port), "name": f"{up.name}-{name}", "model": str(up.model), **extra}
    env = {**base, **{f"{prefix}{key.upper()}": value for key, value in own.items()}}
    for key in FORWARDED:
        if key in up.model_fields_set or key == "grace_s":
            env.setdefault(f"{prefix}{key.upper()}", str(getattr(up, key)))
    if cpus is not None:
        env.setdefault(f"{prefix}THREADS", str(len(cpus)))
    if role in WORKER_ROLES:
        env.setdefault("OMP_NUM_THREADS", env.get(f"{prefix}THREADS", "1"))
    try:
        settings = settings_of(role, (), env)
    except ConfigurationError as error:
        raise ConfigurationError(f"{role}: {error.message}") from None
    return Member(name, role, host, port, cpus, env, settings)


def _refuse_owned(env: Mapping[str, str]) -> None:
    for role, fields in OWNED.items():
        for field in fields:
            if (key := f"HAWK_{role.upper()}_{field.upper()}") in env:
                raise ConfigurationError(f"{key} contradicts `hawk up`, which sets it; see hawk up --help, or unset it")
