"""Where a KV element lies in NPU memory: tiles, pages and channels of one decode worker's pool.

One tensor per (layer, K or V), logically `[num_blocks, num_kv_heads, block_size, head_dim]`, cut into
32x32 tiles ("pages"), dealt round-robin over the DRAM channels, as ttnn's interleaved DRAM buffers are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TILE = 32
FACE = 16

KVDtype = Literal["float32", "bfloat16", "bfp8_b", "bfp4_b"]
RopeOrder = Literal["half", "interleaved"]

#: bytes of one 32x32 tile; block floats carry one exponent byte per 16 elements
TILE_BYTES: dict[KVDtype, int] = {"float32": 4096, "bfloat16": 2048, "bfp8_b": 1088, "bfp4_b": 576}


@dataclass(frozen=True)
class KVGeometry:
    """Shape of one pool. `block_size` and `head_dim` are multiples of 32; any channel count.

    `rope`: order of K's head dim. "half" is HF's and vLLM's (rotate halves); "interleaved" is Meta's, with
    out[2i] = in[i], out[2i+1] = in[i + D/2]. `layout` "npu" is the tiled one; "gpu" keeps each
    (block, head) page row-major [block_size, head_dim] in one contiguous region (one channel), for the
    GPU → GPU baselines.

    Raises ValueError where a size is not positive or not a multiple of the tile, or where layout "gpu" has
    several channels or a block float.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    num_channels: int
    dtype: KVDtype = "bfloat16"
    rope: RopeOrder = "half"
    layout: Literal["npu", "gpu"] = "npu"

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "num_blocks", "num_channels"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("head_dim", "block_size"):
            if getattr(self, name) % TILE:
                raise ValueError(f"{name} must be a multiple of {TILE}, got {getattr(self, name)}")
        if self.layout == "gpu" and (self.num_channels != 1 or self.dtype not in ("float32", "bfloat16")):
            raise ValueError(f"layout gpu has one channel and plain floats, got {self.num_channels}, {self.dtype}")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page (one tile)."""
        return TILE_BYTES[self.dtype]

    @property
    def pages_per_block(self) -> int:
        """Pages of one block in one tensor: H · (BS/32) · (D/32)."""
        return self.num_kv_heads * (self.block_size // TILE) * (self.head_dim // TILE)

    @property
    def num_tensors(self) -> int:
        """Tensors of the pool; tensor 2·layer is K, 2·layer + 1 is V."""
        return 2 * self.num_layers

    @property
    def num_pages(self) -> int:
        """Pages of one tensor."""
        return self.num_blocks * self.pages_per_block

    @property
    def bank_bytes(self) -> int:
        """Bytes one tensor takes in every channel: ceil(NP / Nch) · PS, the same in each (lockstep)."""
        return -(-self.num_pages // self.num_channels) * self.page_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all tensors and channels."""
        return self.num_tensors * self.pages_per_block * self.page_bytes

    def page_index(self, block: int, head: int, token: int, dim: int) -> int:
        """Page of element (block, head, token in block, dim): ((b·H + h)·(BS/32) + s//32)·(D/32) + d//32."""
        rows, cols = self.block_size // TILE, self.head_dim // TILE
        return ((block * self.num_kv_heads + head) * rows + token // TILE) * cols + dim // TILE

    def locate(self, page: int) -> tuple[int, int]:
        """(channel, byte offset from the tensor's base) of a page."""
        return page % self.num_channels, page // self.num_channels * self.page_bytes
