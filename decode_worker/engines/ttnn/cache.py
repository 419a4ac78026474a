"""K and V of one layer, read from and written to a device's banks tile by tile, on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from decode_worker.npu.base import NpuDevice
from transport.geometry import KVGeometry
from transport.geometry.kv import TILE
from transport.geometry.tiles import decode, encode

Floats = npt.NDArray[np.float32]


class DeviceCache:
    """The KV tensors of one chip. `bases[t]` is the address of tensor t (2·layer: K, 2·layer + 1: V) in every bank."""

    def __init__(self, device: NpuDevice, geometry: KVGeometry, bases: Sequence[int]) -> None:
        self._device, self._geometry, self._bases = device, geometry, bases

    def read(self, tensor: int, blocks: Sequence[int]) -> Floats:
        """The blocks one behind the other, float32 [kv_heads, len(blocks)·block_size, head_dim]."""
        kv = self._geometry
        pages = np.empty((len(blocks) * kv.pages_per_block, kv.page_bytes), np.uint8)
        for at, first, count in _runs(blocks):
            start, stop = first * kv.pages_per_block, (first + count) * kv.pages_per_block
            out = pages[at * kv.pages_per_block :][: stop - start]
            for bank in range(kv.num_channels):
                page = start + (bank - start) % kv.num_channels
                if page < stop:
                    share = out[page - start :: kv.num_channels]
                    share[...] = self._pages(tensor, page, len(share))
        rows, columns = kv.block_size // TILE, kv.head_dim // TILE
        tiles = decode(pages, kv.dtype).reshape(len(blocks), kv.num_kv_heads, rows, columns, TILE, TILE)
        return np.ascontiguousarray(tiles.transpose(1, 0, 2, 4, 3, 5)).reshape(kv.num_kv_heads, -1, kv.head_dim)

    def store(self, tensor: int, block: int, token: int, values: Floats) -> None:
        """Put [kv_heads, head_dim] at position `token` of a block; the tiles' other rows keep their values."""
        kv = self._geometry
        for head in range(kv.num_kv_heads):
            for column in range(0, kv.head_dim, TILE):
                page = kv.page_index(block, head, token, column)
                tile = decode(self._pages(tensor, page, 1), kv.dtype)
                tile[0, token % TILE] = values[head, column : column + TILE]
                bank, offset = kv.locate(page)
                self._device.write(bank, self._bases[tensor] + offset, encode(tile, "float32", kv.dtype))

    def _pages(self, tensor: int, page: int, count: int) -> npt.NDArray[np.uint8]:
        """`count` pages of one bank, from `page` on, [count, page_bytes]."""
        bank, offset = self._geometry.locate(page)
        size = self._geometry.page_bytes
        return self._device.read(bank, self._bases[tensor] + offset, count * size).reshape(count, size)


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(index, first block, count) of each run of adjacent blocks."""
    start = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield start, blocks[start], index - start
            start = index
