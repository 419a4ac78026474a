"""The pool's shape: what it refuses, and where its pages lie."""

from __future__ import annotations

import pytest

from transport.geometry import KVGeometry


def geometry(**change: object) -> KVGeometry:
    settings = {
        "num_layers": 2,
        "num_kv_heads": 3,
        "head_dim": 64,
        "block_size": 32,
        "num_blocks": 5,
        "num_channels": 8,
    } | change
    return KVGeometry(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 0},
        {"num_channels": -1},
        {"head_dim": 80},
        {"block_size": 16},
        {"layout": "gpu"},
        {"layout": "gpu", "num_channels": 1, "dtype": "bfp8_b"},
    ],
)
def test_impossible_pools_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        geometry(**change)


@pytest.mark.parametrize(
    ("heads", "size", "dtype", "expected"),
    [(8, 32, "bfp8_b", 4352), (2, 64, "bfp8_b", 2176), (2, 32, "bfp8_b", 1088)],
)
def test_bytes_per_channel_and_block_at_head_dim_128(heads: int, size: int, dtype: str, expected: int) -> None:
    pool = geometry(num_kv_heads=heads, head_dim=128, block_size=size, num_blocks=1, dtype=dtype)
    assert pool.bank_bytes == expected


def test_one_head_of_128_dims_fills_only_half_of_eight_channels() -> None:
    pool = geometry(num_kv_heads=1, head_dim=128, block_size=32)
    assert {pool.locate(pool.page_index(0, 0, 0, d))[0] for d in range(128)} == {0, 1, 2, 3}
    assert {pool.locate(pool.page_index(1, 0, 0, d))[0] for d in range(128)} == {4, 5, 6, 7}


def test_every_bank_holds_the_same_share() -> None:
    pool = geometry()  # 6 pages per block, 30 pages over 8 channels
    assert pool.bank_bytes == 4 * 2048
    assert pool.locate(29) == (5, 3 * 2048)
