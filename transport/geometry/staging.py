"""The receive buffers of the kv_paths that stage on D: their sizes, and the plans that fill and empty them.

`host`: a lease has some slots of equal size, which its pieces take in turn. A piece lies in its slot as
`[tensors, T32, H, D]` in source dtype, T32 = its tokens rounded up to whole tiles; D re-lays it out.
`contiguous`: one slot, exactly the buffer that `transform` makes of the whole lease; D executes the lease's plan on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from transport.backends.base import Run
from transport.geometry.floats import ITEM_BYTES, SourceDtype
from transport.geometry.kv import TILE, KVGeometry
from transport.geometry.plan import all_tensors, merge, plan
from transport.geometry.units import units_in_range

Bytes = npt.NDArray[np.uint8]


def linear_row_bytes(geometry: KVGeometry, dtype: SourceDtype) -> int:
    """kv_path host: bytes of one tile row (32 tokens) of one tensor, the least that a slot must hold."""
    return TILE * geometry.num_kv_heads * geometry.head_dim * ITEM_BYTES[dtype]


def linear_bytes(geometry: KVGeometry, dtype: SourceDtype, start: int, stop: int, num_tensors: int) -> int:
    """kv_path host: bytes of a piece, tokens [start, stop) of so many tensors, in its slot."""
    return (-(-stop // TILE) - start // TILE) * linear_row_bytes(geometry, dtype) * num_tensors


def contiguous_bytes(geometry: KVGeometry, prompt_tokens: int) -> int:
    """kv_path contiguous: bytes of one lease's receive buffer."""
    tiles = -(-prompt_tokens // TILE) * geometry.num_kv_heads * (geometry.head_dim // TILE)
    return geometry.num_tensors * tiles * geometry.page_bytes


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
