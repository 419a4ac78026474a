"""The layout transform in plain numpy: the definition that every fast kernel must equal, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from transport.geometry.floats import SourceDtype, storage_dtype
from transport.geometry.kv import TILE, KVGeometry
from transport.geometry.plan import all_tensors, staging_size
from transport.geometry.rope import inverse, permutation
from transport.geometry.tiles import decode, encode, from_faces, to_faces
from transport.geometry.units import Units, unit_bytes, units_in_range
from transport.kernels.source import Source, check_linear

Array = npt.NDArray[np.generic]
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
    """Write tokens [start, stop) of a request straight into channel memory → bytes written.

    `channels`: uint8 [region bytes] each, `bases[t]` tensor t's byte offset in all of them. `dst_blocks` and
    `src_blocks` are the request's block tables on both sides; their block sizes may differ. `start` is a
    multiple of 32; rows past `stop` in the last tile become zeros. `tensors` (2·layer + v) defaults to all.
    Raises ValueError where a range, block or tensor does not exist.
    """
    chosen = all_tensors(geometry, tensors)
    units = units_in_range(geometry, dst_blocks, start, stop)
    for tensor in chosen:
        _store(channels, bases[tensor], units, _encoded(geometry, source, src_blocks, start, stop, tensor))
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
    """The same bytes in staging order → uint8 [n], to be written by `transport.geometry.plan.plan`.

    The buffer is [channel][tensor][slot ascending]: where pages per block divide by the channels,
    `reshape(Nch, -1, page_bytes)` is the `[Nch, -1, tile_chunk]` tensor. Which channel a page belongs to
    depends on its block, hence `dst_blocks`.
    """
    chosen = all_tensors(geometry, tensors)
    units = units_in_range(geometry, dst_blocks, start, stop)
    return _staged(units, [_encoded(geometry, source, src_blocks, start, stop, tensor) for tensor in chosen])


def to_linear(
    source: Source,
    geometry: KVGeometry,
    src_blocks: Sequence[int],
    start: int,
    stop: int,
    tensors: Sequence[int] | None = None,
) -> Bytes:
    """Tokens [start, stop), padded with zeros to whole tiles, as `[tensors, T32, H, D]` in source dtype → uint8 [n]."""
    chosen = all_tensors(geometry, tensors)
    table = source.table(geometry, src_blocks, start, stop)
    rows = [_gather(source, table, start, stop, tensor) for tensor in chosen]
    return np.stack(rows).reshape(-1).view(np.uint8)


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
    """Re-layout: a buffer that begins as `to_linear(…, start, stop, tensors)` → channels.

    Leaves what `transform_into` of the same range would have written, and returns its bytes. Raises ValueError where
    the buffer or the blocks are too short.
    """
    chosen = all_tensors(geometry, tensors)
    units = units_in_range(geometry, dst_blocks, start, stop)
    for tensor, data in zip(chosen, _encoded_linear(geometry, linear, dtype, start, stop, chosen), strict=True):
        _store(channels, bases[tensor], units, data)
    return staging_size(units, len(chosen))


def tile_linear(
    geometry: KVGeometry,
    dst_blocks: Sequence[int],
    linear: Bytes,
    dtype: SourceDtype,
    start: int,
    stop: int,
    tensors: Sequence[int] | None = None,
) -> Bytes:
    """As `from_linear`, into the buffer that `transform` would have made: for channels that cannot be addressed."""
    chosen = all_tensors(geometry, tensors)
    units = units_in_range(geometry, dst_blocks, start, stop)
    return _staged(units, _encoded_linear(geometry, linear, dtype, start, stop, chosen))


def read_kv(
    channels: Sequence[Bytes], bases: Sequence[int], geometry: KVGeometry, blocks: Sequence[int], tokens: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """K and V of the first `tokens` tokens of a block table, out of the channels → float32 [L, T, H, D] each.

    K comes back in HF's head dim order, whatever the pool's `rope`.
    """
    units = units_in_range(geometry, blocks, 0, tokens)
    where = units.slots * units.unit_bytes
    reach = np.arange(units.unit_bytes)
    out = np.empty((geometry.num_tensors, tokens, geometry.num_kv_heads, geometry.head_dim), np.float32)
    for tensor in range(geometry.num_tensors):
        data = np.empty((*units.slots.shape, units.unit_bytes), np.uint8)
        for channel, memory in enumerate(channels):
            here = units.channels == channel
            data[here] = memory[bases[tensor] + where[here][:, None] + reach]
        out[tensor] = _rows(geometry, data)[:tokens]
    k = out[0::2][..., inverse(geometry.head_dim, geometry.rope)]
    return k, out[1::2]


def _gather(source: Source, table: Ints, start: int, stop: int, tensor: int) -> Array:
    """[T32, H, D] in storage dtype: the pages of tokens [start, stop), zero rows up to a whole tile."""
    layout = source.layout
    blocks = source.layers[tensor // 2].reshape(-1, layout.block_elements)
    token = np.arange(start, stop)
    index = layout.index(bool(tensor % 2)).swapaxes(0, 1)[token % layout.block_size]
    rows = blocks[table[token // layout.block_size][:, None, None], index]
    padding = -stop % TILE
    return np.pad(rows, ((0, padding), (0, 0), (0, 0)))


def _encoded(
    geometry: KVGeometry, source: Source, src_blocks: Sequence[int], start: int, stop: int, tensor: int
) -> Bytes:
    """uint8 [units, unit_bytes] of one tensor, units in [token tile, head, column] order."""
    rows = _gather(source, source.table(geometry, src_blocks, start, stop), start, stop, tensor)
    return _tiled(geometry, rows, source.layout.dtype, tensor)


def _encoded_linear(
    geometry: KVGeometry, linear: Bytes, dtype: SourceDtype, start: int, stop: int, chosen: Sequence[int]
) -> list[Bytes]:
    """The same of each tensor of a linear buffer; what it holds past `stop` does not count."""
    length = len(chosen) * check_linear(geometry, linear, dtype, start, stop, len(chosen))
    shape = (len(chosen), -1, geometry.num_kv_heads, geometry.head_dim)
    tensors = linear[:length].view(storage_dtype(dtype)).reshape(shape).copy()
    tensors[:, stop - start :] = 0
    return [_tiled(geometry, rows, dtype, tensor) for tensor, rows in zip(chosen, tensors, strict=True)]


def _tiled(geometry: KVGeometry, rows: Array, dtype: SourceDtype, tensor: int) -> Bytes:
    """[T32, H, D] in storage dtype → uint8 [units, unit_bytes]."""
    if tensor % 2 == 0:
        rows = rows[..., permutation(geometry.head_dim, geometry.rope)]
    heads, dims = geometry.num_kv_heads, geometry.head_dim
    tiles = rows.reshape(-1, TILE, heads, dims // TILE, TILE).transpose(0, 2, 3, 1, 4)
    data = encode(tiles, dtype, geometry.dtype)
    if geometry.layout == "gpu":
        item = geometry.page_bytes // TILE**2
        elements = from_faces(data.view(f"V{item}").reshape(*tiles.shape[:3], 4, 16, 16))
        data = np.ascontiguousarray(elements.swapaxes(-3, -2)).view(np.uint8)
    return data.reshape(-1, unit_bytes(geometry))


def _store(channels: Sequence[Bytes], base: int, units: Units, data: Bytes) -> None:
    """Units of one tensor to their places."""
    targets = zip(units.channels.reshape(-1).tolist(), units.slots.reshape(-1).tolist(), strict=True)
    for (channel, slot), unit in zip(targets, data, strict=True):
        offset = base + slot * units.unit_bytes
        channels[channel][offset : offset + units.unit_bytes] = unit


def _staged(units: Units, tensors: Sequence[Bytes]) -> Bytes:
    """Units of several tensors in staging order → uint8 [n]."""
    staging = np.empty((units.size * len(tensors), units.unit_bytes), np.uint8)
    first, step = units.staging_positions(len(tensors))
    for i, data in enumerate(tensors):
        staging[(first + i * step).reshape(-1)] = data
    return staging.reshape(-1)


def _rows(geometry: KVGeometry, data: Bytes) -> npt.NDArray[np.float32]:
    """Undo `_encoded`: uint8 [T, H, C, unit_bytes] → float32 [T·32, H, D] in the pool's head dim order."""
    tiles, heads, dims = len(data), geometry.num_kv_heads, geometry.head_dim
    if geometry.layout == "gpu":
        item = geometry.page_bytes // TILE**2
        elements = data.view(f"V{item}").reshape(tiles, heads, TILE, dims // TILE, TILE).swapaxes(-3, -2)
        data = np.ascontiguousarray(to_faces(elements)).view(np.uint8)
    values = decode(data.reshape(tiles, heads, dims // TILE, geometry.page_bytes), geometry.dtype)
    return values.transpose(0, 3, 1, 2, 4).reshape(tiles * TILE, heads, dims)
