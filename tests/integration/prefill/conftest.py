"""Real prefill workers, started once per module, and what they talk to."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from prefill_peers import Router, Worker, router_of


@pytest.fixture(scope="session")
def model() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory."""
    given = os.environ.get("HAWK_TEST_MODEL")
    if given:
        return Path(given)
    from deploy.model import ensure

    return ensure(name="smollm2-135m-instruct")


@pytest.fixture(scope="module")
def settings() -> dict[str, object]:
    """The worker's settings; a module may have its own."""
    return {"dtype": "bfloat16", "max_num_batched_tokens": 128, "kv_cache_gib": 0.25}


@pytest.fixture(scope="module")
def started(model: Path, settings: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker(tmp_path_factory.mktemp("prefill"), model, **settings)
    yield worker
    worker.close()


@pytest.fixture
async def worker(started: Worker) -> Worker:
    await started.until_ready()
    return started


@pytest.fixture
async def router(worker: Worker) -> AsyncIterator[Router]:
    async with router_of(worker) as router:
        yield router
