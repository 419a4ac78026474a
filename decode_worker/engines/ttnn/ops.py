"""The operations that a decode step is made of, under the names and with the shapes of ttnn.

A backend (`numpy_ops.NumpyOps`, `ttnn_ops.TtnnOps`) computes them on `chips` chips that work in step. A tensor
`T` is opaque to the graph: it stands for one array per chip, either the same on each ("replicated") or a part on
each ("sharded"). B is the number of batch slots, fixed for a backend; n is `chips`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

IDLE = -1
"""Position of a slot without a request: nothing is written to the cache for it, and its logits mean nothing."""


class Ops(Protocol[T]):
    """See the module. All ranks are four, as ttnn has them; D is the head dim."""

    @property
    def chips(self) -> int: ...

    @property
    def slots(self) -> int:
        """B: rows of every activation."""

    @property
    def max_top(self) -> int:
        """The largest k that `top` takes; 0 where the backend leaves sampling to the host."""

    # ---- once, at start

    def weight(self, shards: Sequence[Floats]) -> T:
        """A matrix [in, out] of `linear` per chip, or one for all (replicated); in the backend's weight dtype.

        The backend may keep no reference to `shards`.
        """

    def vector(self, shards: Sequence[Floats]) -> T:
        """A norm's weight or a bias [width], per chip or one for all; never in a block float."""

    def table(self, values: Floats) -> T:
        """The embedding table [vocabulary, hidden], replicated, for `embedding`."""

    # ---- each step

    def begin(self, tokens: Ints, positions: Ints, page_tables: Ints) -> None:
        """Take in a step: int32 [B], [B] (`IDLE` for a slot without a request), [B, blocks of the longest context]."""

    def embedding(self, table: T) -> T:
        """Rows of the step's tokens, [1, 1, B, hidden], replicated (ttnn.embedding)."""

    def rms_norm(self, x: T, weight: T, epsilon: float) -> T:
        """x / sqrt(mean(x²) + epsilon) · weight over the last dim (ttnn.rms_norm)."""

    def linear(self, x: T, weight: T, bias: T | None = None) -> T:
        """[1, 1, B, in] · [in, out] + bias → [1, 1, B, out], chip by chip (ttnn.linear)."""

    def create_heads(self, qkv: T, heads: int, kv_heads: int) -> tuple[T, T, T]:
        """[1, 1, B, (heads + 2·kv_heads)·D] → q [1, B, heads, D], k and v [1, B, kv_heads, D], counts per chip
        (ttnn.experimental.nlp_create_qkv_heads_decode)."""

    def rotary(self, x: T) -> T:
        """[1, B, heads, D] turned by the step's positions, in the RoPE order the backend was made for
        (interleaved: ttnn.experimental.rotary_embedding_llama; half: rotary_embedding_hf)."""

    def update_cache(self, layer: int, k: T, v: T) -> None:
        """Store k and v [1, B, kv_heads, D] at the step's positions of layer `layer`, through the page table; not for
        idle slots (ttnn.experimental.paged_update_cache)."""

    def attend(self, layer: int, q: T, scale: float) -> T:
        """softmax(q·Kᵀ·scale)·V over positions 0…position of each slot → [1, B, heads, D]
        (ttnn.transformer.paged_scaled_dot_product_attention_decode)."""

    def concat_heads(self, x: T, heads: int) -> T:
        """[1, B, heads, D] → [1, 1, B, heads·D] (ttnn.experimental.nlp_concat_heads_decode)."""

    def add(self, a: T, b: T) -> T:
        """Element by element (ttnn.add)."""

    def silu_mul(self, gate: T, up: T) -> T:
        """silu(gate) · up (ttnn.mul with a fused activation of its first input)."""

    def all_reduce(self, x: T) -> T:
        """The sum over all chips, replicated (ttnn.all_reduce); x itself on one chip."""

    # ---- the result, back on the host

    def logits(self, x: T) -> Floats:
        """[1, 1, B, V/n] sharded over the vocabulary → float32 [B, V]."""

    def top(self, x: T, k: int) -> tuple[Ints, Floats]:
        """Of the same tensor, the k (≤ `max_top`) largest per row, best first, ties to the lowest id: ids int32
        [B, k] and their values float32 [B, k]."""

    def run(self, compute: Step[T]) -> T:
        """`compute`'s result for the step that `begin` took in; a backend may record the first call and replay it."""

    def close(self) -> None: ...


T_co = TypeVar("T_co", covariant=True)


class Step(Protocol[T_co]):
    """The graph of one step: the same operations each time."""

    def __call__(self) -> T_co: ...
