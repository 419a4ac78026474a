"""Tiny random Llama checkpoints, and a device of plain arrays whose memory can be poisoned and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from transport.geometry import TILE, KVGeometry
from transport.geometry.tiles import decode, encode

POISON = 0xFF  # as float32 and bfloat16: NaN


class ArrayDevice:
    """The part of a device that the engine uses: channels of host memory, poisoned."""

    name = "arrays"

    def __init__(self, geometry: KVGeometry, *, gap: int = 64) -> None:
        """Tensors lie `gap` bytes apart, and so have different bases in every channel."""
        stride = geometry.bank_bytes + gap
        self.bases = [gap + tensor * stride for tensor in range(geometry.num_tensors)]
        size = gap + stride * geometry.num_tensors
        self.channels = [np.full(size, POISON, np.uint8) for _ in range(geometry.num_channels)]

    def host_channels(self) -> list[np.ndarray]:
        return self.channels


def save_tiny_llama(path: Path, dtype: str = "float32", **overrides: Any) -> Any:
    """Write a random two-layer Llama with grouped queries to `path` → the transformers model, in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "hidden_size": 96,
        "intermediate_size": 144,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 211,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**settings | overrides)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()  # .to() would narrow the rotary table


def reference_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """float32 [T, V] of transformers' own forward pass over one sequence."""
    import torch

    torch.set_num_threads(1)
    with torch.inference_mode():
        return model(torch.tensor(np.asarray(tokens, np.int64)[None])).logits[0].numpy()


def rounded_reference_logits(model: Any, tokens: np.ndarray, kv_dtype: Any) -> np.ndarray:
    """As `reference_logits`, with K and V rounded to the pool's dtype before they are attended to."""
    import torch
    from transformers import AttentionInterface

    def rounded(values: Any) -> Any:
        tiles = values.numpy().reshape(-1, 1, TILE).repeat(TILE, axis=1)  # 32 elements of a row, in every tile row
        back = decode(encode(tiles, "float32", kv_dtype), kv_dtype)[:, 0]
        return torch.from_numpy(back.reshape(values.shape))

    def attention(module: Any, q: Any, k: Any, v: Any, mask: Any, **settings: Any) -> Any:
        attended = torch.nn.functional.scaled_dot_product_attention(
            q, rounded(k), rounded(v), is_causal=True, scale=settings["scaling"], enable_gqa=True
        )
        return attended.transpose(1, 2).contiguous(), None

    AttentionInterface.register("rounded", attention)
    model.set_attn_implementation("rounded")
    return reference_logits(model, tokens)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest deviation over the largest value."""
    return float(np.abs(actual - expected).max() / np.abs(expected).max())
