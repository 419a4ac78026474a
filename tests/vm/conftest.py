"""Fixtures for tests in guests. What lies in guest/ and pair/ runs there, and is not collected here."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from . import host, kernel, machine, pairing, quick_pytest

collect_ignore = ["guest", "pair"]


@pytest.fixture(scope="session")
def vm_host() -> None:
    """Skips, saying what is missing, where no guest can be had. HAWK_REQUIRE=vm makes that a failure."""
    try:
        host.check()
        kernel.kernel()
        machine.accelerator()
    except host.Unavailable as error:
        pytest.skip(f"VM tests: {error}")


@pytest.fixture
def run_pair(vm_host: None, tmp_path: Path) -> Callable[[str], None]:
    """`run_pair("name")` runs pair/name.py on two guests and fails, with what both said, unless both exit with 0."""

    def run(program: str) -> None:
        line = shlex.join([str(quick_pytest.PYTHON), str(host.HERE / "pair" / f"{program}.py")])
        environment = quick_pytest.environment() | {"PYTHONPATH": str(quick_pytest.CHECKOUT)}
        with pairing.pair({"A": line, "B": line}, tmp_path, limit_s=240, environment=environment) as specs:
            results = machine.run(specs, ["A| ", "B| "], sys.stdout)
        if any(result.code for result in results):
            pytest.fail("\n".join(f"==== node {n}: {result}" for n, result in zip("AB", results, strict=True)), False)

    return run
