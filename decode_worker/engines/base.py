"""The engine protocol: the scheduler does not know which engine it drives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from transport.geometry import KVGeometry


@dataclass(slots=True)
class DecodeBatch:
    """One decode step: for row i, token `tokens[i]` at position `positions[i]` is appended and attended to.

    `tokens`, `positions`: int32 [B]. `block_tables`: int32 [B, max_blocks], padded with 0.
    """

    tokens: np.ndarray
    positions: np.ndarray
    block_tables: np.ndarray


class Engine(Protocol):
    """Decodes from the channel memory of its device; holds no KV of its own."""

    @property
    def geometry(self) -> KVGeometry: ...

    @property
    def vocab_size(self) -> int: ...

    def step(self, batch: DecodeBatch) -> np.ndarray:
        """Append K/V of each row's token to its block, attend over positions 0…position → float32 logits [B, V]."""

    def close(self) -> None: ...
