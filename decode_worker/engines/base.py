"""The engine protocol: the scheduler does not know which engine it drives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from transport.geometry import KVGeometry

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclass(slots=True)
class DecodeBatch:
    """One decode step: for row i, token `tokens[i]` at position `positions[i]` is appended and attended to.

    `tokens`, `positions`: int32 [B]. `block_tables`: int32 [B, max_blocks], padded with 0.
    """

    tokens: np.ndarray
    positions: np.ndarray
    block_tables: np.ndarray


class Scores(Protocol):
    """What a step says of the next tokens, wherever it lies; good until the engine's next step."""

    @property
    def max_top(self) -> int:
        """The largest k that `top` takes; 0 where asking for it would save nothing."""

    def logits(self) -> Floats:
        """float32 [B, V]."""

    def top(self, k: int) -> tuple[Ints, Floats]:
        """The k most likely tokens of each row, best first, ties to the lowest id: ids [B, k], their logits [B, k]."""


class Engine(Protocol):
    """Decodes from the channel memory of its device; holds no KV of its own."""

    @property
    def geometry(self) -> KVGeometry: ...

    @property
    def vocab_size(self) -> int: ...

    def step(self, batch: DecodeBatch) -> Scores:
        """Append K/V of each row's token to its block, attend over positions 0…position.

        Raises ValueError for a token, position or block that is out of range.
        """

    def close(self) -> None: ...


@dataclass(slots=True)
class HostScores:
    """`Scores` whose logits, float32 [B, V], are in host memory already."""

    values: Floats
    max_top: int = 0

    def logits(self) -> Floats:
        return self.values

    def top(self, k: int) -> tuple[Ints, Floats]:
        raise ValueError("logits in host memory are sampled as they are")


def check_batch(batch: DecodeBatch, vocab_size: int, geometry: KVGeometry) -> None:
    """Raises ValueError: what computes the step trusts its input, and nothing may reach it that points elsewhere."""
    rows = len(batch.tokens)
    if rows == 0 or batch.positions.shape != (rows,) or batch.block_tables.shape[:1] != (rows,):
        raise ValueError(
            f"tokens {batch.tokens.shape}, positions {batch.positions.shape} and block tables "
            f"{batch.block_tables.shape} must have the same number of rows, at least one"
        )
    limits = (
        ("token", batch.tokens, vocab_size),
        ("position", batch.positions, batch.block_tables.shape[1] * geometry.block_size),
        ("block", batch.block_tables, geometry.num_blocks),
    )
    for name, values, stop in limits:
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= stop:
            raise ValueError(f"{name} must lie in 0…{stop - 1}, got {low if low < 0 else high}")
