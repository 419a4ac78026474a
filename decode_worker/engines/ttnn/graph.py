"""One decode step of a Llama-family model, as operations on one or several chips.

Tensor parallel in the usual way: QKV, gate and up are split by columns (heads), the output and down projections
by rows, with a sum over the chips behind each; the LM head is split over the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from decode_worker.engines.checkpoint import ModelConfig
from decode_worker.engines.ttnn.ops import Ops, T

NEVER = -1e30
"""A logit that no token of the vocabulary has, as bfloat16 can hold it."""


@dataclass(slots=True)
class LayerWeights(Generic[T]):
    """One layer's weights; n chips, each with its part. Biases are None where the model has none."""

    attn_norm: T
    qkv: T
    """[hidden, (heads + 2·kv_heads)/n · D]: a chip's queries, then its keys, then its values."""
    qkv_bias: T | None
    o: T
    """[heads/n · D, hidden]."""
    o_bias: T | None
    """[hidden]: the bias on one chip, zero on the others, as the chips' results are added up."""
    mlp_norm: T
    gate: T
    gate_bias: T | None
    up: T
    """gate, up: [hidden, intermediate/n]."""
    up_bias: T | None
    down: T
    """[intermediate/n, hidden]."""
    down_bias: T | None
    """As `o_bias`."""


@dataclass(slots=True)
class ModelWeights(Generic[T]):
    embed: T
    layers: list[LayerWeights[T]]
    norm: T
    lm_head: T
    """[hidden, vocabulary/n], the vocabulary padded to whole tiles on each chip."""
    lm_head_bias: T | None
    """[vocabulary/n]: 0, and `NEVER` where there is only padding; None without padding."""


def decode_step(ops: Ops[T], config: ModelConfig, weights: ModelWeights[T]) -> T:
    """The step that `ops.begin` took in → logits, [1, 1, B, V/n] on each chip."""
    heads, kv_heads = config.num_heads // ops.chips, config.num_kv_heads // ops.chips
    scale = config.head_dim**-0.5
    x = ops.embedding(weights.embed)
    for layer, w in enumerate(weights.layers):
        normed = ops.rms_norm(x, w.attn_norm, config.rms_norm_eps)
        q, k, v = ops.create_heads(ops.linear(normed, w.qkv, w.qkv_bias), heads, kv_heads)
        q, k = ops.rotary(q), ops.rotary(k)
        ops.update_cache(layer, k, v)
        attended = ops.concat_heads(ops.attend(layer, q, scale), heads)
        x = ops.add(x, ops.all_reduce(ops.linear(attended, w.o, w.o_bias)))
        normed = ops.rms_norm(x, w.mlp_norm, config.rms_norm_eps)
        gated = ops.silu_mul(ops.linear(normed, w.gate, w.gate_bias), ops.linear(normed, w.up, w.up_bias))
        x = ops.add(x, ops.all_reduce(ops.linear(gated, w.down, w.down_bias)))
    return ops.linear(ops.rms_norm(x, weights.norm, config.rms_norm_eps), weights.lm_head, weights.lm_head_bias)
