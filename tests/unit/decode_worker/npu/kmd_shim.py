"""Runs programs (kmd_programs.py) in processes of their own, for which kmd_shim.c plays tt-kmd and a card."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

LEFT_OPEN = 66
"""Exit status of a process that left something open, or closed it in the wrong order."""


def build(folder: Path) -> Path:
    """The preload library. Without a C compiler its tests are skipped, unless HAWK_REQUIRE says what must not be."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        end = pytest.fail if os.environ.get("HAWK_REQUIRE") else pytest.skip
        end("no C compiler for kmd_shim.c: apt install gcc libc6-dev")
    library = folder / "kmd_shim.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(library)]
    done = subprocess.run([*command, str(HERE / "kmd_shim.c")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return library


@dataclass(frozen=True)
class Shim:
    library: Path
    banks: Path
    """Folder with one sparse file of 4 GiB per bank, "bank-0" and so on, once a program has run."""

    def start(
        self, program: str, *args: Any, file: str = "kmd_programs.py", **environment: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run `program(*args)` of a file here; `environment`: the shim's variables, without KMD_ and in lower case."""
        return subprocess.run(
            [sys.executable, str(HERE / file), program, json.dumps(args)],
            env=os.environ
            | {"LD_PRELOAD": str(self.library), "KMD_BANKS": str(self.banks)}
            | {f"KMD_{name.upper()}": str(value) for name, value in environment.items()},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def run(self, program: str, *args: Any, **environment: Any) -> Any:
        """What the program returned; it must leave nothing open."""
        done = self.start(program, *args, **environment)
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
        return json.loads(done.stdout.splitlines()[-1])

    def several(self, *calls: tuple[str, list[Any], dict[str, Any]]) -> list[Any]:
        """(program, arguments, environment) in one process; of each what it returned, or [class, message]."""
        return list(self.run("several", calls))

    def refused(self, program: str, *args: Any, **environment: Any) -> list[str]:
        """[class, message] of the error that the program ends with, having left nothing open."""
        [outcome] = self.several((program, list(args), environment))
        assert isinstance(outcome, list), f"nothing was refused: {outcome}"
        return outcome

    def bank(self, bank: int, address: int, length: int) -> bytes:
        with (self.banks / f"bank-{bank}").open("rb") as file:
            return os.pread(file.fileno(), length, address)
