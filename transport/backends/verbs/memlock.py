"""How much memory this process may pin for a NIC."""

from __future__ import annotations

import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_CAP_IPC_LOCK = 1 << 14


@dataclass(frozen=True, slots=True)
class Memlock:
    """How much memory this process may pin, in bytes; None is no limit. Root's capability lifts the limit."""

    soft: int | None
    hard: int | None
    exempt: bool
    """The process has CAP_IPC_LOCK."""

    def __str__(self) -> str:
        def amount(limit: int | None) -> str:
            return "unlimited" if limit is None else f"{limit / 2**20:g} MiB"

        text = amount(self.soft) if self.soft == self.hard else f"{amount(self.soft)} (hard limit {amount(self.hard)})"
        return f"{text}, not binding: CAP_IPC_LOCK" if self.exempt else text


def memlock() -> Memlock:
    """This process's limit of locked memory."""
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_MEMLOCK)
    )
    effective = 0
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        effective = int(next(line for line in lines if line.startswith("CapEff:")).split()[1], 16)
    return Memlock(soft, hard, exempt=bool(effective & _CAP_IPC_LOCK))
