"""All that one guest can show: the files in guest/, and on verbs the data-plane contract and whole pushes.

One guest runs them all, started with the first test here; each test then looks at one file's part of the outcome.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from . import junit, machine, quick_pytest
from .in_guest import FILES, SELECT

pytestmark = [pytest.mark.vm, pytest.mark.timeout(1000)]


@dataclass(frozen=True)
class Outcome:
    guest: machine.Result
    files: dict[str, junit.FileReport]


@pytest.fixture(scope="session")
def outcome(vm_host: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The guest's run of those files of which a test is selected here."""
    selected = [item.callspec.params["name"] for item in request.session.items if item.originalname == CHECK]
    files = [str(FILES[name].relative_to(quick_pytest.CHECKOUT)) for name in selected]
    out = tmp_path_factory.mktemp("guest")
    args = ["-v", "-k", SELECT, f"--junitxml={out / 'junit.xml'}", *files]
    quick_pytest.warm_up(args)
    spec = machine.Spec(
        quick_pytest.command(args), out, limit_s=900, memory_mb=2048, environment=quick_pytest.environment()
    )
    [guest] = machine.run([spec], ["guest| "], sys.stdout)
    report = out / "junit.xml"
    return Outcome(guest, junit.read(report) if report.exists() else {})


@pytest.mark.parametrize("name", FILES)
def test_passes_in_a_guest(name: str, outcome: Outcome) -> None:
    report = outcome.files.get(name)
    assert report is not None, f"no test of {name} ran to its end in the guest: {outcome.guest}"
    assert not report.failures, "\n\n".join(report.failures)
    if report.skips:
        pytest.skip("; ".join(report.skips))
    assert report.passed


CHECK = test_passes_in_a_guest.__name__
