"""Fixtures for tests on Tenstorrent devices. What lies in inside/ runs in .venv-ttnn, and is not collected here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

collect_ignore = ["inside"]

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def ttnn_python() -> Path:
    """The Python of .venv-ttnn, which is made where it is missing or out of date.

    Skips, saying why, where it cannot be made. HAWK_REQUIRE=ttnn makes that a failure.
    """
    made = subprocess.run(["deploy/env.sh", "ttnn"], cwd=CHECKOUT, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no .venv-ttnn: {made.stderr.strip() or made.stdout.strip()}")
    return CHECKOUT / ".venv-ttnn" / "bin" / "python"
