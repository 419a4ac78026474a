"""NIXL's bindings, loaded when the first agent is made: no process that does without them pays for it."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from transport.backends.nixl import ucx
from transport.errors import ConfigurationError

VERSION = "1.5.1"
_PACKAGES = ("nixl_cu12", "nixl_cu13")


@functools.cache
def load() -> Any:
    """The bindings. They are used as they are, since the Python class around them has its progress thread poll
    without a pause. Raises ConfigurationError where NIXL is missing or does not load.
    """
    ucx.prepare()
    for package in _PACKAGES:
        try:
            return importlib.import_module(f"{package}._bindings")
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith(package):
                raise ConfigurationError(f"{package} does not load: {error}") from error
        except ImportError as error:
            raise ConfigurationError(f"{package} does not load: {error}") from error
    raise ConfigurationError(
        f"the nixl data plane needs NIXL: pip install --no-deps nixl-cu12=={VERSION} (it needs numpy, and no CUDA)"
    )
