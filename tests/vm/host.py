"""What the host offers for guests: the Debian packages they need, and KVM where it works."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent


class Unavailable(Exception):
    """No guest can be had on this host; the message says why, and what to do."""


def cache() -> Path:
    """Where kernels, and what else may be thrown away, are kept between runs."""
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hawk" / "vm"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def packages() -> list[str]:
    lines = (HERE / "packages.txt").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def check() -> None:
    """Raises Unavailable unless everything is there that a guest needs."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise Unavailable(f"guests run on Linux on x86_64 only, this is {platform.system()} on {platform.machine()}")
    if not all(map(shutil.which, ("dpkg-query", "apt-get", "apt-cache"))):
        raise Unavailable("guests boot the distribution's own kernel, taken with apt-get: Debian and Ubuntu only")
    if missing := missing_packages():
        raise Unavailable(
            f"not installed: {', '.join(missing)}; sudo apt-get install --no-install-recommends {' '.join(missing)}"
        )


def missing_packages() -> list[str]:
    query = ["dpkg-query", "--show", "--showformat", "${db:Status-Status} ${Package}\n", *packages()]
    found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    installed = {package for status, package in map(str.split, found) if status == "installed"}
    return [package for package in packages() if package not in installed]
