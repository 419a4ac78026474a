from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from router_fleet import Fleet, make_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "alphabet")


@pytest.fixture
async def fleet(model_dir: Path) -> AsyncIterator[Fleet]:
    """One P and one D; the test starts the router."""
    fleet = Fleet(model_dir)
    fleet.add_prefill()
    fleet.add_decode()
    yield fleet
    await fleet.close()
