"""An engine without a model, for tests of all that is around one: cheap, exact, and able to be wrong.

Appending token t at position p stores `row_value(t, p)` at the start of that position's row in the tiles of
K of layer 0, head 0 (float32 pools only). The next token is a function of all rows 0…p as they lie in the
channels: a row that was overwritten, moved or never landed changes every token after it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from decode_worker.engines.base import DecodeBatch, HostScores
from transport.geometry import KVGeometry
from transport.geometry.kv import FACE, TILE

_ROW_SCALE = 1000.0


class ScriptedEngine:
    """`Engine` over float32 channels (uint8 arrays of the whole banks). `gate`, where set, holds each step
    until it is released, `fail` makes the next step raise it, rows with a token of `poison` get logits that are no
    numbers; `steps` counts.
    """

    def __init__(
        self, channels: Sequence[np.ndarray], geometry: KVGeometry, bases: Sequence[int], vocab_size: int = 97
    ) -> None:
        if geometry.dtype != "float32":
            raise ValueError(f"the scripted engine needs a float32 pool, got {geometry.dtype}")
        self.geometry, self.vocab_size = geometry, vocab_size
        self.steps = 0
        self.batches: list[DecodeBatch] = []
        self.gate: threading.Semaphore | None = None
        self.fail: Exception | None = None
        self.poison: set[int] = set()
        self._channels, self._base = channels, bases[0]

    def step(self, batch: DecodeBatch) -> HostScores:
        if self.gate is not None:
            self.gate.acquire()
        if self.fail is not None:
            raise self.fail
        self.steps += 1
        self.batches.append(batch)
        logits = np.zeros((len(batch.tokens), self.vocab_size), np.float32)
        for i, (token, position) in enumerate(zip(batch.tokens.tolist(), batch.positions.tolist(), strict=True)):
            table = batch.block_tables[i].tolist()
            self.store(table, position, token)
            logits[i, next_token(self.rows(table, position + 1), self.vocab_size)] = 1.0
            if token in self.poison:
                logits[i] = np.nan
        return HostScores(logits)

    def close(self) -> None: ...

    def store(self, table: Sequence[int], position: int, token: int) -> None:
        """Append one token, as prefill or a step does."""
        self._cell(table, position)[0] = row_value(token, position)

    def rows(self, table: Sequence[int], count: int) -> list[float]:
        """What lies at positions 0…count-1."""
        return [float(self._cell(table, p)[0]) for p in range(count)]

    def _cell(self, table: Sequence[int], position: int) -> npt.NDArray[np.float32]:
        size = self.geometry.block_size
        channel, offset = self.geometry.locate(self.geometry.page_index(table[position // size], 0, position % size, 0))
        row = position % TILE
        face, inner = divmod(row, FACE)
        start = self._base + offset + (face * 2 * FACE * FACE + inner * FACE) * 4
        return self._channels[channel][start : start + 4].view(np.float32)


def row_value(token: int, position: int) -> float:
    """What position `position` of the cache holds for `token`; exact in float32 for tokens below 16,000."""
    return float(np.float32(token * _ROW_SCALE + position % 1000))


def next_token(rows: Sequence[float], vocab_size: int) -> int:
    """The token after `rows`."""
    state = 7
    for value in rows:
        state = (state * 31 + int(value)) % 1_000_003
    return state % vocab_size


def continuation(prompt: Sequence[int], first: int, count: int, vocab_size: int = 97) -> list[int]:
    """The `count` tokens that follow `first` after `prompt`: what a correct run must produce."""
    rows = [row_value(t, p) for p, t in enumerate(prompt)]
    out, token = [], first
    for _ in range(count):
        rows.append(row_value(token, len(rows)))
        token = next_token(rows, vocab_size)
        out.append(token)
    return out
