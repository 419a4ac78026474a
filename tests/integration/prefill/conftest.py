"""Real prefill workers, started once per module."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefill_peers import Worker


@pytest.fixture(scope="session")
def model() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory."""
    given = os.environ.get("HAWK_TEST_MODEL")
    if given:
        return Path(given)
    from deploy.model import ensure

    return ensure(name="smollm2-135m-instruct")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
async def worker(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    started = Worker(
        tmp_path_factory.mktemp("prefill"), model, dtype=request.param, max_num_batched_tokens=128, kv_cache_gib=0.5
    )
    yield started
    started.close()
