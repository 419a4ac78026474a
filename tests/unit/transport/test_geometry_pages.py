"""GPU-side pages: each layout against the array expression that vLLM itself uses."""

from __future__ import annotations

import numpy as np
import pytest
from geometry_cases import LAYOUTS, random_bits
from hypothesis import given
from hypothesis import strategies as st

from transport.geometry.pages import PageLayout, pack_pages, unpack_pages

B, H, N, D = 3, 2, 64, 96


def known(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return random_bits(rng, (B, H, N, D), dtype), random_bits(rng, (B, H, N, D), dtype)


@pytest.mark.parametrize(("order", "packing", "dtype"), LAYOUTS)
@given(heads=st.integers(1, 5), dim=st.sampled_from([32, 64, 96]), size=st.sampled_from([32, 64]))
def test_pack_then_unpack_is_the_identity(
    order: str, packing: str, dtype: str, heads: int, dim: int, size: int
) -> None:
    layout = PageLayout(heads, dim, size, order, packing, dtype)
    rng = np.random.default_rng(heads)
    k, v = (random_bits(rng, (2, heads, size, dim), dtype) for _ in range(2))
    pages = pack_pages(k, v, layout)
    assert pages.shape == layout.shape(2)
    got = unpack_pages(pages, layout)
    assert np.array_equal(got[0], k)
    assert np.array_equal(got[1], v)


def test_plain_pages_keep_k_then_v_along_the_last_axis() -> None:
    k, v = known("float32")
    pages = pack_pages(k, v, PageLayout(H, D, N, "LBHNC", "plain", "float32"))
    assert np.array_equal(pages, np.concatenate([k, v], axis=-1))
    pages = pack_pages(k, v, PageLayout(H, D, N, "LBNHC", "plain", "float32"))
    assert np.array_equal(pages, np.concatenate([k, v], axis=-1).swapaxes(1, 2))


def test_vec_pages_keep_k_transposed() -> None:
    k, v = known("float32")
    halves = pack_pages(k, v, PageLayout(H, D, N, "LBHNC", "vec", "float32")).reshape(B, H, 2, N * D)
    assert np.array_equal(halves[:, :, 0].reshape(B, H, D, N).swapaxes(2, 3), k)
    assert np.array_equal(halves[:, :, 1].reshape(B, H, N, D), v)


def test_amx_pages_keep_vnni_pairs() -> None:
    k, v = known("bfloat16")
    halves = pack_pages(k, v, PageLayout(H, D, N, "LBHNC", "amx", "bfloat16")).reshape(B, H, 2, N * D)
    got_k = halves[:, :, 0].reshape(B, H, N // 16, D // 2, 16, 2).transpose(0, 1, 2, 4, 3, 5).reshape(B, H, N, D)
    got_v = halves[:, :, 1].reshape(B, H, D // 16, N // 2, 16, 2).transpose(0, 1, 3, 5, 2, 4).reshape(B, H, N, D)
    assert np.array_equal(got_k, k)
    assert np.array_equal(got_v, v)


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 48},
        {"block_size": 24},
        {"num_kv_heads": 0},
        {"order": "BLHNC"},
        {"packing": "neon"},
        {"dtype": "int8"},
        {"packing": "vec", "order": "LBNHC"},
        {"packing": "amx", "dtype": "float32"},
        {"packing": "amx", "dtype": "bfloat16", "block_size": 16},
    ],
)
def test_layouts_that_do_not_exist_are_refused(change: dict[str, object]) -> None:
    settings = {"num_kv_heads": 2, "head_dim": 64, "block_size": 32, "dtype": "float32"} | change
    with pytest.raises(ValueError, match=r".+"):
        PageLayout(**settings)  # type: ignore[arg-type]


def test_pages_of_another_dtype_or_shape_are_refused() -> None:
    layout = PageLayout(2, 64, 32, dtype="bfloat16")
    with pytest.raises(ValueError, match="bfloat16"):
        unpack_pages(np.zeros(layout.shape(1), np.float32), layout)
    with pytest.raises(ValueError, match="expected"):
        pack_pages(np.zeros((1, 2, 32, 32), np.uint16), np.zeros((1, 2, 32, 64), np.uint16), layout)
