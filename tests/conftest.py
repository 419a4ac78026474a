"""What all tests share: property tests without deadlines, and HAWK_REQUIRE, which makes a skipped group a failure.

`HAWK_REQUIRE=e2e,vm` says that this machine has all that the tests marked `e2e` and `vm` need. One of them that
skips then fails, and so does a run that has none of them: a green run cannot hide a missing part.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator

import pytest
from hypothesis import settings

if not hasattr(asyncio, "timeout"):  # Python 3.10, which decode nodes may have: their tests run on it too
    from async_timeout import timeout

    asyncio.timeout = timeout

# A loaded machine is no failure. In CI the same examples run each time: a change is judged by its own merits.
settings.register_profile("hawk", deadline=None)
settings.register_profile("hawk-ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("hawk-ci" if os.environ.get("CI") else "hawk")

REQUIRED = frozenset(filter(None, (name.strip() for name in os.environ.get("HAWK_REQUIRE", "").split(","))))


def pytest_configure(config: pytest.Config) -> None:
    known = {line.split(":", 1)[0].strip() for line in config.getini("markers")}
    if unknown := REQUIRED - known:
        raise pytest.UsageError(f"HAWK_REQUIRE names {sorted(unknown)}, which is no marker of pyproject.toml")


def pytest_collection_finish(session: pytest.Session) -> None:
    for name in sorted(REQUIRED):
        if not any(item.get_closest_marker(name) for item in session.items):
            raise pytest.UsageError(f"HAWK_REQUIRE={name}, but no test marked {name!r} was collected")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    marks = sorted(name for name in REQUIRED if item.get_closest_marker(name))
    if report.skipped and marks and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"HAWK_REQUIRE={','.join(marks)}, but the test was skipped: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module that skips itself as a whole has no items to look at: its folder says what it belongs to."""
    report = yield
    folders = sorted(REQUIRED & set(collector.path.parts))
    if report.outcome == "skipped" and folders:
        report.outcome = "failed"
        report.longrepr = f"HAWK_REQUIRE={','.join(folders)}, but the module was skipped: {report.longrepr}"
    return report
