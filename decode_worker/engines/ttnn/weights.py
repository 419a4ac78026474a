"""A checkpoint's weights as the graph wants them: transposed, heads in RoPE order, cut for the chips."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from decode_worker.engines.checkpoint import Checkpoint, ModelConfig
from decode_worker.engines.ttnn.graph import NEVER, LayerWeights, ModelWeights
from decode_worker.engines.ttnn.ops import Ops, T
from transport.errors import ConfigurationError
from transport.geometry.kv import TILE, RopeOrder
from transport.geometry.rope import permutation

log = logging.getLogger(__name__)

PROGRESS_S = 5.0
"""Seconds between two lines about the progress of a long load."""

Floats = npt.NDArray[np.float32]


def load(model_dir: Path, config: ModelConfig, ops: Ops[T], rope: RopeOrder) -> ModelWeights[T]:
    """Read *.safetensors layer by layer and hand each to `ops`: no more than one matrix is held here at a time.

    `rope` is the order of the head dim in the KV cache: rows of Q and K are brought into it, so that their
    products do not change. Raises ConfigurationError where heads or sizes do not divide over the chips, or a
    tensor is missing or has another shape than config.json says.
    """
    _check_divides(config, ops.chips)
    loader = _Loader(Checkpoint(model_dir), config, ops, rope)
    began = told = time.monotonic()
    layers: list[LayerWeights[T]] = []
    for layer in range(config.num_layers):
        layers.append(loader.layer(layer))
        if (now := time.monotonic()) - told > PROGRESS_S:
            log.info("loading weights: %d of %d layers", layer + 1, config.num_layers)
            told = now
    weights = loader.model(layers)
    log.info("weights of %d layers loaded in %.1f s", config.num_layers, time.monotonic() - began)
    return weights


def padded_vocabulary(vocab_size: int, chips: int) -> int:
    """The vocabulary's size with the same number of whole tiles on each chip."""
    return -(-vocab_size // (TILE * chips)) * TILE * chips


def _check_divides(config: ModelConfig, chips: int) -> None:
    for name in ("num_heads", "num_kv_heads"):
        if getattr(config, name) % chips:
            raise ConfigurationError(f"{chips} chips cannot share {getattr(config, name)} heads ({name}) evenly")
    if config.intermediate_size % (TILE * chips) and chips > 1:
        raise ConfigurationError(
            f"intermediate_size {config.intermediate_size} has no equal number of whole tiles on {chips} chips"
        )


class _Loader:
    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, ops: Ops[T], rope: RopeOrder) -> None:
        self._checkpoint, self._config, self._ops = checkpoint, config, ops
        self._order = permutation(config.head_dim, rope)
        self._queries = config.num_heads * config.head_dim
        self._keys = config.num_kv_heads * config.head_dim

    def layer(self, layer: int) -> LayerWeights[T]:
        config, ops, hidden = self._config, self._ops, self._config.hidden_size
        prefix = f"model.layers.{layer}"
        attention, mlp, inner = f"{prefix}.self_attn", f"{prefix}.mlp", config.intermediate_size
        qkv_bias = o_bias = gate_bias = up_bias = down_bias = None
        if config.attention_bias:
            qkv_bias = ops.vector([shard[0] for shard in self._qkv(attention, "bias")])
            o_bias = self._added_bias(f"{attention}.o_proj.bias")
        if config.mlp_bias:
            gate_bias, up_bias = (
                ops.vector(np.split(self._read(f"{mlp}.{which}_proj.bias", inner), ops.chips))
                for which in ("gate", "up")
            )
            down_bias = self._added_bias(f"{mlp}.down_proj.bias")
        return LayerWeights(
            attn_norm=ops.vector([self._read(f"{prefix}.input_layernorm.weight", hidden)]),
            qkv=ops.weight(self._qkv(attention, "weight")),
            qkv_bias=qkv_bias,
            o=self._by_rows(f"{attention}.o_proj.weight", hidden, self._queries),
            o_bias=o_bias,
            mlp_norm=ops.vector([self._read(f"{prefix}.post_attention_layernorm.weight", hidden)]),
            gate=self._by_columns(f"{mlp}.gate_proj.weight", inner, hidden),
            gate_bias=gate_bias,
            up=self._by_columns(f"{mlp}.up_proj.weight", inner, hidden),
            up_bias=up_bias,
            down=self._by_rows(f"{mlp}.down_proj.weight", hidden, inner),
            down_bias=down_bias,
        )

    def model(self, layers: list[LayerWeights[T]]) -> ModelWeights[T]:
        config, ops, hidden = self._config, self._ops, self._config.hidden_size
        embed = self._read("model.embed_tokens.weight", config.vocab_size, hidden)
        table = ops.table(embed)
        head = embed if config.tied_embeddings else self._read("lm_head.weight", config.vocab_size, hidden)
        padding = padded_vocabulary(config.vocab_size, ops.chips) - config.vocab_size
        columns = np.pad(head, ((0, padding), (0, 0))).T
        bias = np.where(np.arange(len(columns.T)) < config.vocab_size, np.float32(0), np.float32(NEVER))
        return ModelWeights(
            embed=table,
            layers=layers,
            norm=ops.vector([self._read("model.norm.weight", hidden)]),
            lm_head=ops.weight(_parts(columns, ops.chips, axis=1)),
            lm_head_bias=ops.vector(np.split(bias, ops.chips)) if padding else None,
        )

    def _qkv(self, attention: str, kind: str) -> list[Floats]:
        """Per chip, its queries', keys' and values' columns side by side: [hidden, …], or [1, …] of a bias."""
        width = self._config.hidden_size if kind == "weight" else 1
        heads = []
        for which, rows in (("q", self._queries), ("k", self._keys), ("v", self._keys)):
            shape = (rows, width) if kind == "weight" else (rows,)
            values = self._read(f"{attention}.{which}_proj.{kind}", *shape).reshape(-1, self._config.head_dim, width)
            heads.append(values if which == "v" else values[:, self._order])
        chips = self._ops.chips
        return [
            np.concatenate([np.split(part, chips)[chip].reshape(-1, width) for part in heads]).T
            for chip in range(chips)
        ]

    def _by_columns(self, name: str, out: int, inner: int) -> T:
        """Stored [out, in], split by outputs."""
        return self._ops.weight(_parts(self._read(name, out, inner).T, self._ops.chips, axis=1))

    def _by_rows(self, name: str, out: int, inner: int) -> T:
        """Stored [out, in], split by inputs."""
        return self._ops.weight(_parts(self._read(name, out, inner).T, self._ops.chips, axis=0))

    def _added_bias(self, name: str) -> T:
        """A bias of what is summed over the chips: on the first of them."""
        bias = self._read(name, self._config.hidden_size)
        return self._ops.vector([bias, *[np.zeros_like(bias)] * (self._ops.chips - 1)])

    def _read(self, name: str, *shape: int) -> Floats:
        out = np.empty(shape, np.float32)
        self._checkpoint.read_into(out, name)
        return out


def _parts(matrix: Floats, chips: int, axis: int) -> Sequence[Floats]:
    return np.split(matrix, chips, axis=axis)
