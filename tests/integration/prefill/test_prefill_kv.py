"""What lands in the channels is what the engine computed: exactly its pages, and the KV of the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from prefill_peers import Decode, Worker, decode_of, router_of, seeds, tokens_of

from transport.geometry.floats import to_float32
from transport.messages import Lease

pytestmark = pytest.mark.e2e

SEEDS = seeds()


def unpack(pages: np.ndarray, packing: str, dtype: str, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """vLLM's CPU pages [L, B, H, N, 2D] → K and V, float32 [L, T, H, D]; by vLLM's own layout, no code of ours."""
    layers, blocks, heads, size, width = pages.shape
    dims = width // 2
    flat = pages.reshape(layers, blocks, heads, 2, size * dims)
    k, v = flat[:, :, :, 0], flat[:, :, :, 1]
    head = (layers, blocks, heads)
    if packing == "amx":
        k = k.reshape(*head, size // 16, dims // 2, 16, 2).swapaxes(4, 5)
        v = v.reshape(*head, dims // 16, size // 2, 16, 2).transpose(0, 1, 2, 4, 6, 3, 5)
    else:
        k = k.reshape(*head, dims, size).swapaxes(3, 4)
    rows = [x.reshape(*head, size, dims).swapaxes(2, 3).reshape(layers, blocks * size, heads, dims) for x in (k, v)]
    return to_float32(rows[0][:, :tokens], dtype), to_float32(rows[1][:, :tokens], dtype)


def assert_equals_pages(worker: Worker, decode: Decode, lease: Lease) -> None:
    pages, packing = worker.saved_pages(lease)
    expected = unpack(pages, packing, decode.geometry.dtype, lease.prompt_tokens)
    for name, ours, theirs in zip("KV", decode.read(lease), expected, strict=True):
        start = lease.resident_tokens
        np.testing.assert_array_equal(ours[:, start:], theirs[:, start:], err_msg=name)


async def test_smoke(worker: Worker, model: Path, tmp_path: Path) -> None:
    await worker.until_ready()
    dtype = worker.get("/v1/info").json()["kv"]["dtype"]
    async with decode_of("d0", model, tmp_path, dtype=dtype) as decode, router_of(worker) as router:
        await router.open(decode)
        decode.poison()
        lease = decode.lease(router.writer, 300)
        prefilled, pushed = await router.hand_over(tokens_of(1, 300), lease)
        assert pushed.bytes > 0
        assert_equals_pages(worker, decode, lease)
        await worker.until_nothing_held()
