"""Devices without a card, for tests that run in .venv-ttnn. A process opens one of them, the first it asks for."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.tenstorrent.environment import mock_environment, simulator_environment

SITE_PACKAGES = Path(sysconfig.get_paths()["purelib"])


@pytest.fixture(scope="session")
def simulator() -> Iterator[Any]:
    """wolfpine's p150a, open: an `ttnn` device whose DRAM keeps what is written, and that runs no kernels."""
    os.environ.update(simulator_environment(SITE_PACKAGES))
    yield from _opened()


@pytest.fixture(scope="session")
def mock_p150() -> Iterator[Any]:
    """A mock p150, open: an `ttnn` device that validates and plans like a card, and has no memory."""
    os.environ.update(mock_environment(SITE_PACKAGES))
    yield from _opened()


@pytest.fixture(scope="session")
def mock_mesh() -> Iterator[Any]:
    """Four mock p150s in a ring, open as a 1x4 mesh."""
    os.environ.update(mock_environment(SITE_PACKAGES, 4))
    import ttnn

    ttnn.set_fabric_config(ttnn.FabricConfig.FABRIC_1D)
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 4))
    yield mesh
    ttnn.close_mesh_device(mesh)
    ttnn.set_fabric_config(ttnn.FabricConfig.DISABLED)


def _opened() -> Iterator[Any]:
    import ttnn

    device = ttnn.open_device(device_id=0)
    yield device
    ttnn.close_device(device)
