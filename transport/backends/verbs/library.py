"""The distribution's pyverbs, found and imported also from within a virtual environment.

pyverbs belongs to the libibverbs that it was built with, so it comes from the distribution and is never a
dependency of ours. A virtual environment does not see it; this module looks for that one package and leaves
everything else of the system's Python where it is.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transport.errors import ConfigurationError

INSTALL = "install it with `apt install python3-pyverbs ibverbs-providers` or `dnf install python3-pyverbs`"

_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_SYSTEM = (
    "/usr/lib/python3/dist-packages",
    "/usr/local/lib/python3*/dist-packages",
    "/usr/lib64/python3*/site-packages",
    "/usr/lib/python3*/site-packages",
)


@dataclass(frozen=True, slots=True)
class Library:
    """The modules of pyverbs that are used here. They have no type annotations, hence `Any`."""

    device: Any
    pd: Any
    mr: Any
    cq: Any
    qp: Any
    addr: Any
    wr: Any
    enums: Any
    """`pyverbs.enums`, called `pyverbs.libibverbs_enums` since 59."""
    error: type[Exception]
    """`PyverbsError`, the base of all its errors; some have `error_code`, an errno."""
    version: str
    """Of rdma-core, such as "44.0", or "unknown"."""
    path: str
    """The folder it was loaded from."""


@functools.cache
def load() -> Library:
    """Import pyverbs. Raises ConfigurationError that says what to install or change."""
    with _root_logger_kept():
        try:
            return _import()
        except ModuleNotFoundError as error:
            if error.name != "pyverbs":
                raise ConfigurationError(_explain(str(error))) from error
        except ImportError as error:
            raise ConfigurationError(_explain(str(error))) from error
        _adopt(find(system_folders()))
        try:
            return _import()
        except ImportError as error:
            for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
                del sys.modules[name]
            raise ConfigurationError(_explain(str(error))) from error


def system_folders() -> Iterator[Path]:
    """The system's folders for packages, this Python's own version first."""
    folders = [path for pattern in _SYSTEM for path in sorted(Path("/").glob(pattern[1:]))]
    return iter(sorted(folders, key=lambda path: f"python{_VERSION}/" not in f"{path}/"))


def find(folders: Iterable[Path]) -> Path:
    """The first pyverbs that was built for this Python. Raises ConfigurationError if there is none."""
    foreign = []
    for folder in folders:
        package = folder / "pyverbs"
        if any((package / f"device{suffix}").exists() for suffix in importlib.machinery.EXTENSION_SUFFIXES):
            return package
        foreign += sorted(package.glob("device.*.so"))
    if foreign:
        raise ConfigurationError(
            f"pyverbs is installed, but for another Python than this {sys.implementation.name} {_VERSION}: "
            f"{foreign[0]}; run Hawk with the distribution's own python3"
        )
    raise ConfigurationError(f"pyverbs is not installed, which RDMA needs; {INSTALL}")


def _adopt(package: Path) -> None:
    """Make this one package importable, and nothing else of the folder it lies in."""
    spec = importlib.util.spec_from_file_location(
        "pyverbs", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pyverbs"] = module
    spec.loader.exec_module(module)


def _import() -> Library:
    def module(name: str) -> Any:
        return importlib.import_module(f"pyverbs.{name}")

    try:
        enums = module("libibverbs_enums")
    except ModuleNotFoundError as error:
        if error.name != "pyverbs.libibverbs_enums":
            raise
        enums = module("enums")
    return Library(
        **{name: module(name) for name in ("device", "pd", "mr", "cq", "qp", "addr", "wr")},
        enums=enums,
        error=module("pyverbs_error").PyverbsError,
        version=_libibverbs_version(),
        path=str(Path(sys.modules["pyverbs"].__path__[0])),
    )


def _libibverbs_version(maps: Path = Path("/proc/self/maps")) -> str:
    """The loaded file is called libibverbs.so.1.<ABI>.<rdma-core version>."""
    found = re.search(r"/libibverbs\.so\.1\.\d+\.(\d[\d.]*)$", maps.read_text(), re.MULTILINE)
    return found[1] if found else "unknown"


def _explain(reason: str) -> str:
    if "IBVERBS_" in reason:  # a versioned symbol: libibverbs's own bindings must be of the very same release
        return (
            f"pyverbs was built for another libibverbs than the one installed ({reason}); "
            f"remove it (`pip uninstall pyverbs`) and take the distribution's: {INSTALL}"
        )
    return f"pyverbs cannot be imported ({reason}); {INSTALL}"


@contextmanager
def _root_logger_kept() -> Iterator[None]:
    """pyverbs calls `logging.basicConfig` when imported, which does nothing where a handler exists."""
    keep = logging.NullHandler()
    logging.getLogger().addHandler(keep)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(keep)
