"""The attention kernel over tiles against dense numpy, and the bytes that an append writes."""

from __future__ import annotations

import numpy as np
import pytest
from engine_models import POISON, ArrayDevice
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.engines.cpu.attention import append, attend, exp, rotate
from decode_worker.engines.cpu.step import Pool, Work
from decode_worker.engines.cpu.tiles import KIND, decode_tile, encode_row
from transport.geometry import TILE, TILE_BYTES, KVGeometry
from transport.geometry.tiles import decode, encode

DTYPES = ("float32", "bfloat16", "bfp8_b", "bfp4_b")


def pool_of(geometry: KVGeometry, device: ArrayDevice) -> Pool:
    return Pool(
        channels=np.array([channel.ctypes.data for channel in device.channels], np.int64),
        bases=np.array(device.bases, np.int64),
        kind=KIND[geometry.dtype],
        heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        block_size=geometry.block_size,
        page_bytes=geometry.page_bytes,
        interleave=geometry.rope == "interleaved",
    )


def tile_at(geometry: KVGeometry, device: ArrayDevice, tensor: int, page: int) -> np.ndarray:
    """The page's bytes, as a view."""
    channel, offset = geometry.locate(page)
    start = device.bases[tensor] + offset
    return device.channels[channel][start : start + geometry.page_bytes]


def random_row(rng: np.random.Generator, size: int) -> np.ndarray:
    """Values over many exponents, some zero."""
    values = rng.standard_normal(size) * 2.0 ** rng.integers(-12, 12, size)
    return np.where(rng.random(size) < 0.1, 0, values).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decoded_tile_equals_the_geometry(dtype: str) -> None:
    rng = np.random.default_rng(1)
    tile = encode(random_row(rng, TILE * TILE).reshape(TILE, TILE), "float32", dtype)
    out = np.zeros((TILE, 2 * TILE), np.float32)
    decode_tile(KIND[dtype], tile.ctypes.data, out, TILE)
    np.testing.assert_array_equal(out[:, TILE:], decode(tile, dtype))
    assert not out[:, :TILE].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_written_one_by_one_make_the_tile_of_the_geometry(dtype: str) -> None:
    rng = np.random.default_rng(2)
    values = random_row(rng, TILE * TILE).reshape(TILE, TILE)
    values[3, 5] = 1e-40  # subnormal: 0 in block floats
    tile = np.full(TILE_BYTES[dtype], POISON, np.uint8)
    for token in range(TILE):
        encode_row(KIND[dtype], tile.ctypes.data, token, values[token], 0)
    np.testing.assert_array_equal(tile, encode(values, "float32", dtype))


def test_a_bfloat16_row_keeps_nan_and_infinity() -> None:
    row = np.ones(TILE, np.float32)
    row[:3] = np.nan, np.inf, -np.inf
    tile = np.zeros(TILE_BYTES["bfloat16"], np.uint8)
    encode_row(KIND["bfloat16"], tile.ctypes.data, 0, row, 0)
    out = np.zeros((TILE, TILE), np.float32)
    decode_tile(KIND["bfloat16"], tile.ctypes.data, out, 0)
    np.testing.assert_array_equal(out[0], row)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_size", "channels"), [(32, 8), (64, 7), (128, 1)])
def test_an_append_writes_its_row_and_nothing_else(dtype: str, block_size: int, channels: int) -> None:
    geometry = KVGeometry(2, 3, 64, block_size, 5, channels, dtype)
    rng = np.random.default_rng(3)
    blocks = np.array([4, 1, 3], np.int32)
    for position in (0, 15, 16, 31, 2 * block_size + 17):
        device = ArrayDevice(geometry)
        row, tensor, head = random_row(rng, geometry.head_dim), 3, 2
        expected = [channel.copy() for channel in device.channels]
        append(pool_of(geometry, device), tensor, blocks, head, position, row)
        block, token = blocks[position // block_size], position % block_size
        touched = 0
        for column in range(geometry.head_dim // TILE):
            page = geometry.page_index(int(block), head, token, column * TILE)
            written = tile_at(geometry, device, tensor, page).copy()
            whole = np.zeros((TILE, TILE), np.float32)
            whole[token % TILE] = row[column * TILE : (column + 1) * TILE]
            wanted = decode(encode(whole, "float32", dtype), dtype)
            np.testing.assert_array_equal(decode(written, dtype)[token % TILE], wanted[token % TILE])
            marks = np.zeros((TILE, TILE), np.float32)
            marks[token % TILE] = 1.1  # no zero byte in any dtype
            mask = encode(marks, "float32", dtype) != 0  # the bytes of this row, exponents included
            channel, offset = geometry.locate(page)
            target = expected[channel][device.bases[tensor] + offset :][: geometry.page_bytes]
            target[mask] = written[mask]
            touched += int(mask.sum())
        assert touched == geometry.head_dim * TILE_BYTES[dtype] // (TILE * TILE)
        for actual, wanted in zip(device.channels, expected, strict=True):
            np.testing.assert_array_equal(actual, wanted)


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    scores = (q.astype(np.float64) @ k.astype(np.float64).T) * scale
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return (weights / weights.sum(axis=1, keepdims=True)) @ v.astype(np.float64)


@settings(deadline=None, max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    heads=st.integers(1, 4),
    group=st.integers(1, 9),
    dim=st.sampled_from((32, 64, 96, 128)),
    block_size=st.sampled_from((32, 64, 128)),
    channels=st.integers(1, 9),
    tokens=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
)
def test_attention_equals_dense_attention(
    dtype: str, heads: int, group: int, dim: int, block_size: int, channels: int, tokens: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    used = -(-tokens // block_size)
    geometry = KVGeometry(2, heads, dim, block_size, used + 2, channels, dtype)
    device = ArrayDevice(geometry)
    pool, layer, head = pool_of(geometry, device), 1, int(rng.integers(heads))
    blocks = rng.permutation(geometry.num_blocks)[:used].astype(np.int32)
    k, v = rng.standard_normal((2, tokens, dim), dtype=np.float32)
    for token in range(tokens - 1):
        append(pool, 2 * layer, blocks, head, token, k[token])
        append(pool, 2 * layer + 1, blocks, head, token, v[token])
    q, out = rng.standard_normal((group, dim), dtype=np.float32), np.empty((group, dim), np.float32)
    work = Work(
        normed=np.empty((1, 1), np.float32),
        rows=np.empty((TILE, dim), np.float32),
        scores=np.empty((group, -(-tokens // TILE) * TILE), np.float32),
        totals=np.empty(group, np.float32),
        q=q,
        k=k[-1],
    )
    scale = np.float32(dim**-0.5)
    attend(pool, layer, blocks, head, tokens - 1, q, k[-1], v[-1], scale, work, out)

    def stored(values: np.ndarray) -> np.ndarray:
        """As the pool's dtype holds them."""
        padded = np.zeros((-(-tokens // TILE) * TILE, dim), np.float32)
        padded[:tokens] = values
        tiles = padded.reshape(-1, TILE, dim // TILE, TILE).swapaxes(1, 2)
        return decode(encode(tiles, "float32", dtype), dtype).swapaxes(1, 2).reshape(-1, dim)[:tokens]

    np.testing.assert_allclose(out, dense(q, stored(k), stored(v), float(scale)), rtol=2e-5, atol=2e-5)


def test_exp_is_within_two_units_in_the_last_place() -> None:
    x = np.linspace(-86.9, 0, 20011, dtype=np.float32)
    actual = np.array([exp(value) for value in x])
    expected = np.exp(x.astype(np.float64))
    assert np.max(np.abs(actual - expected) / expected) < 2.4e-7
    assert exp(np.float32(-np.inf)) < 1e-37


@pytest.mark.parametrize("interleave", [False, True])
def test_rotation_is_a_rotation_of_halves_in_the_order_of_the_pool(interleave: bool) -> None:
    x = np.arange(8, dtype=np.float32)
    angles = np.linspace(0.1, 1, 4, dtype=np.float32)
    out = np.empty(8, np.float32)
    rotate(x, 0, 8, np.cos(angles), np.sin(angles), interleave, out)
    pairs = x[:4] + 1j * x[4:]
    turned = pairs * np.exp(1j * angles)
    expected = np.concatenate([turned.real, turned.imag])
    if interleave:
        expected = np.stack([turned.real, turned.imag], axis=1).reshape(-1)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
