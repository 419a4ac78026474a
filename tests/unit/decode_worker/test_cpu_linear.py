"""The matrix products of the CPU engine against numpy, and their independence of batch and split."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.engines.cpu.linear import add_linear


def weights(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """(as stored, as float32)."""
    values = rng.standard_normal(shape, dtype=np.float32)
    if dtype == "float32":
        return values, values
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


@settings(deadline=None, max_examples=60)
@given(
    dtype=st.sampled_from(("float32", "bfloat16")),
    batch=st.integers(1, 21),
    inner=st.integers(1, 9).map(lambda n: 16 * n),
    width=st.integers(1, 60),
    data=st.data(),
)
def test_adds_the_product_to_the_given_columns_only(
    dtype: str, batch: int, inner: int, width: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, width))
    stop = data.draw(st.integers(start, width))
    rng = np.random.default_rng(0)
    stored, values = weights(rng, (2, width, inner), dtype)
    x = rng.standard_normal((batch, inner), dtype=np.float32)
    out = rng.standard_normal((batch, width), dtype=np.float32)
    expected = out.astype(np.float64)
    expected[:, start:stop] += x.astype(np.float64) @ values[1, start:stop].astype(np.float64).T
    add_linear(x, stored, 1, out, start, stop)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_does_not_depend_on_the_rows_beside_it_nor_on_the_split(dtype: str) -> None:
    rng = np.random.default_rng(0)
    stored, _ = weights(rng, (1, 50, 96), dtype)
    x = rng.standard_normal((23, 96), dtype=np.float32)
    together = np.zeros((23, 50), np.float32)
    add_linear(x, stored, 0, together, 0, 50)
    for row in range(23):
        alone = np.zeros((1, 50), np.float32)
        add_linear(x[row : row + 1], stored, 0, alone, 0, 17)
        add_linear(x[row : row + 1], stored, 0, alone, 17, 50)
        np.testing.assert_array_equal(alone[0], together[row])
