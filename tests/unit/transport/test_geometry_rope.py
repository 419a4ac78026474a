"""The order of K's head dim."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.geometry.rope import inverse, permutation

dims = st.integers(1, 8).map(lambda n: 32 * n)


@given(dims)
def test_interleaved_takes_from_both_halves_in_turn(dim: int) -> None:
    source = np.arange(dim)
    out = source[permutation(dim, "interleaved")]
    assert np.array_equal(out[0::2], source[: dim // 2])
    assert np.array_equal(out[1::2], source[dim // 2 :])


def test_half_is_left_alone() -> None:
    assert np.array_equal(permutation(64, "half"), np.arange(64))


@pytest.mark.parametrize("rope", ["half", "interleaved"])
@given(dims)
def test_inverse_undoes(rope: str, dim: int) -> None:
    source = np.arange(dim)
    assert np.array_equal(source[permutation(dim, rope)][inverse(dim, rope)], source)


@given(st.integers(0, 2**16), st.sampled_from([64, 128]))
def test_interleaved_order_makes_both_rotations_agree(seed: int, dim: int) -> None:
    """Rotating halves and then permuting equals permuting and then rotating neighbours."""
    rng = np.random.default_rng(seed)
    x, angle = rng.standard_normal(dim), rng.standard_normal(dim // 2)
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = x[: dim // 2], x[dim // 2 :]
    halves = np.concatenate([first * cos - second * sin, second * cos + first * sin])
    order = permutation(dim, "interleaved")
    even, odd = x[order][0::2], x[order][1::2]
    pairs = np.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(-1)
    np.testing.assert_allclose(halves[order], pairs)
