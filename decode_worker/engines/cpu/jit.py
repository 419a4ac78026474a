"""How the kernels of this package are compiled and where the compiled code is cached."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numba
from numba.core import config

log = logging.getLogger(__name__)


def _cache_dir() -> str | None:
    """A directory of its own for this very source, or None where none can be written.

    numba only watches the file of the function it caches, not the files of the functions that one calls,
    so the directory is named after the content of the whole package.
    """
    digest = blake2b(digest_size=8)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    root = (
        os.environ.get("NUMBA_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hawk"
    )
    path = Path(root) / f"engine-{digest.hexdigest()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("compiled kernels are not cached: cannot create %s: %s", path, error)
        return None
    return str(path) if os.access(path, os.W_OK) else None


_CACHE_DIR = _cache_dir()


def kernel(*fastmath: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile for nogil use with the given LLVM fast-math flags; cached across processes."""

    def decorate(function: Callable[..., Any]) -> Any:
        before = config.CACHE_DIR
        config.CACHE_DIR = _CACHE_DIR or before
        try:
            return numba.njit(nogil=True, error_model="numpy", fastmath=set(fastmath), cache=_CACHE_DIR is not None)(
                function
            )
        finally:
            config.CACHE_DIR = before

    return decorate
