"""What a guest's pytest says about each test file in its junit file."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

NO_REASON = ("", "unconditional skip")


@dataclass
class FileReport:
    """One test file: how many of its tests ran, and in pytest's words what went wrong."""

    passed: int = 0
    failures: list[str] = field(default_factory=list)
    skips: list[str] = field(default_factory=list)


def read(path: Path) -> dict[str, FileReport]:
    """By module name of the test file (unique over all of tests/)."""
    reports: defaultdict[str, FileReport] = defaultdict(FileReport)
    for case in ElementTree.parse(path).iter("testcase"):
        # A file that cannot be imported is a case without a class, whose name is the module's.
        dotted = case.get("classname") or case.get("name", "")
        module = next((part for part in dotted.split(".") if part.startswith("test_")), dotted)
        _add(reports[module], case)
    return dict(reports)


def _add(report: FileReport, case: ElementTree.Element) -> None:
    name = case.get("name")
    failed = [*case.iter("failure"), *case.iter("error")]
    skipped = case.find("skipped")
    for element in failed:
        report.failures.append(f"{name}: {element.text or element.get('message')}")
    if skipped is not None:
        reason = (skipped.get("message") or "").strip()
        if reason in NO_REASON:
            report.failures.append(f"{name}: skipped without a reason")
        else:
            report.skips.append(f"{name}: {reason}")
    elif not failed:
        report.passed += 1
