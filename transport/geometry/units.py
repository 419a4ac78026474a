"""The units of a token range in one tensor of a pool, and the order in which they are staged.

A unit is what is written whole: a 32x32 tile (layout "npu"), or 32 rows of one head (layout "gpu", where a
(block, head) page is row-major and there is one channel). Both lie at `base + slot · unit_bytes` of a channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from transport.geometry.kv import TILE, KVGeometry

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Units:
    """Units of tokens [start, stop) in one tensor: the same for every tensor of the pool.

    `channels` and `slots`: int64 [T, H, C] for token tile, head and column; read-only.
    """

    unit_bytes: int
    num_channels: int
    channels: Ints
    slots: Ints

    @property
    def size(self) -> int:
        """Units in one tensor."""
        return self.slots.size

    @cached_property
    def order(self) -> Ints:
        """Flat indices of the units by (channel, slot): the order of the staging buffer."""
        order: Ints = np.lexsort((self.slots.reshape(-1), self.channels.reshape(-1)))
        return order

    @cached_property
    def counts(self) -> Ints:
        """int64 [Nch]: units that go to each channel."""
        return np.bincount(self.channels.reshape(-1), minlength=self.num_channels)

    def staging_positions(self, num_tensors: int) -> tuple[Ints, Ints]:
        """(first, step), both int64 [T, H, C] in units: tensor i of a staging buffer has its unit at first + i·step.

        The buffer is [channel][tensor][slot ascending]: all that goes to one channel is one contiguous run.
        """
        starts = np.concatenate(([0], np.cumsum(self.counts)[:-1]))
        rank = np.empty(self.size, np.int64)
        rank[self.order] = np.arange(self.size)
        channel = self.channels.reshape(-1)
        first = starts[channel] * num_tensors + rank - starts[channel]
        shape = self.channels.shape
        return first.reshape(shape), self.counts[channel].reshape(shape)


def check_range(start: int, stop: int, covered: int) -> None:
    """Raises ValueError unless [start, stop) begins on a tile and lies within `covered` tokens."""
    if start % TILE or not 0 <= start < stop:
        raise ValueError(f"token range [{start}, {stop}) must be non-empty and start on a multiple of {TILE}")
    if stop > covered:
        raise ValueError(f"token range [{start}, {stop}) goes past the {covered} tokens of its blocks")


def units_in_range(geometry: KVGeometry, dst_blocks: Sequence[int], start: int, stop: int) -> Units:
    """Where the tiles of tokens [start, stop) of a request with block table `dst_blocks` lie.

    Raises ValueError where the range does not fit the table or a block is not in the pool.
    """
    size = geometry.block_size
    check_range(start, stop, len(dst_blocks) * size)
    used = tuple(map(int, dst_blocks[start // size : -(-stop // size)]))
    if min(used) < 0 or max(used) >= geometry.num_blocks:
        raise ValueError(f"block ids {min(used)}…{max(used)} are outside the pool's {geometry.num_blocks} blocks")
    return _units(geometry, used, start, stop)


@lru_cache(maxsize=8)
def _units(geometry: KVGeometry, used: tuple[int, ...], start: int, stop: int) -> Units:
    """Cached: a push asks for the same range once per layer. `used` are the range's blocks alone."""
    size, table = geometry.block_size, np.asarray(used, np.int64)
    columns = geometry.head_dim // TILE if geometry.layout == "npu" else 1
    rows_per_block = size // TILE
    tile = np.arange(start // TILE, -(-stop // TILE))
    block, row = table[tile // rows_per_block - start // size], tile % rows_per_block
    heads, column = np.arange(geometry.num_kv_heads), np.arange(columns)
    row_index = (block[:, None] * geometry.num_kv_heads + heads) * rows_per_block + row[:, None]
    page = row_index[:, :, None] * columns + column
    channels, slots = page % geometry.num_channels, page // geometry.num_channels
    for array in (channels, slots):
        array.flags.writeable = False
    return Units(unit_bytes(geometry), geometry.num_channels, channels, slots)


def unit_bytes(geometry: KVGeometry) -> int:
    """Bytes of one unit."""
    return geometry.page_bytes * (1 if geometry.layout == "npu" else geometry.head_dim // TILE)
