"""A pool that the same prefill worker reaches through NIXL instead of shared memory."""

from __future__ import annotations

import pytest

from .reference import Answer
from .test_equality import ask_all, assert_equal
from .topology import Deployment

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("kv_path", ["hawk", "relay", "host"])
async def test_nixl_gives_the_same_text(deployment: Deployment, answers: list[Answer], kv_path: str) -> None:
    """Written into the channels, or staged; compared by checksum before it is decoded."""
    some = [a for a in answers if len(a.prompt_ids) in (1, 32, 33, 129, 192, 321, 513)]
    pool = {"channels": 7, "block_size": 64, "num_blocks": 100, "checksum": True, "lanes": 8}
    with deployment.pool(kv_path=kv_path, transport="nixl", **pool) as (decode, router):
        async with deployment.client(router) as client:
            assert_equal(await ask_all(client, some, at_once=4), some)
            assert deployment.landed_bytes(decode) > 0
        await deployment.until_idle()
