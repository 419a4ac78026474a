"""The running batch: its rows, and the arrays an engine step takes, kept up to date instead of rebuilt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decode_worker.engines.base import DecodeBatch
from decode_worker.lease import LeaseRecord
from decode_worker.sampler import SamplingParams
from transport.messages import FinishReason


@dataclass(slots=True, eq=False)
class Row:
    """One request in decode. `token`, at `position`, is what the next step appends to the cache."""

    lease: LeaseRecord
    params: SamplingParams
    token: int
    position: int
    generated: int
    """Tokens of the request so far, `token` and the handed-over first one included."""
    max_tokens: int
    stop_ids: frozenset[int]
    chain: bytes | None
    """Hash of the last full block before `position`; None if this request is not to be hashed."""
    tail: list[int]
    """Tokens in the cache after that block."""

    def verdict(self, max_model_len: int) -> FinishReason | None:
        """Whether `token` was the request's last; a stop wins over a length, as in vLLM."""
        if self.token in self.stop_ids:
            return "stop"
        if self.generated >= self.max_tokens or self.position + 1 >= max_model_len:
            return "length"
        return None


class Batch:
    """At most `max_batch` rows; `max_blocks` is the longest block table there can be."""

    def __init__(self, max_batch: int, max_blocks: int) -> None:
        self.rows: list[Row] = []
        self.capacity = max_batch
        self._tokens = np.zeros(max_batch, np.int32)
        self._positions = np.zeros(max_batch, np.int32)
        self._tables = np.zeros((max_batch, max_blocks), np.int32)
        self._filled = [0] * max_batch

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, row: Row) -> None:
        index = len(self.rows)
        self.rows.append(row)
        self._tables[index] = 0
        self._filled[index] = 0
        self._positions[index], self._tokens[index] = row.position, row.token
        self.refresh(index)

    def refresh(self, index: int) -> None:
        """Take in the blocks that row `index` grew by."""
        blocks, filled = self.rows[index].lease.blocks, self._filled[index]
        if len(blocks) > filled:
            self._tables[index, filled : len(blocks)] = blocks[filled:]
            self._filled[index] = len(blocks)

    def remove(self, index: int) -> None:
        """Drop a row; the last one takes its place."""
        last = len(self.rows) - 1
        self.rows[index] = self.rows[last]
        for array in (self._tokens, self._positions, self._tables):
            array[index] = array[last]
        self._filled[index] = self._filled[last]
        self.rows.pop()

    def advance(self, tokens: list[int]) -> None:
        """A step appended every row's token; `tokens` are the next ones."""
        count = len(tokens)
        self._tokens[:count] = tokens
        self._positions[:count] += 1
        for row, token in zip(self.rows, tokens, strict=True):
            row.token = token
            row.position += 1
            row.generated += 1

    def arrays(self) -> DecodeBatch:
        """Copies, so that the step may run while the batch changes."""
        count = len(self.rows)
        width = max(self._filled[:count])
        return DecodeBatch(
            self._tokens[:count].copy(), self._positions[:count].copy(), self._tables[:count, :width].copy()
        )
