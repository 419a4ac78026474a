"""pytest inside a guest, where importing costs some fifty times what it costs outside."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence

from .host import HERE, cache

CHECKOUT = HERE.parents[1]
PYTHON = CHECKOUT / ".venv" / "bin" / "python"
FLAGS = (
    *("-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin", "-p", "pytest_timeout"),
    *("-c", str(CHECKOUT / "pyproject.toml"), "--rootdir", str(CHECKOUT), "--confcutdir", str(HERE / "guest")),
)
"""Only the plugins that are needed, and no conftest.py outside tests/vm/guest: the project's imports hypothesis."""


def command(args: Sequence[str]) -> str:
    """The guest's command line for `pytest ARGS`."""
    return shlex.join([str(PYTHON), "-m", "pytest", *FLAGS, *args])


def environment() -> dict[str, str]:
    return {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        # A guest can read byte code but not write it to where it would last.
        "PYTHONPYCACHEPREFIX": str(cache() / "bytecode"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CI": "1",  # hypothesis, where a test uses it, then has no deadlines
    }


def warm_up(args: Sequence[str]) -> None:
    """Have the host compile what the guest will import: collect the same tests here, where they cannot run."""
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    inside = {name: value for name, value in environment().items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(
        [PYTHON, "-m", "pytest", *FLAGS, "--collect-only", "-q", *args],
        env={**outside, **inside, "HAWK_GUEST": "1"},
        cwd=CHECKOUT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
