"""Hypothesis strategies: a pool, a source and a request's block tables, in every combination that exists."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from transport.geometry import KVGeometry
from transport.geometry.floats import from_float32, storage_dtype, to_float32
from transport.geometry.pages import PageLayout, pack_pages
from transport.kernels.source import Source

POISON = 0xA5
LAYOUTS = [
    ("LBHNC", "plain", "float32"),
    ("LBHNC", "plain", "bfloat16"),
    ("LBHNC", "plain", "float16"),
    ("LBNHC", "plain", "float32"),
    ("LBNHC", "plain", "bfloat16"),
    ("LBHNC", "vec", "float32"),
    ("LBHNC", "vec", "bfloat16"),
    ("LBHNC", "vec", "float16"),
    ("LBHNC", "amx", "bfloat16"),
]


@dataclass
class Case:
    """One request between a source and a pool. `k`, `v`: [L, T, H, D] in storage dtype, HF order."""

    geometry: KVGeometry
    source: Source
    src_blocks: list[int]
    dst_blocks: list[int]
    bases: list[int]
    region_bytes: int
    tokens: int
    k: np.ndarray
    v: np.ndarray

    def poisoned(self) -> list[np.ndarray]:
        """Channel memory that nobody has written."""
        return [poison(self.region_bytes) for _ in range(self.geometry.num_channels)]

    def arguments(self, start: int, stop: int) -> tuple[Any, ...]:
        return (self.geometry, self.dst_blocks, self.source, self.src_blocks, start, stop)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """What was prefilled, as float32 [L, T, H, D]."""
        dtype = self.source.layout.dtype
        return to_float32(self.k, dtype), to_float32(self.v, dtype)


def poison(length: int) -> np.ndarray:
    """uint8 [length] on a page boundary, as mapped device memory is, filled with poison."""
    memory = np.empty(length + 4096, np.uint8)
    skip = -memory.ctypes.data % 4096
    memory = memory[skip : skip + length]
    memory[:] = POISON
    return memory


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Values over a wide range of exponents, zeros and subnormals included; finite."""
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-12, 12, (*shape[:-1], 1)))
    values[rng.random(shape) < 0.05] = 0.0
    values[rng.random(shape) < 0.02] = 1e-40
    return from_float32(values.astype(np.float32), dtype)  # type: ignore[arg-type]


def build(
    geometry: KVGeometry, layout: PageLayout, tokens: int, *, seed: int = 0, gap: int = 0, adjacent: bool = False
) -> Case:
    """A case with random KV; blocks outside the request and rows past its end hold other random values."""
    rng = np.random.default_rng(seed)
    src_count = -(-tokens // layout.block_size)
    dst_count = -(-tokens // geometry.block_size)
    src_blocks = rng.permutation(src_count + 2)[:src_count].tolist()
    first = int(rng.integers(0, geometry.num_blocks - dst_count + 1))
    dst_blocks = list(range(first, first + dst_count))
    if not adjacent:
        dst_blocks = rng.permutation(geometry.num_blocks)[:dst_count].tolist()
    shape = (src_count + 2, geometry.num_kv_heads, layout.block_size, geometry.head_dim)
    pages = [[random_bits(rng, shape, layout.dtype) for _ in range(2)] for _ in range(geometry.num_layers)]
    flat = [
        np.stack([layer[side][src_blocks].swapaxes(1, 2).reshape(-1, *shape[1::2])[:tokens] for layer in pages])
        for side in (0, 1)
    ]
    assert flat[0].dtype == storage_dtype(layout.dtype)
    step = geometry.bank_bytes + gap
    bases = [gap + i * step for i in range(geometry.num_tensors)]
    return Case(
        geometry=geometry,
        source=Source([pack_pages(k, v, layout) for k, v in pages], layout),
        src_blocks=src_blocks,
        dst_blocks=dst_blocks,
        bases=bases,
        region_bytes=geometry.num_tensors * step + gap + 64,
        tokens=tokens,
        k=flat[0],
        v=flat[1],
    )


@st.composite
def cases(draw: st.DrawFn, *, layouts: tuple[str, ...] = ("npu", "gpu"), adjacent: bool = False) -> Case:
    layout = draw(st.sampled_from(layouts))
    heads = draw(st.integers(1, 4))
    head_dim = draw(st.sampled_from([32, 64, 96, 128]))
    block_size = draw(st.sampled_from([32, 64, 128]))
    order, packing, dtype = draw(st.sampled_from(LAYOUTS))
    src_block_size = draw(st.sampled_from([32, 64, 128] if packing == "amx" else [16, 32, 64, 128]))
    tokens = draw(st.one_of(st.integers(1, 300), st.sampled_from([31, 32, 33, 127, 128, 129, 256])))
    geometry = KVGeometry(
        num_layers=draw(st.integers(1, 2)),
        num_kv_heads=heads,
        head_dim=head_dim,
        block_size=block_size,
        num_blocks=-(-tokens // block_size) + draw(st.integers(0, 3)),
        num_channels=draw(st.integers(1, 17)) if layout == "npu" else 1,
        dtype=draw(st.sampled_from(["float32", "bfloat16"] + (["bfp8_b", "bfp4_b"] if layout == "npu" else []))),
        rope=draw(st.sampled_from(["half", "interleaved"])),
        layout=layout,  # type: ignore[arg-type]
    )
    pages = PageLayout(heads, head_dim, src_block_size, order, packing, dtype)  # type: ignore[arg-type]
    return build(
        geometry,
        pages,
        tokens,
        seed=draw(st.integers(0, 2**16)),
        gap=draw(st.sampled_from([0, 64, 100])),
        adjacent=adjacent,
    )


@st.composite
def splits(draw: st.DrawFn, tokens: int) -> list[tuple[int, int]]:
    """Token ranges that cover [0, tokens), each but the last ending on a tile: chunks of a chunked prefill."""
    tiles = -(-tokens // 32)
    cuts = sorted(draw(st.sets(st.integers(1, tiles - 1)))) if tiles > 1 else []
    edges = [0, *(cut * 32 for cut in cuts), tokens]
    return list(itertools.pairwise(edges))
