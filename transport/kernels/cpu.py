"""The fast CPU kernels: gather, transpose, convert, tile and place in one pass over the bytes.

Same entry points and same bytes as `transport.kernels.reference`. The heavy part is native code
(`transport.kernels.native`) that runs without the GIL.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from transport.geometry.floats import ITEM_BYTES, SourceDtype
from transport.geometry.kv import FACE, TILE, KVGeometry
from transport.geometry.pages import PageLayout
from transport.geometry.plan import all_tensors, staging_size
from transport.geometry.units import units_in_range
from transport.kernels.faces import LINE, Load
from transport.kernels.native import Variant, kernel
from transport.kernels.source import Source, address, linear_source

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
    job = _Job(geometry, source, src_blocks, start, stop)
    memory = _channel_addresses(channels, bases, geometry)
    first = memory[units.channels] + units.slots * units.unit_bytes
    aligned = not np.any(memory % LINE) and not any(bases[t] % LINE for t in chosen)
    job.run(chosen, first, aligned, shifts=[bases[tensor] for tensor in chosen])
    return staging_size(units, len(chosen))


def transform(
    geometry: KVGeometry,
    dst_blocks: Sequence[int],
    source: Source,
    src_blocks: Sequence[int],
    start: int,
    stop: int,
    tensors: Sequence[int] | None = None,
) -> Bytes:
    """As `reference.transform`."""
    chosen = all_tensors(geometry, tensors)
    units = units_in_range(geometry, dst_blocks, start, stop)
    job = _Job(geometry, source, src_blocks, start, stop)
    staging = aligned_bytes(staging_size(units, len(chosen)))
    first, step = units.staging_positions(len(chosen))
    places = range(len(chosen))
    job.run(chosen, address(staging) + first * units.unit_bytes, True, steps=step * units.unit_bytes, places=places)
    return staging


def to_linear(
    source: Source,
    geometry: KVGeometry,
    src_blocks: Sequence[int],
    start: int,
    stop: int,
    tensors: Sequence[int] | None = None,
) -> Bytes:
    """As `reference.to_linear`."""
    chosen = all_tensors(geometry, tensors)
    job = _Job(geometry, source, src_blocks, start, stop)
    head_bytes = geometry.head_dim * ITEM_BYTES[source.layout.dtype]
    row_bytes = geometry.num_kv_heads * head_bytes
    tensor_bytes = job.tiles * TILE * row_bytes
    staging = aligned_bytes(len(chosen) * tensor_bytes)
    tile, head = np.arange(job.tiles)[:, None], np.arange(geometry.num_kv_heads)
    first = address(staging) + tile * TILE * row_bytes + head * head_bytes
    job.copy_rows(chosen, first, [i * tensor_bytes for i in range(len(chosen))], row_bytes)
    return staging


def from_linear(
    channels: Sequence[Bytes],
    bases: Sequence[int],
    geometry: KVGeometry,
    dst_blocks: Sequence[int],
    linear: Bytes,
    dtype: SourceDtype,
    prompt_tokens: int,
    start: int = 0,
) -> int:
    """As `reference.from_linear`."""
    source = linear_source(geometry, linear, dtype, prompt_tokens)
    return transform_into(channels, bases, geometry, dst_blocks, source, [0], start, prompt_tokens)


def prepare(geometry: KVGeometry, layout: PageLayout) -> None:
    """Compile what transforms between the two need (up to a second), so that no request waits for it."""
    for v in (False, True):
        kernel(_variant(geometry, layout, v, aligned=True))


def aligned_bytes(length: int) -> Bytes:
    """Uninitialised uint8 [length] that begins on a cache line."""
    memory = np.empty(length + LINE, np.uint8)
    skip = -address(memory) % LINE
    return memory[skip : skip + length]


def _channel_addresses(channels: Sequence[Bytes], bases: Sequence[int], geometry: KVGeometry) -> Ints:
    if len(channels) != geometry.num_channels or len(bases) != geometry.num_tensors:
        raise ValueError(
            f"{len(channels)} channels and {len(bases)} bases, the pool has "
            f"{geometry.num_channels} and {geometry.num_tensors}"
        )
    first, end = min(bases), max(bases) + geometry.bank_bytes
    for index, memory in enumerate(channels):
        if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous or not memory.flags.writeable:
            raise ValueError(f"channel {index} must be writable contiguous uint8 [n]")
        if first < 0 or memory.size < end:
            raise ValueError(f"channel {index} has {memory.size} bytes, the tensors lie in [{first}, {end})")
    return np.asarray([address(memory) for memory in channels], np.int64)


class _Job:
    """One token range of one source, ready to run for any of its tensors."""

    def __init__(self, geometry: KVGeometry, source: Source, src_blocks: Sequence[int], start: int, stop: int) -> None:
        self._geometry, self._source = geometry, source
        layout = source.layout
        table = source.table(geometry, src_blocks, start, stop)
        self.tiles = -(-stop // TILE) - start // TILE
        token = start + np.arange(2 * self.tiles, dtype=np.int64) * FACE
        self._valid = np.clip(stop - token, 0, FACE)
        block = table[np.minimum(token // layout.block_size, len(table) - 1)]
        self._item = ITEM_BYTES[layout.dtype]
        self._rows = token % layout.block_size
        self._blocks = block * layout.block_elements
        self._sides = (self._side(v=False), self._side(v=True))

    def _side(self, v: bool) -> tuple[Ints, int, int, int]:
        """(byte offset of each group of 16 rows; head, row and column strides in bytes) of K or V."""
        head_stride, rows, columns = self._source.layout.offsets(v)
        # columns are equally spaced from one group of 16 to the next in every packing
        column_stride = int(columns[FACE] - columns[0]) * self._item // FACE
        groups = (self._blocks + rows[self._rows]) * self._item
        return groups, head_stride * self._item, int(rows[1] - rows[0]) * self._item, column_stride

    def run(
        self,
        chosen: Sequence[int],
        units: Ints,
        aligned: bool,
        *,
        shifts: Sequence[int] | None = None,
        steps: Ints | None = None,
        places: Sequence[int] | None = None,
    ) -> None:
        """Write tensors in the pool's layout: unit u of the i-th goes to `units[u] + shifts[i] + places[i]·steps[u]`.

        `units`, `steps`: int64 [T, H, C].
        """
        geometry = self._geometry
        stride = geometry.page_bytes // TILE**2 * geometry.head_dim if geometry.layout == "gpu" else 0
        zeros = [0] * len(chosen)
        for v in (False, True):
            variant = _variant(geometry, self._source.layout, v, aligned)
            self._call(variant, v, chosen, units, steps, shifts or zeros, places or zeros, stride)

    def copy_rows(self, chosen: Sequence[int], units: Ints, shifts: Sequence[int], row_stride: int) -> None:
        """Write tensors row-major, elements as they are: first row u of the i-th goes to `units[u] + shifts[i]`.

        `units`: int64 [T, H].
        """
        bits: Literal["float32", "bfloat16"] = "float32" if self._item == 4 else "bfloat16"
        for v in (False, True):
            variant = Variant(_load(self._source.layout, v), False, bits, bits, rows=True, streaming=True)
            self._call(variant, v, chosen, units, None, shifts, [0] * len(chosen), row_stride)

    def _call(
        self,
        variant: Variant,
        v: bool,
        chosen: Sequence[int],
        units: Ints,
        steps: Ints | None,
        shifts: Sequence[int],
        places: Sequence[int],
        target_stride: int,
    ) -> None:
        mine = [i for i, tensor in enumerate(chosen) if tensor % 2 == v]
        if not mine:
            return
        groups, head_stride, row_stride, column_stride = self._sides[v]
        layers = self._source.addresses[[chosen[i] // 2 for i in mine]]
        parts = (
            layers,
            groups,
            self._valid,
            units.reshape(-1),
            (units if steps is None else steps).reshape(-1),
            [shifts[i] for i in mine],
            [places[i] for i in mine],
        )
        memory = np.concatenate(parts, dtype=np.int64)  # one array: asking numpy for an address is slow
        starts = itertools.accumulate((8 * len(part) for part in parts[:-1]), initial=address(memory))
        kernel(variant)(
            len(mine),
            self.tiles,
            self._geometry.num_kv_heads,
            self._geometry.head_dim // TILE,
            *starts,
            head_stride,
            row_stride,
            column_stride,
            self._geometry.head_dim,
            target_stride,
        )


def _load(layout: PageLayout, v: bool) -> Load:
    if layout.packing == "amx":
        return "amx_v" if v else "amx_k"
    return "columns" if layout.packing == "vec" and not v else "rows"


def _variant(geometry: KVGeometry, layout: PageLayout, v: bool, aligned: bool) -> Variant:
    interleave = geometry.rope == "interleaved" and not v
    return Variant(_load(layout, v), interleave, layout.dtype, geometry.dtype, geometry.layout == "gpu", aligned)
