"""What pieces must be so that nothing is decoded from a hole, and nothing is brought twice unless it all is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.coverage import Coverage
from transport.backends.base import Piece
from transport.errors import ProtocolError


def tiled(start: int, stop: int, tensors: int, rows: int, group: int) -> list[Piece]:
    """[start, stop) in pieces of so many tile rows and tensors."""
    return [
        Piece(first, min(first + 32 * rows, stop), tensor, min(tensor + group, tensors) - 1)
        for first in range(start, stop, 32 * rows)
        for tensor in range(0, tensors, group)
    ]


shapes = st.tuples(st.integers(1, 4), st.integers(1, 5))


@given(
    start=st.integers(0, 3).map(lambda n: 32 * n),
    length=st.integers(1, 200),
    tensors=st.integers(1, 5),
    shape=shapes,
    order=st.randoms(use_true_random=False),
)
def test_pieces_that_partition_the_lease_leave_nothing_missing_in_any_order(
    start: int, length: int, tensors: int, shape: tuple[int, int], order: random.Random
) -> None:
    coverage = Coverage(start, start + length, tensors)
    pieces = tiled(start, start + length, tensors, *shape)
    order.shuffle(pieces)
    for piece in pieces:
        assert coverage.missing
        assert not coverage.add(piece)
    assert not coverage.missing


@given(length=st.integers(33, 200), tensors=st.integers(1, 5), shape=shapes, again=shapes, data=st.data())
def test_a_writer_that_begins_anew_has_to_bring_all_of_it_again(
    length: int, tensors: int, shape: tuple[int, int], again: tuple[int, int], data: st.DataObject
) -> None:
    coverage = Coverage(0, length, tensors)
    first, second = tiled(0, length, tensors, *shape), tiled(0, length, tensors, *again)
    for piece in first[: data.draw(st.integers(1, len(first)))]:
        coverage.add(piece)
    assert [coverage.add(piece) for piece in second] == [True] + [False] * (len(second) - 1)
    assert not coverage.missing


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (Piece(0, 64, 0, 3), r"may bring tokens \[32, 100\)"),
        (Piece(96, 101, 0, 3), r"may bring tokens \[32, 100\)"),
        (Piece(64, 64, 0, 3), r"may bring tokens \[32, 100\)"),
        (Piece(40, 64, 0, 3), "multiples of 32"),
        (Piece(32, 50, 0, 3), "multiples of 32"),
        (Piece(32, 64, 0, 4), r"tensors 0…3"),
        (Piece(32, 64, 2, 1), r"tensors 0…3"),
        (Piece(64, 100, 3, 3), "brought before"),
        (Piece(32, 96, 1, 3), "brought before"),
    ],
)
def test_what_cannot_be_a_piece_of_the_lease_is_refused_and_changes_nothing(piece: Piece, words: str) -> None:
    coverage = Coverage(32, 100, 4)
    coverage.add(Piece(64, 100, 1, 3))
    missing = coverage.missing
    with pytest.raises(ProtocolError, match=words):
        coverage.add(piece)
    assert coverage.missing == missing == 3 * 4 - 2 * 3


def test_a_lease_that_is_all_resident_misses_nothing() -> None:
    assert Coverage(64, 64, 4).missing == 0
