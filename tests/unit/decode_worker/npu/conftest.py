"""The card and driver that kmd_shim.c plays for tests of tt-kmd's windows."""

from __future__ import annotations

from pathlib import Path

import pytest
from kmd_shim import Shim, build


@pytest.fixture(scope="session")
def shim_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("kmd"))


@pytest.fixture
def shim(shim_library: Path, tmp_path: Path) -> Shim:
    """A card whose memory is zero."""
    return Shim(shim_library, tmp_path)
