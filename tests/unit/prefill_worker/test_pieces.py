"""Pieces cover a range exactly, in bounded steps."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefill_fakes import GEOMETRY, MemoryPool, lease_of, pages, pool_of

from prefill_worker.push.pieces import Piece, PieceWriter, split
from transport.errors import PushFailed
from transport.geometry import KVGeometry
from transport.geometry.staging import linear_bytes, linear_row_bytes
from transport.messages import Region


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


def host_pieces(slots: int, slot_bytes: int) -> PieceWriter:
    """Of a lease of 200 tokens on a pool that stages."""
    pool = pool_of(kv_path="host", staging=Region(address=0, rkey=0, length=1 << 20), staging_dtype="float32")
    lease = lease_of(200, staging_offset=0, staging_slots=slots, staging_slot_bytes=slot_bytes)
    return PieceWriter(MemoryPool(pool).open(lease), pool, lease, pages())


@given(rows=st.integers(1, 40), limit=st.integers(1, 1 << 20), stop=st.integers(1, 200))
def test_pieces_of_the_host_path_fit_into_a_slot_as_they_are_staged(rows: int, limit: int, stop: int) -> None:
    """However small the pool's dtype would make them."""
    slot = rows * linear_row_bytes(GEOMETRY, "float32")
    pieces = list(host_pieces(3, slot).split(0, stop, limit))
    tensors = range(GEOMETRY.num_tensors)
    sizes = [linear_bytes(GEOMETRY, "float32", p.start, p.stop, len(p.tensors or tensors)) for p in pieces]
    assert max(sizes) <= slot
    assert sum(sizes) == linear_bytes(GEOMETRY, "float32", 0, stop, len(tensors))


@pytest.mark.parametrize(("slots", "less"), [(0, 0), (3, 1)])
def test_slots_that_hold_no_piece_are_refused_by_name(slots: int, less: int) -> None:
    row = linear_row_bytes(GEOMETRY, "float32")
    with pytest.raises(PushFailed, match=f"{slots} staging slots of {row - less} bytes, a tile row of one tensor"):
        next(host_pieces(slots, row - less).split(0, 200, 1 << 20))
