"""Where Hawk keeps what it makes: models, run directories."""

from __future__ import annotations

import os
from pathlib import Path

#: the checkout that this package runs from, or None when it is installed as a wheel
CHECKOUT = next((p for p in [Path(__file__).resolve().parents[1]] if (p / "pyproject.toml").is_file()), None)


def home() -> Path:
    """`$HAWK_HOME`, else `.hawk` in the checkout, else the user's cache directory. Not created here."""
    if chosen := os.environ.get("HAWK_HOME"):
        return Path(chosen).expanduser().resolve()
    if CHECKOUT is not None:
        return CHECKOUT / ".hawk"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "hawk"
