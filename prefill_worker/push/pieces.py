"""One bounded piece of a push: which tokens and tensors, and how it is written on each kv_path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from transport.backends.base import LeaseWriter
from transport.geometry import KVGeometry
from transport.geometry.kv import TILE
from transport.geometry.pages import PageLayout
from transport.geometry.plan import plan
from transport.geometry.staging import plan_contiguous, plan_linear
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


def split(geometry: KVGeometry, start: int, stop: int, limit: int) -> Iterator[Piece]:
    """Cut [start, stop) into pieces of at most `limit` bytes in the pool, or of one tile row of one tensor.

    `start` is a multiple of 32, and so is every cut. A piece takes all tensors if `limit` allows that for
    `LONG_ROWS` tile rows, else as many (K and V of a layer together where possible) as it does allow.
    """
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


def write(
    writer: LeaseWriter, pool: PoolDescription, lease: Lease, pages: Pages, blocks: Sequence[int], piece: Piece
) -> int:
    """Write one piece of the request whose block table is `blocks` → bytes written.

    Raises LeaseRevoked, PushFailed; ValueError where lease and request do not fit together.
    """
    geometry, span = pool.geometry, (piece.start, piece.stop)
    source, kernel = pages.source, pages.kernel
    if pool.kv_path == "host":
        dtype = source.layout.dtype
        staging = kernel.to_linear(source, geometry, blocks, *span, piece.tensors, writer.stage)
        runs = plan_linear(geometry, _offset(lease), lease.prompt_tokens, *span, dtype, piece.tensors)
    elif pool.kv_path == "contiguous":
        staging = kernel.transform(geometry, lease.block_ids, source, blocks, *span, piece.tensors, writer.stage)
        runs = plan_contiguous(
            geometry,
            _offset(lease),
            lease.block_ids,
            lease.prompt_tokens,
            lease.resident_tokens,
            *span,
            piece.tensors,
        )
    elif writer.mapped is not None:
        with writer.chunk():
            written = kernel.transform_into(
                writer.mapped, pool.bases, geometry, lease.block_ids, source, blocks, *span, piece.tensors
            )
            writer.count(written)
            return written
    else:
        staging = kernel.transform(geometry, lease.block_ids, source, blocks, *span, piece.tensors, writer.stage)
        runs = plan(geometry, pool.bases, lease.block_ids, *span, piece.tensors)
    writer.write(staging, runs)
    return staging.size


def _offset(lease: Lease) -> int:
    if lease.staging_offset is None:
        raise ValueError(f"lease {lease.id} has no staging offset, its pool stages")
    return lease.staging_offset
