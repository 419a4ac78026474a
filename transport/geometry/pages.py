"""GPU-side KV pages as vLLM keeps them, and where each element lies in a page.

Logically one layer is `[num_blocks, H, N, 2D]`, K then V along the last axis. CUDA backends keep that, in
LBHNC or LBNHC order. The CPU backend's (block, head) page is N·D elements of K, then N·D of V, packed by ISA:
`vec` K [D, N], V [N, D]; `amx` K [N/16, D/2, 16, 2], V [D/16, N/2, 16, 2]. `linear` is no page of vLLM's but
how rows lie in a staging slot of kv_path host: K [N, H, D], then V [N, H, D].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from transport.geometry.floats import ITEM_BYTES, SourceDtype, storage_dtype

PageOrder = Literal["LBHNC", "LBNHC"]
Packing = Literal["plain", "vec", "amx", "linear"]

Array = npt.NDArray[np.generic]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PageLayout:
    """How one layer's pages lie in memory. `block_size` is a multiple of 16 (`amx`: of 32), `head_dim` of 32.

    `order` tells plain layouts apart and is LBHNC for the others. Raises ValueError on a combination that
    does not exist.
    """

    num_kv_heads: int
    head_dim: int
    block_size: int
    order: PageOrder = "LBHNC"
    packing: Packing = "plain"
    dtype: SourceDtype = "bfloat16"

    def __post_init__(self) -> None:
        if self.num_kv_heads <= 0:
            raise ValueError(f"num_kv_heads must be positive, got {self.num_kv_heads}")
        for name, unit in (("head_dim", 32), ("block_size", 16)):
            value = getattr(self, name)
            if value <= 0 or value % unit:
                raise ValueError(f"{name} must be a positive multiple of {unit}, got {value}")
        if self.order not in ("LBHNC", "LBNHC") or self.packing not in ("plain", "vec", "amx", "linear"):
            raise ValueError(f"unknown page layout {self.order}/{self.packing}")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"unknown source dtype {self.dtype!r}")
        if self.packing != "plain" and self.order != "LBHNC":
            raise ValueError(f"packing {self.packing} exists in LBHNC order only, got {self.order}")
        if self.packing == "amx" and self.dtype != "bfloat16":
            raise ValueError(f"packing amx holds bfloat16 only, got {self.dtype}")
        if self.packing == "amx" and self.block_size % 32:
            raise ValueError(f"packing amx needs block sizes that are multiples of 32, got {self.block_size}")

    @property
    def block_elements(self) -> int:
        """Elements of one block: K and V of all heads."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim

    def shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        """Shape of one layer's array in physical order."""
        if self.order == "LBNHC":
            return (num_blocks, self.block_size, self.num_kv_heads, 2 * self.head_dim)
        return (num_blocks, self.num_kv_heads, self.block_size, 2 * self.head_dim)

    def offsets(self, v: bool) -> tuple[int, Ints, Ints]:
        """(head stride, row offsets [N], column offsets [D]), in elements; read-only arrays.

        Element (head, row n, dim d) of K (or V) of a block lies at
        `head * stride + rows[n] + columns[d]` from the block's start: every layout here is separable.
        """
        return _offsets(self, v)

    def index(self, v: bool) -> Ints:
        """int64 [H, N, D]: element offsets of K (or V) within a block."""
        stride, rows, columns = self.offsets(v)
        heads = np.arange(self.num_kv_heads, dtype=np.int64) * stride
        return heads[:, None, None] + rows[None, :, None] + columns[None, None, :]


@lru_cache(maxsize=64)
def _offsets(layout: PageLayout, v: bool) -> tuple[int, Ints, Ints]:
    size, dims, heads = layout.block_size, layout.head_dim, layout.num_kv_heads
    n, d = np.arange(size, dtype=np.int64), np.arange(dims, dtype=np.int64)
    page = 2 * size * dims
    if layout.packing == "plain":
        stride, step = (2 * dims, 2 * dims * heads) if layout.order == "LBNHC" else (page, 2 * dims)
        rows, columns = n * step + (dims if v else 0), d
    elif layout.packing == "linear":
        stride, rows, columns = dims, n * (heads * dims) + (size * heads * dims if v else 0), d
    elif layout.packing == "vec":
        stride = page
        rows, columns = (n * dims + size * dims, d) if v else (n, d * size)
    elif v:
        stride, rows = page, n // 2 * 32 + n % 2 + size * dims
        columns = d // 16 * (16 * size) + d % 16 * 2
    else:
        stride, rows, columns = page, n // 16 * (16 * dims) + n % 16 * 2, d // 2 * 32 + d % 2
    for array in (rows, columns):
        array.flags.writeable = False
    return stride, rows, columns


def unpack_pages(pages: Array, layout: PageLayout) -> tuple[Array, Array]:
    """One layer's pages (C-contiguous, B first) → (k, v), each [B, H, N, D] copies in storage dtype."""
    if pages.dtype != storage_dtype(layout.dtype):
        raise ValueError(f"pages hold {pages.dtype}, the layout says {layout.dtype}")
    blocks = pages.reshape(-1, layout.block_elements)
    return blocks[:, layout.index(False)], blocks[:, layout.index(True)]


def pack_pages(k: Array, v: Array, layout: PageLayout) -> Array:
    """(k, v), each [B, H, N, D] in storage dtype → one layer's pages in physical order."""
    expected = (layout.num_kv_heads, layout.block_size, layout.head_dim)
    for name, values in (("k", k), ("v", v)):
        if values.shape[1:] != expected or values.dtype != storage_dtype(layout.dtype):
            raise ValueError(f"{name} is {values.dtype}{values.shape}, expected [B, {expected}] of {layout.dtype}")
    pages = np.empty((len(k), layout.block_elements), storage_dtype(layout.dtype))
    pages[:, layout.index(False)] = k
    pages[:, layout.index(True)] = v
    return pages.reshape(layout.shape(len(k)))
