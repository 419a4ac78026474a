"""The order of K's head dim: HF's halves against Meta's interleaved pairs (facts of both attention kernels)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from transport.geometry.kv import RopeOrder


def permutation(head_dim: int, rope: RopeOrder) -> npt.NDArray[np.int64]:
    """int64 [D]: which source dim comes to lie at each target dim, `out[j] = in[permutation[j]]`.

    The source is in HF order. "half" leaves it; "interleaved" gives out[2i] = in[i], out[2i+1] = in[i + D/2].
    """
    order = np.arange(head_dim, dtype=np.int64)
    if rope == "half":
        return order
    return np.ascontiguousarray(order.reshape(2, head_dim // 2).T).reshape(-1)


def inverse(head_dim: int, rope: RopeOrder) -> npt.NDArray[np.int64]:
    """int64 [D]: the permutation that brings target order back to HF order."""
    return np.argsort(permutation(head_dim, rope))
