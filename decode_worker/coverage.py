"""Which tokens of which tensors a lease's announced pieces have brought: never decode from a hole."""

from __future__ import annotations

import numpy as np

from transport.backends.base import Piece
from transport.errors import ProtocolError
from transport.geometry.kv import TILE


class Coverage:
    """Tokens [start, stop) of `num_tensors` tensors, by tile row; `start` is a multiple of 32.

    Every tile row is brought once. A writer whose engine took its pages back begins anew, in whatever steps: it comes
    to the first tile row of the first tensor again, and from there on all that it brought before does not count.
    """

    def __init__(self, start: int, stop: int, num_tensors: int) -> None:
        self._start, self._stop, self._num_tensors = start, stop, num_tensors
        self._have = np.zeros((-(-stop // TILE) - start // TILE, num_tensors), bool)
        self.total = self.missing = self._have.size
        """Tile rows over all tensors, and those that have not been brought."""

    def add(self, piece: Piece) -> bool:
        """Count a piece; True if its writer has begun anew. Raises ProtocolError if it cannot be one of this lease."""
        if not (self._start <= piece.start < piece.stop <= self._stop):
            raise ProtocolError(f"the writer may bring tokens [{self._start}, {self._stop})")
        if piece.start % TILE or (piece.stop % TILE and piece.stop != self._stop):
            raise ProtocolError(f"a piece begins and ends on multiples of {TILE} tokens, or at the prompt's end")
        if not 0 <= piece.first_tensor <= piece.last_tensor < self._num_tensors:
            raise ProtocolError(f"the pool has tensors 0…{self._num_tensors - 1}")
        first = (piece.start - self._start) // TILE
        rows = slice(first, first - (piece.start - piece.stop) // TILE)
        part = self._have[rows, piece.first_tensor : piece.last_tensor + 1]
        again = bool(part.any())
        if again:
            if piece.start != self._start or piece.first_tensor:
                raise ProtocolError("some of it was brought before")
            self._have[:] = False
            self.missing = self.total
        part[:] = True
        self.missing -= part.size
        return again
