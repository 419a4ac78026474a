"""What a check of `hawk doctor` finds, and how findings are printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """`level`: ok; warn (works, but slower or not everywhere); fail (something will not work)."""

    check: str
    level: Level
    found: str
    advice: str = ""


def table(findings: Sequence[Finding]) -> str:
    """One line per check, an indented one for what to do."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<5} {finding.check:<{width}}  {finding.found}")
        if finding.advice:
            lines.append(f"{'':<5} {'':<{width}}  → {finding.advice}")
    return "\n".join(lines)
