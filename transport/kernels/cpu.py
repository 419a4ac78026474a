"""The fast CPU kernels: gather, transpose, convert, tile and place in one pass over the bytes.

Same entry points and same bytes as `transport.kernels.reference`. The heavy part is native code
(`transport.kernels.native`) that runs without the GIL.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from transport.geometry.floats import ITEM_BYTES, SourceDtype
from transport.geometry.kv import FACE, TILE, KVGeometry
from transport.geometry.pages import PageLayout
from transport.geometry.plan import all_tensors, staging_size
from transport.geometry.units import Units, units_in_range
from transport.kernels.faces import Load
from transport.kernels.native import Variant, kernel
from transport.kernels.source import LINE, Source, address, aligned_bytes, check_linear

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


def transform_into(
    channels: Sequence[Bytes],
    bases: Sequence[int],
    geometry: KVGeometry,
    dst_blocks: Sequence[int],
    source: Source,
    src_blocks: Sequence[int],
    start: int,
    stop: int,
    tensors: Sequence[int] | None = None,
) -> int:
    """As `reference.transform_into`; also ValueError where channel memory ends before the tensors do."""
    chosen = all_tensors(geometry, tensors)
    units = units_in_range(geometry, dst_blocks, start, stop)
    return _into(_source_job(geometry, source, src_blocks, start, stop), channels, bases, geometry, units, chosen)


def transform(
    geometry: KVGeometry,
    dst_blocks: Sequence[int],
    source: Source,
    src_blocks: Sequence[int],
    start: int,
    stop: int,
    tensors: Sequence[int] | None = None,
    allocate: Callable[[int], Bytes] | None = None,
) -> Bytes:
    """As `reference.transform`, into the buffer that `allocate(num_bytes)` gives."""
    chosen = all_tensors(geometry, tensors)
    units = units_in_range(geometry, dst_blocks, start, stop)
    job = _source_job(geometry, source, src_blocks, start, stop)
    return _staged(job, geometry, units, chosen, allocate)


def to_linear(
    source: Source,
    geometry: KVGeometry,
    src_blocks: Sequence[int],
    start: int,
    stop: int,
    tensors: Sequence[int] | None = None,
    allocate: Callable[[int], Bytes] | None = None,
) -> Bytes:
    """As `reference.to_linear`, into the buffer that `allocate(num_bytes)` gives."""
    chosen = all_tensors(geometry, tensors)
    job = _source_job(geometry, source, src_blocks, start, stop)
    head_bytes = geometry.head_dim * ITEM_BYTES[source.layout.dtype]
    row_bytes = geometry.num_kv_heads * head_bytes
    tensor_bytes = job.tiles * TILE * row_bytes
    staging = (allocate or aligned_bytes)(len(chosen) * tensor_bytes)
    tile, head = np.arange(job.tiles)[:, None], np.arange(geometry.num_kv_heads)
    first = address(staging) + tile * TILE * row_bytes + head * head_bytes
    shifts = range(0, len(chosen) * tensor_bytes, tensor_bytes)
    job.copy_rows(chosen, _Targets(first, shifts=shifts, row_stride=row_bytes))
    return staging


def from_linear(
    channels: Sequence[Bytes],
    bases: Sequence[int],
    geometry: KVGeometry,
    dst_blocks: Sequence[int],
    linear: Bytes,
    dtype: SourceDtype,
    start: int,
    stop: int,
    tensors: Sequence[int] | None = None,
) -> int:
    """As `reference.from_linear`."""
    chosen = all_tensors(geometry, tensors)
    units = units_in_range(geometry, dst_blocks, start, stop)
    return _into(_linear_job(geometry, linear, dtype, start, stop, chosen), channels, bases, geometry, units, chosen)


def tile_linear(
    geometry: KVGeometry,
    dst_blocks: Sequence[int],
    linear: Bytes,
    dtype: SourceDtype,
    start: int,
    stop: int,
    tensors: Sequence[int] | None = None,
    allocate: Callable[[int], Bytes] | None = None,
) -> Bytes:
    """As `reference.tile_linear`, into the buffer that `allocate(num_bytes)` gives."""
    chosen = all_tensors(geometry, tensors)
    units = units_in_range(geometry, dst_blocks, start, stop)
    return _staged(_linear_job(geometry, linear, dtype, start, stop, chosen), geometry, units, chosen, allocate)


def prepare(geometry: KVGeometry, layout: PageLayout) -> None:
    """Compile what transforms between the two need (up to a second), so that no request waits for it."""
    for v in (False, True):
        kernel(_variant(geometry, layout, v, aligned=True))


def _into(
    job: _Job,
    channels: Sequence[Bytes],
    bases: Sequence[int],
    geometry: KVGeometry,
    units: Units,
    chosen: Sequence[int],
) -> int:
    """Run a job into channel memory → bytes written."""
    memory = _channel_addresses(channels, bases, geometry)
    first = memory[units.channels] + units.slots * units.unit_bytes
    aligned = not np.any(memory % LINE) and not any(bases[t] % LINE for t in chosen)
    targets = _Targets(first, shifts=[bases[tensor] for tensor in chosen], row_stride=_gpu_row_bytes(geometry))
    job.run(chosen, targets, aligned)
    return staging_size(units, len(chosen))


def _staged(
    job: _Job,
    geometry: KVGeometry,
    units: Units,
    chosen: Sequence[int],
    allocate: Callable[[int], Bytes] | None,
) -> Bytes:
    """Run a job into a buffer in staging order."""
    staging = (allocate or aligned_bytes)(staging_size(units, len(chosen)))
    first, step = units.staging_positions(len(chosen))
    targets = _Targets(
        address(staging) + first * units.unit_bytes,
        places=range(len(chosen)),
        steps=step * units.unit_bytes,
        row_stride=_gpu_row_bytes(geometry),
    )
    job.run(chosen, targets, aligned=True)
    return staging


def _channel_addresses(channels: Sequence[Bytes], bases: Sequence[int], geometry: KVGeometry) -> Ints:
    if len(channels) != geometry.num_channels or len(bases) != geometry.num_tensors:
        raise ValueError(
            f"{len(channels)} channels and {len(bases)} bases, the pool has "
            f"{geometry.num_channels} and {geometry.num_tensors}"
        )
    first, end = min(bases), max(bases) + geometry.bank_bytes
    for index, memory in enumerate(channels):
        flags = memory.flags
        if memory.dtype != np.uint8 or memory.ndim != 1 or not (flags.c_contiguous and flags.writeable):
            raise ValueError(f"channel {index} must be writable contiguous uint8 [n]")
        if first < 0 or memory.size < end:
            raise ValueError(f"channel {index} has {memory.size} bytes, the tensors lie in [{first}, {end})")
    return np.asarray([address(memory) for memory in channels], np.int64)


@dataclass(frozen=True)
class _Targets:
    """Where units go: unit u of the i-th tensor to `units[u] + shifts[i] + places[i]·steps[u]`; None is all zeros.

    `units`, `steps`: int64 [T, H, C] of a tiled target; [T, H], the first of 32 rows, of one whose rows are
    `row_stride` bytes apart.
    """

    units: Ints
    shifts: Sequence[int] | None = None
    places: Sequence[int] | None = None
    steps: Ints | None = None
    row_stride: int = 0


@dataclass(frozen=True)
class _Side:
    """K or V in a block, in bytes: where it starts, its rows from there on, head, row and column strides."""

    start: int
    rows: Ints
    strides: tuple[int, int, int]


@lru_cache(maxsize=64)
def _side(layout: PageLayout, v: bool) -> _Side:
    item = ITEM_BYTES[layout.dtype]
    head_stride, rows, columns = layout.offsets(v)
    # columns are equally spaced from one group of 16 to the next in every packing
    column_stride = int(columns[FACE] - columns[0]) * item // FACE
    strides = (head_stride * item, int(rows[1] - rows[0]) * item, column_stride)
    return _Side(int(rows[0]) * item, (rows - rows[0]) * item, strides)


class _Job:
    """One token range of one source, ready to run for any of its tensors.

    `starts(tensors)`: int64, the address of each tensor's first block. Token t lies in row `t % layout.block_size` of
    block `table[t // layout.block_size]`, `block_bytes` each, once `origin` is taken off all tokens.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        layout: PageLayout,
        starts: Callable[[Sequence[int]], Ints],
        table: Ints,
        block_bytes: int,
        start: int,
        stop: int,
        origin: int = 0,
    ) -> None:
        self._geometry, self._layout, self._starts = geometry, layout, starts
        self.tiles = -(-stop // TILE) - start // TILE
        token = np.arange(start, start + self.tiles * TILE, FACE)
        self._valid = np.minimum(np.maximum(stop - token, 0), FACE)
        index, self._rows = np.divmod(token - origin, layout.block_size)
        self._blocks = table[np.minimum(index, len(table) - 1)] * block_bytes
        self._sides = (_side(layout, False), _side(layout, True))

    def run(self, chosen: Sequence[int], targets: _Targets, aligned: bool) -> None:
        """Write tensors in the pool's layout."""
        geometry, layout = self._geometry, self._layout
        self._run(chosen, targets, [_variant(geometry, layout, v, aligned) for v in (False, True)])

    def copy_rows(self, chosen: Sequence[int], targets: _Targets) -> None:
        """Write tensors row-major, elements as they are."""
        layout = self._layout
        bits: Literal["float32", "bfloat16"] = "float32" if layout.dtype == "float32" else "bfloat16"
        variants = [Variant(_load(layout, v), False, bits, bits, rows=True, streaming=True) for v in (False, True)]
        self._run(chosen, targets, variants)

    def _run(self, chosen: Sequence[int], targets: _Targets, variants: Sequence[Variant]) -> None:
        """K and V of a layer in turn where one kernel does for both: they lie next to each other in memory."""
        if variants[0] == variants[1] and self._sides[0].strides == self._sides[1].strides:
            self._call(variants[0], self._sides[0], range(len(chosen)), chosen, targets)
            return
        for v, side in enumerate(self._sides):
            mine = [i for i, tensor in enumerate(chosen) if tensor % 2 == v]
            if mine:
                self._call(variants[v], side, mine, chosen, targets)

    def _call(
        self, variant: Variant, side: _Side, mine: Sequence[int], chosen: Sequence[int], targets: _Targets
    ) -> None:
        geometry = self._geometry
        zeros = [0] * len(chosen)
        shifts, places = targets.shifts or zeros, targets.places or zeros
        parts = (
            self._starts([chosen[i] for i in mine]),
            self._blocks + side.rows[self._rows],
            self._valid,
            targets.units.reshape(-1),
            (targets.units if targets.steps is None else targets.steps).reshape(-1),
            [shifts[i] for i in mine],
            [places[i] for i in mine],
        )
        memory = np.concatenate(parts, dtype=np.int64)  # one array: asking numpy for an address is slow
        starts = itertools.accumulate((8 * len(part) for part in parts[:-1]), initial=address(memory))
        kernel(variant)(
            len(mine),
            self.tiles,
            geometry.num_kv_heads,
            geometry.head_dim // TILE,
            *starts,
            *side.strides,
            geometry.head_dim,
            targets.row_stride,
        )


def _source_job(geometry: KVGeometry, source: Source, src_blocks: Sequence[int], start: int, stop: int) -> _Job:
    """Tokens [start, stop) out of the engine's pages."""
    layout = source.layout
    table = source.table(geometry, src_blocks, start, stop)
    sides = (_side(layout, False).start, _side(layout, True).start)

    def starts(tensors: Sequence[int]) -> Ints:
        return source.addresses[[t // 2 for t in tensors]] + np.asarray([sides[t % 2] for t in tensors], np.int64)

    return _Job(geometry, layout, starts, table, layout.block_elements * ITEM_BYTES[layout.dtype], start, stop)


def _linear_job(
    geometry: KVGeometry, linear: Bytes, dtype: SourceDtype, start: int, stop: int, chosen: Sequence[int]
) -> _Job:
    """Tokens [start, stop) out of `to_linear`'s buffer of these tensors: one tile row after the other is a block."""
    tensor_bytes = check_linear(geometry, linear, dtype, start, stop, len(chosen))
    layout = PageLayout(geometry.num_kv_heads, geometry.head_dim, TILE, packing="linear", dtype=dtype)
    row_bytes = geometry.num_kv_heads * geometry.head_dim * ITEM_BYTES[dtype]
    first = linear.ctypes.data
    place = {tensor: first + i * tensor_bytes for i, tensor in enumerate(chosen)}

    def starts(tensors: Sequence[int]) -> Ints:
        return np.asarray([place[tensor] for tensor in tensors], np.int64)

    table = np.arange(tensor_bytes // (TILE * row_bytes))
    return _Job(geometry, layout, starts, table, TILE * row_bytes, start, stop, origin=start)


def _gpu_row_bytes(geometry: KVGeometry) -> int:
    """Bytes from one token row to the next in layout gpu; tiles have no such rows."""
    return geometry.page_bytes // TILE**2 * geometry.head_dim if geometry.layout == "gpu" else 0


def _load(layout: PageLayout, v: bool) -> Load:
    if layout.packing == "amx":
        return "amx_v" if v else "amx_k"
    return "columns" if layout.packing == "vec" and not v else "rows"


def _variant(geometry: KVGeometry, layout: PageLayout, v: bool, aligned: bool) -> Variant:
    interleave = geometry.rope == "interleaved" and not v
    return Variant(_load(layout, v), interleave, layout.dtype, geometry.dtype, geometry.layout == "gpu", aligned)
