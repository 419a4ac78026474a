"""Bytes of a tile: faces, and the block floats against a scalar transcription of tt-metal's rules."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from transport.geometry import TILE_BYTES
from transport.geometry.floats import from_float32, to_bfloat16, to_float32
from transport.geometry.tiles import decode, encode, from_faces, to_faces

DTYPES = ["float32", "bfloat16", "bfp8_b", "bfp4_b"]
any_bits = hnp.arrays(np.uint32, (32, 32), elements=st.integers(0, 2**32 - 1))
finite = hnp.arrays(
    np.float32, (32, 32), elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=True), fill=st.just(0.0)
)


def scalar_block_float(values: list[int], mantissa_bits: int) -> tuple[int, list[int]]:
    """16 float32 bit patterns → (shared exponent, codes), one value at a time."""
    shared = max((bits >> 23) & 0xFF for bits in values)
    codes = []
    for bits in values:
        exponent = (bits >> 23) & 0xFF
        mantissa = 0 if exponent == 0 else ((bits & 0x7FFFFF) | 0x800000) >> (shared - exponent)
        shift = 24 - mantissa_bits
        rest, mantissa = mantissa & ((1 << shift) - 1), mantissa >> shift
        tie = 1 << (shift - 1)
        if rest > tie or (rest == tie and mantissa & 1):
            mantissa += 1
        mantissa = min(mantissa, (1 << mantissa_bits) - 1)
        sign = bits >> 31 if mantissa else 0
        codes.append(sign << mantissa_bits | mantissa)
    return shared, codes


def test_faces_are_top_left_top_right_bottom_left_bottom_right() -> None:
    tile = np.arange(1024, dtype=np.float32).reshape(32, 32)
    data = encode(tile, "float32", "float32").view(np.float32)
    assert data[0] == tile[0, 0]
    assert data[1] == tile[0, 1]
    assert data[16] == tile[1, 0]
    assert data[256] == tile[0, 16]
    assert data[512] == tile[16, 0]
    assert data[768] == tile[16, 16]
    assert data[1023] == tile[31, 31]
    assert np.array_equal(from_faces(to_faces(tile)), tile)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tile_has_its_size(dtype: str) -> None:
    assert encode(np.zeros((2, 3, 32, 32), np.float32), "float32", dtype).shape == (2, 3, TILE_BYTES[dtype])


@given(any_bits)
def test_equal_formats_keep_every_bit(bits: np.ndarray) -> None:
    assert np.array_equal(encode(bits.view(np.float32), "float32", "float32").view(np.uint32), to_faces(bits).ravel())
    half = (bits >> 16).astype(np.uint16)
    assert np.array_equal(encode(half, "bfloat16", "bfloat16").view(np.uint16), to_faces(half).ravel())


@given(any_bits, st.sampled_from([("bfp8_b", 7), ("bfp4_b", 3)]))
def test_block_floats_equal_the_scalar_rules(bits: np.ndarray, kind: tuple[str, int]) -> None:
    dtype, mantissa_bits = kind
    data = encode(bits.view(np.float32), "float32", dtype)
    codes = data[64:]
    if dtype == "bfp4_b":
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1)
    rows = to_faces(bits).reshape(64, 16).tolist()
    for index, row in enumerate(rows):
        shared, expected = scalar_block_float(row, mantissa_bits)
        assert data[index] == shared
        assert codes[16 * index : 16 * index + 16].tolist() == expected


def test_known_bytes_of_bfp8_and_bfp4() -> None:
    tile = np.zeros((32, 32), np.float32)
    tile[0, :4] = [1.0, -0.5, 2.0**-7, 1.9999]
    data = encode(tile, "float32", "bfp8_b")
    assert data[0] == 127
    assert data[1:64].tolist() == [0] * 63
    assert data[64:69].tolist() == [64, 0x80 | 32, 0, 127, 0]  # 2^-7 is half a step: to even, which is 0
    nibbles = encode(tile, "float32", "bfp4_b")
    assert nibbles[64:67].tolist() == [4 | (0x8 | 2) << 4, 0 | 7 << 4, 0]  # low nibble first


@given(finite, st.sampled_from([("bfp8_b", 7), ("bfp4_b", 3)]))
def test_block_float_error_is_below_one_step_of_its_row(values: np.ndarray, kind: tuple[str, int]) -> None:
    """Half a step from rounding, up to a whole one where the clamp holds the largest back; subnormals become 0."""
    dtype, mantissa_bits = kind
    back = decode(encode(values, "float32", dtype), dtype)
    rows, got = to_faces(values).reshape(64, 16).astype(np.float64), to_faces(back).reshape(64, 16)
    exponent = np.frexp(np.abs(rows).max(axis=1, keepdims=True))[1] - 1
    step = np.ldexp(1.0, exponent - (mantissa_bits - 1))
    assert (np.abs(rows - got) <= np.maximum(step, 2.0**-126)).all()


@given(finite, st.sampled_from(["bfp8_b", "bfp4_b"]))
def test_block_floats_are_stable(values: np.ndarray, dtype: str) -> None:
    once = decode(encode(values, "float32", dtype), dtype)
    assert np.array_equal(decode(encode(once, "float32", dtype), dtype), once)


@given(st.integers(0, 2**32 - 1))
def test_bfloat16_rounds_to_nearest_even(bits: int) -> None:
    value = np.array([bits], np.uint32).view(np.float32)
    got = int(to_bfloat16(value)[0])
    if np.isnan(value[0]):
        assert np.isnan(to_float32(np.array([got], np.uint16), "bfloat16")[0])
        return
    low, high = bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000
    below, above = bits - low, high - bits
    nearest = low if below < above else high if above < below else (low if not low & 0x10000 else high)
    assert got == nearest >> 16


def test_float16_and_bfloat16_widen_exactly() -> None:
    every = np.arange(2**16, dtype=np.uint16)
    halves = to_float32(every, "float16")
    finite_halves = np.isfinite(halves)
    assert np.array_equal(from_float32(halves, "float16")[finite_halves], every[finite_halves])
    assert halves[0x3C00] == 1.0
    assert to_float32(np.array([0x3F80], np.uint16), "bfloat16")[0] == struct.unpack("<f", b"\0\0\x80\x3f")[0]
