"""A seed means the same first token, however the prompt is cut into chunks."""

from __future__ import annotations

import asyncio

import pytest
from prefill_peers import Router, Worker, tokens_of

from transport.messages import Prefilled

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def settings() -> dict[str, object]:
    return {"dtype": "float32", "max_num_batched_tokens": 64, "kv_cache_gib": 0.5, "max_num_seqs": 8}


async def first_token(router: Router, tokens: list[int], seed: int) -> int:
    request_id = router.prefill(tokens, temperature=1.0, seed=seed, max_tokens=1)
    prefilled = await router.expect(Prefilled, request_id=request_id)
    return prefilled.token_ids[0]


async def test_a_seeded_prompt_of_many_chunks_gives_one_token(worker: Worker, router: Router) -> None:
    tokens = tokens_of(21, 300)
    alone = [await first_token(router, tokens, seed) for seed in range(4)]
    assert len(set(alone)) > 1, "the seed has no influence"
    # Together they share the budget: other chunk boundaries, and all but the last block from the prefix cache.
    crowd = await asyncio.gather(
        *(first_token(router, tokens, seed) for seed in range(4)),
        *(first_token(router, tokens_of(30 + i, 200), 5) for i in range(4)),
    )
    assert crowd[:4] == alone
    await worker.until_nothing_held()
