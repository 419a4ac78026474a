"""The engine object around the graph: checks, slots and page tables."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Generic

import numpy as np

from decode_worker.engines.base import DecodeBatch, Floats, Ints, check_batch
from decode_worker.engines.checkpoint import ModelConfig, read_config
from decode_worker.engines.ttnn.graph import decode_step
from decode_worker.engines.ttnn.ops import IDLE, Ops, T
from decode_worker.engines.ttnn.weights import load
from transport.errors import ConfigurationError
from transport.geometry import KVGeometry


class TtnnEngine(Generic[T]):
    """`Engine` for Llama-family models on any `Ops`; row i of a batch is computed in slot i.

    `geometry` is that of one chip: it has the KV heads of one, and `ops.chips` of them have those of the model.
    `max_blocks` is the longest block table. Raises ConfigurationError where model, geometry and chips do not fit.
    """

    def __init__(self, model_dir: Path, ops: Ops[T], geometry: KVGeometry, max_blocks: int) -> None:
        self._ops, self._geometry, self._max_blocks = ops, geometry, max_blocks
        self._config = read_config(model_dir)
        _check_geometry(self._config, geometry, ops.chips)
        self._weights = load(model_dir, self._config, ops, geometry.rope)
        self._compute = partial(decode_step, ops, self._config, self._weights)

    @property
    def geometry(self) -> KVGeometry:
        return self._geometry

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    def step(self, batch: DecodeBatch) -> DeviceScores[T]:
        """See `Engine.step`. Raises ValueError for too many rows, too."""
        check_batch(batch, self._config.vocab_size, self._geometry)
        rows, width = batch.block_tables.shape
        if rows > self._ops.slots or width > self._max_blocks:
            raise ValueError(
                f"a batch has at most {self._ops.slots} rows of {self._max_blocks} blocks, got {rows} of {width}"
            )
        tokens = np.zeros(self._ops.slots, np.int32)
        positions = np.full(self._ops.slots, IDLE, np.int32)
        tables = np.zeros((self._ops.slots, self._max_blocks), np.int32)
        tokens[:rows], positions[:rows], tables[:rows, :width] = batch.tokens, batch.positions, batch.block_tables
        self._ops.begin(tokens, positions, tables)
        return DeviceScores(self._ops, self._ops.run(self._compute), rows, self.vocab_size)

    def close(self) -> None:
        self._ops.close()


class DeviceScores(Generic[T]):
    """`Scores` of the last step, still on the device; good until the next step."""

    def __init__(self, ops: Ops[T], result: T, rows: int, vocab_size: int) -> None:
        self._ops, self._result, self._rows, self._vocab_size = ops, result, rows, vocab_size

    @property
    def max_top(self) -> int:
        return self._ops.max_top

    def logits(self) -> Floats:
        return self._ops.logits(self._result)[: self._rows, : self._vocab_size]

    def top(self, k: int) -> tuple[Ints, Floats]:
        ids, values = self._ops.top(self._result, k)
        return ids[: self._rows], values[: self._rows]


def _check_geometry(config: ModelConfig, geometry: KVGeometry, chips: int) -> None:
    if geometry.layout != "npu":
        raise ConfigurationError(f"the engine decodes from layout 'npu', not {geometry.layout!r}")
    pairs = (
        ("num_layers", config.num_layers, geometry.num_layers),
        ("num_kv_heads", config.num_kv_heads, geometry.num_kv_heads * chips),
        ("head_dim", config.head_dim, geometry.head_dim),
    )
    for name, model, pool in pairs:
        if model != pool:
            raise ConfigurationError(f"the model has {name} {model}, the pool {pool}")
    if config.num_heads % config.num_kv_heads:
        raise ConfigurationError(f"{config.num_heads} heads are no multiple of {config.num_kv_heads} KV heads")
