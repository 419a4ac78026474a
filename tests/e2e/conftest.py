"""Session-wide cluster and reference: vLLM takes its time to start, so it is started once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .reference import Answer, Reference
from .topology import Deployment


@pytest.fixture(scope="session")
def model() -> Path:
    """The model directory: HAWK_TEST_MODEL, or the default model, converted if need be."""
    if given := os.environ.get("HAWK_TEST_MODEL"):
        return Path(given)
    from deploy.model import ensure

    return ensure()


@pytest.fixture(scope="session")
def reference(model: Path, request: pytest.FixtureRequest) -> Iterator[Reference]:
    """Computed in the background while the cluster starts; cached between sessions."""
    reference = Reference(model, Path(request.config.cache.mkdir("reference")))
    yield reference
    reference.close()


@pytest.fixture(scope="session")
def deployment(model: Path, reference: Reference) -> Iterator[Deployment]:
    """The shared cluster, ready. Logs are shown where it does not start, and with the first failing test."""
    with tempfile.TemporaryDirectory(prefix="hawk-e2e-") as directory:
        deployment = Deployment(model, Path(directory))
        with deployment.cluster:
            deployment.cluster.start()
            deployment.cluster.wait_ready(timeout_s=240)
            yield deployment


@pytest.fixture(scope="session")
def answers(reference: Reference, deployment: Deployment) -> list[Answer]:
    return reference.answers()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Attach the role logs' ends to a failing test."""
    outcome = yield
    report = outcome.get_result()
    deployment = getattr(item, "funcargs", {}).get("deployment")
    if report.failed and isinstance(deployment, Deployment):
        for role in deployment.cluster.roles.values():
            report.sections.append((f"log of {role.name}", role.tail(3000)))
