"""A checkpoint's weights in the order in which the compiled step reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from decode_worker.engines.checkpoint import Checkpoint, ModelConfig
from decode_worker.engines.cpu.step import Weights


def load_weights(model_dir: Path, config: ModelConfig, dtype: str) -> Weights:
    """Raises ConfigurationError where a tensor is missing or has another shape or dtype than config.json says."""
    tensors = Checkpoint(model_dir)
    layers, hidden, inner = config.num_layers, config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrix = np.dtype(np.uint16 if dtype == "bfloat16" else np.float32)

    def stacked(suffixes: dict[str, int], columns: int | None, present: bool = True) -> np.ndarray:
        """[L, Σ rows, columns] of the layers' tensors, one below the other; vectors where columns is None."""
        rows = sum(suffixes.values())
        shape, kind = ((rows,), np.dtype(np.float32)) if columns is None else ((rows, columns), matrix)
        out = np.empty((layers if present else 0, *shape), kind)
        for layer in range(len(out)):
            at = 0
            for suffix, count in suffixes.items():
                tensors.read_into(out[layer, at : at + count], f"model.layers.{layer}.{suffix}")
                at += count
        return out

    def single(name: str, *shape: int, kind: np.dtype[Any]) -> np.ndarray:
        out = np.empty(shape, kind)
        tensors.read_into(out, name)
        return out

    def projection(rows: dict[str, int], columns: int, bias: bool) -> tuple[np.ndarray, np.ndarray]:
        return (
            stacked({f"{name}.weight": count for name, count in rows.items()}, columns),
            stacked({f"{name}.bias": count for name, count in rows.items()}, None, bias),
        )

    qkv, qkv_bias = projection(
        {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}, hidden, config.attention_bias
    )
    o, o_bias = projection({"self_attn.o_proj": hidden}, queries, config.attention_bias)
    gate_up, gate_up_bias = projection({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, config.mlp_bias)
    down, down_bias = projection({"mlp.down_proj": hidden}, inner, config.mlp_bias)
    embed = single("model.embed_tokens.weight", config.vocab_size, hidden, kind=matrix)
    head = embed if config.tied_embeddings else single("lm_head.weight", config.vocab_size, hidden, kind=matrix)
    return Weights(
        embed=embed,
        attn_norm=stacked({"input_layernorm.weight": hidden}, None),
        qkv=qkv,
        qkv_bias=qkv_bias,
        o=o,
        o_bias=o_bias,
        mlp_norm=stacked({"post_attention_layernorm.weight": hidden}, None),
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=down,
        down_bias=down_bias,
        norm=single("model.norm.weight", hidden, kind=np.dtype(np.float32)),
        lm_head=head[np.newaxis],
    )
