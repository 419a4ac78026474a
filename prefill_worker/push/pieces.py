"""One bounded piece of a push: which tokens and tensors, and how it is written on each kv_path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from transport import checksum
from transport.backends.base import LeaseWriter, Run
from transport.backends.base import Piece as Announcement
from transport.errors import PushFailed
from transport.geometry import KVGeometry
from transport.geometry.kv import TILE
from transport.geometry.pages import PageLayout
from transport.geometry.plan import plan
from transport.geometry.staging import linear_row_bytes, plan_contiguous
from transport.kernels.source import Source
from transport.messages import Lease, PoolDescription


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, stop) of the request; `tensors` None for all of them."""

    start: int
    stop: int
    tensors: range | None = None


LONG_ROWS = 8
"""Tile rows of one tensor that a kernel call takes in a row where the range has them: with fewer, each tensor's pages
are left again before the memory streams."""


def split(geometry: KVGeometry, start: int, stop: int, limit: int, tile_row: int | None = None) -> Iterator[Piece]:
    """Cut [start, stop) into pieces of at most `limit` bytes, or of one tile row of one tensor.

    `tile_row`: bytes of a tile row of one tensor; those that it has in the pool unless given. `start` is a multiple
    of 32, and so is every cut. A piece takes all tensors if `limit` allows that for `LONG_ROWS` tile rows, else as
    many (K and V of a layer together where possible) as it does allow.
    """
    if tile_row is None:
        tile_row = geometry.num_kv_heads * (geometry.head_dim // TILE) * geometry.page_bytes
    long = min(LONG_ROWS, max(1, -(-(stop - start) // TILE)))
    rows = max(limit // (tile_row * geometry.num_tensors), min(long, max(1, limit // tile_row)))
    group = min(geometry.num_tensors, max(1, limit // (tile_row * rows)))
    group -= group % 2 if group > 1 else 0
    for first in range(start, stop, rows * TILE):
        last = min(first + rows * TILE, stop)
        if group == geometry.num_tensors:
            yield Piece(first, last)
            continue
        for tensor in range(0, geometry.num_tensors, group):
            yield Piece(first, last, range(tensor, min(tensor + group, geometry.num_tensors)))


class Kernel(Protocol):
    """The module of `transport.kernels` that reads where the engine's pages are; see `cpu` for its functions."""

    def prepare(self, geometry: KVGeometry, layout: PageLayout) -> None: ...

    def transform_into(
        self,
        channels: Sequence[np.ndarray],
        bases: Sequence[int],
        geometry: KVGeometry,
        dst_blocks: Sequence[int],
        source: Source,
        src_blocks: Sequence[int],
        start: int,
        stop: int,
        tensors: Sequence[int] | None = None,
    ) -> int: ...

    def transform(
        self,
        geometry: KVGeometry,
        dst_blocks: Sequence[int],
        source: Source,
        src_blocks: Sequence[int],
        start: int,
        stop: int,
        tensors: Sequence[int] | None = None,
        allocate: Callable[[int], np.ndarray] | None = None,
    ) -> np.ndarray: ...

    def to_linear(
        self,
        source: Source,
        geometry: KVGeometry,
        src_blocks: Sequence[int],
        start: int,
        stop: int,
        tensors: Sequence[int] | None = None,
        allocate: Callable[[int], np.ndarray] | None = None,
    ) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class Pages:
    """The engine's KV pages and the kernel that reads them."""

    source: Source
    kernel: Kernel


class PieceWriter:
    """Writes the pieces of one lease, by the pool's kv_path; one thread at a time.

    Raises LeaseRevoked, PushFailed; ValueError where lease and request do not fit together.
    """

    def __init__(self, writer: LeaseWriter, pool: PoolDescription, lease: Lease, pages: Pages) -> None:
        self._writer, self._pool, self._lease, self._pages = writer, pool, lease, pages
        self._announced = 0

    def split(self, start: int, stop: int, limit: int) -> Iterator[Piece]:
        """As the function `split`; with kv_path host a piece is counted, and fits into a slot, as it is staged."""
        if self._pool.kv_path != "host":
            return split(self._pool.geometry, start, stop, limit)
        tile_row = linear_row_bytes(self._pool.geometry, self._pages.source.layout.dtype)
        slot = self._lease.staging_slot_bytes
        if self._lease.staging_slots < 1 or slot < tile_row:
            raise PushFailed(
                f"lease {self._lease.id} has {self._lease.staging_slots} staging slots of {slot} bytes, a tile row "
                f"of one tensor needs {tile_row}"
            )
        return split(self._pool.geometry, start, stop, min(limit, slot), tile_row)

    def wait_for_room(self, timeout_s: float) -> None:
        """Until the slot of the next piece is free. Reads no page."""
        before = self._announced - self._lease.staging_slots + 1
        if self._pool.kv_path == "host" and before > 0:
            self._writer.wait_drained(before, timeout_s)

    def write(self, blocks: Sequence[int], piece: Piece) -> int:
        """Write one piece of the request whose block table is `blocks` → bytes written. There must be room for it."""
        writer, pool, pages = self._writer, self._pool, self._pages
        if pool.kv_path == "hawk" and writer.mapped is not None and not pool.checksum:
            target = (writer.mapped, pool.bases, pool.geometry, self._lease.block_ids)
            with writer.chunk():
                written = pages.kernel.transform_into(
                    *target, pages.source, blocks, piece.start, piece.stop, piece.tensors
                )
                writer.count(written)
            return written
        staging, runs = self._staged(blocks, piece)
        size = staging.size
        digests = (
            checksum.sent(staging, runs, len(pool.channels) if pool.staging is None else 1) if pool.checksum else ()
        )
        writer.write(staging, runs)
        if pool.kv_path == "host" or pool.checksum:
            tensors = piece.tensors or range(pool.geometry.num_tensors)
            writer.announce(Announcement(piece.start, piece.stop, tensors[0], tensors[-1], digests))
            self._announced += 1
        return size

    def _staged(self, blocks: Sequence[int], piece: Piece) -> tuple[np.ndarray, list[Run]]:
        """The piece in a buffer, and where the buffer's bytes go."""
        geometry, lease, stage = self._pool.geometry, self._lease, self._writer.stage
        source, kernel = self._pages.source, self._pages.kernel
        what = (piece.start, piece.stop, piece.tensors)
        if self._pool.kv_path == "host":
            staging = kernel.to_linear(source, geometry, blocks, *what, stage)
            slot = self._announced % lease.staging_slots
            return staging, [Run(0, 0, self._offset + slot * lease.staging_slot_bytes, staging.size)]
        staging = kernel.transform(geometry, lease.block_ids, source, blocks, *what, stage)
        if self._pool.kv_path == "hawk":
            return staging, plan(geometry, self._pool.bases, lease.block_ids, *what)
        span = (lease.prompt_tokens, lease.resident_tokens)
        return staging, plan_contiguous(geometry, self._offset, lease.block_ids, *span, *what)

    @property
    def _offset(self) -> int:
        if self._lease.staging_offset is None:
            raise ValueError(f"lease {self._lease.id} has no staging offset, its pool stages")
        return self._lease.staging_offset
