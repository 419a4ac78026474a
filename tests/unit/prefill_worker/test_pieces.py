"""Pieces cover a range exactly, in bounded steps."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from prefill_worker.push.pieces import Piece, split
from transport.geometry import KVGeometry


@given(
    layers=st.integers(1, 5),
    heads=st.integers(1, 4),
    start=st.integers(0, 20),
    length=st.integers(0, 700),
    limit=st.integers(1, 1 << 20),
)
def test_pieces_cover_every_tile_of_every_tensor_once(
    layers: int, heads: int, start: int, length: int, limit: int
) -> None:
    geometry = KVGeometry(layers, heads, 64, block_size=32, num_blocks=64, num_channels=3, dtype="bfloat16")
    first, stop = start * 32, start * 32 + length
    tile_bytes = heads * 2 * geometry.page_bytes
    seen: Counter[tuple[int, int]] = Counter()
    for piece in split(geometry, first, stop, limit):
        tensors = piece.tensors or range(geometry.num_tensors)
        tiles = range(piece.start // 32, -(-piece.stop // 32))
        assert piece.start % 32 == 0
        assert piece.stop % 32 == 0 or piece.stop == stop
        assert len(tiles) * len(tensors) * tile_bytes <= max(limit, tile_bytes)
        seen.update((tile, tensor) for tile in tiles for tensor in tensors)
    expected = {(tile, t) for tile in range(start, -(-stop // 32)) for t in range(geometry.num_tensors)}
    assert seen == Counter(expected if length else ())


def test_pieces_of_a_big_model_are_long_rather_than_wide() -> None:
    """One rank of Llama 3.1 70B at TP4: 160 tensors of 16 KiB a tile row, so 4 MiB is 8 rows of 32 tensors."""
    geometry = KVGeometry(80, 2, 128, block_size=32, num_blocks=64, num_channels=8, dtype="bfloat16")
    pieces = list(split(geometry, 0, 512, 4 * 1024 * 1024))
    assert pieces[:2] == [Piece(0, 256, range(0, 32)), Piece(0, 256, range(32, 64))]
    assert len(pieces) == 10
    short = list(split(geometry, 0, 40, 4 * 1024 * 1024))
    assert short == [Piece(0, 40, range(0, 128)), Piece(0, 40, range(128, 160))]
