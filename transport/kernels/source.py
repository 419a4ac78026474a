"""What the kernels read: vLLM's KV pages of every layer, and the checks that keep them inside it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from transport.geometry.floats import ITEM_BYTES, SourceDtype, storage_dtype
from transport.geometry.kv import TILE, KVGeometry
from transport.geometry.pages import PageLayout
from transport.geometry.units import check_range

LINE = 64
"""Bytes of a cache line."""


@dataclass(frozen=True)
class Source:
    """`layers[l]`: layer l's pages, C-contiguous, physical order, B first, in storage dtype of `layout`."""

    layers: Sequence[npt.NDArray[np.generic]]
    layout: PageLayout

    def __post_init__(self) -> None:
        for index, pages in enumerate(self.layers):
            if pages.dtype != storage_dtype(self.layout.dtype) or not pages.flags.c_contiguous:
                raise ValueError(f"layer {index}: {pages.dtype} pages, expected C-contiguous {self.layout.dtype}")
            if pages.size % self.layout.block_elements:
                raise ValueError(f"layer {index}: {pages.shape} is no whole number of blocks")

    @cached_property
    def num_blocks(self) -> int:
        """Blocks that every layer has."""
        return min(pages.size for pages in self.layers) // self.layout.block_elements

    @cached_property
    def addresses(self) -> npt.NDArray[np.int64]:
        """int64 [L]: address of each layer's first byte."""
        return np.asarray([pages.ctypes.data for pages in self.layers], np.int64)

    def table(self, geometry: KVGeometry, src_blocks: Sequence[int], start: int, stop: int) -> npt.NDArray[np.int64]:
        """The block table as int64 [n], once it is known to cover [start, stop) with blocks that exist.

        Raises ValueError where it does not, or where heads, head dim or layers differ from the pool's.
        """
        ours = (len(self.layers), self.layout.num_kv_heads, self.layout.head_dim)
        theirs = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim)
        if ours != theirs:
            raise ValueError(f"source has (layers, KV heads, head dim) {ours}, the pool {theirs}")
        size = self.layout.block_size
        check_range(start, stop, len(src_blocks) * size)
        used = np.asarray(src_blocks, np.int64)[start // size : -(-stop // size)]
        if used.min() < 0 or used.max() >= self.num_blocks:
            raise ValueError(
                f"source block ids {used.min()}…{used.max()} are outside the {self.num_blocks} blocks there are"
            )
        return np.asarray(src_blocks, np.int64)


def address(array: npt.NDArray[np.generic]) -> int:
    """Address of a writable, contiguous, non-empty array's first byte; several times faster than `array.ctypes`."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))


def aligned_bytes(length: int) -> npt.NDArray[np.uint8]:
    """Uninitialised uint8 [length] that begins on a cache line."""
    memory = np.empty(length + LINE, np.uint8)
    skip = -address(memory) % LINE
    return memory[skip : skip + length]


def check_linear(
    geometry: KVGeometry, linear: npt.NDArray[np.uint8], dtype: SourceDtype, start: int, stop: int, num_tensors: int
) -> int:
    """Bytes of one tensor in `to_linear`'s buffer of tokens [start, stop).

    Raises ValueError where `linear` (uint8) is too short for so many tensors, or not contiguous.
    """
    rows = -(-stop // TILE) * TILE - start
    tensor_bytes = rows * geometry.num_kv_heads * geometry.head_dim * ITEM_BYTES[dtype]
    if linear.dtype != np.uint8 or linear.ndim != 1 or not linear.flags.c_contiguous:
        raise ValueError("linear staging must be contiguous uint8 [n]")
    if linear.size < num_tensors * tensor_bytes:
        raise ValueError(
            f"linear staging has {linear.size} bytes, {num_tensors} tensors of {rows} rows need "
            f"{num_tensors * tensor_bytes}"
        )
    return tensor_bytes
