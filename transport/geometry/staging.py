"""The receive buffers of the kv_paths that stage on D: their sizes, and the plans that fill and empty them.

`host`: `[2L, T32, H, D]` in source dtype, T32 = prompt tokens rounded up to whole tiles; D re-lays it out.
`contiguous`: exactly the buffer that `transform` makes of the whole lease; D executes the lease's plan on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from transport.backends.base import Run
from transport.geometry.floats import ITEM_BYTES, SourceDtype
from transport.geometry.kv import TILE, KVGeometry
from transport.geometry.plan import all_tensors, merge, plan
from transport.geometry.units import units_in_range

Bytes = npt.NDArray[np.uint8]


def staging_bytes(
    geometry: KVGeometry, kv_path: Literal["hawk", "host", "contiguous"], prompt_tokens: int, dtype: SourceDtype
) -> int:
    """Bytes of one lease's receive buffer (0 for kv_path hawk); `dtype` is P's, used by `host` alone."""
    padded = -(-prompt_tokens // TILE) * TILE
    if kv_path == "host":
        return geometry.num_tensors * padded * geometry.num_kv_heads * geometry.head_dim * ITEM_BYTES[dtype]
    if kv_path == "contiguous":
        tiles = geometry.num_tensors * (padded // TILE) * geometry.num_kv_heads * (geometry.head_dim // TILE)
        return tiles * geometry.page_bytes
    return 0


def plan_linear(
    geometry: KVGeometry,
    staging_offset: int,
    prompt_tokens: int,
    start: int,
    stop: int,
    dtype: SourceDtype,
    tensors: Sequence[int] | None = None,
) -> list[Run]:
    """kv_path host: the writes that put `to_linear(…, start, stop, tensors)` into the lease's receive buffer."""
    if stop > prompt_tokens:
        raise ValueError(f"token range [{start}, {stop}) goes past the prompt's {prompt_tokens} tokens")
    row = geometry.num_kv_heads * geometry.head_dim * ITEM_BYTES[dtype]
    padded, rows = -(-prompt_tokens // TILE) * TILE, -(-stop // TILE) * TILE - start
    chosen = np.asarray(all_tensors(geometry, tensors), np.int64)
    remote = staging_offset + (chosen * padded + start) * row
    return merge(np.zeros_like(remote), remote, rows * row)


def plan_contiguous(
    geometry: KVGeometry,
    staging_offset: int,
    dst_blocks: Sequence[int],
    prompt_tokens: int,
    resident_tokens: int,
    start: int,
    stop: int,
    tensors: Sequence[int] | None = None,
) -> list[Run]:
    """kv_path contiguous: the writes that put `transform(…, start, stop, tensors)` into the lease's receive buffer.

    The buffer is the `transform` of tokens [resident_tokens, prompt_tokens) and all tensors.
    """
    chosen = all_tensors(geometry, tensors)
    whole = units_in_range(geometry, dst_blocks, resident_tokens, prompt_tokens)
    part = units_in_range(geometry, dst_blocks, start, stop)
    if start < resident_tokens or stop > prompt_tokens:
        raise ValueError(f"token range [{start}, {stop}) is outside the lease's [{resident_tokens}, {prompt_tokens})")
    skip = (start - resident_tokens) // TILE
    here = slice(skip, skip + len(part.slots))
    first, step = whole.staging_positions(geometry.num_tensors)
    ours, our_step = part.staging_positions(len(chosen))
    remote = np.empty(part.size * len(chosen), np.int64)
    for i, tensor in enumerate(chosen):
        remote[ours + i * our_step] = first[here] + tensor * step[here]
    return merge(np.zeros_like(remote), staging_offset + remote * part.unit_bytes, part.unit_bytes)


def scatter(
    channels: Sequence[Bytes],
    bases: Sequence[int],
    geometry: KVGeometry,
    dst_blocks: Sequence[int],
    staging: Bytes,
    prompt_tokens: int,
    resident_tokens: int = 0,
) -> int:
    """kv_path contiguous on D: move a landed receive buffer into the channels → bytes moved."""
    runs = plan(geometry, bases, dst_blocks, resident_tokens, prompt_tokens)
    execute(channels, staging, runs)
    return sum(run.length for run in runs)


def execute(regions: Sequence[Bytes], staging: Bytes, runs: Sequence[Run]) -> None:
    """Carry out a plan by plain copies. Raises ValueError where a run leaves its region or the buffer."""
    for run in runs:
        target = regions[run.region][run.remote_offset : run.remote_offset + run.length]
        target[...] = staging[run.local_offset : run.local_offset + run.length]
