"""Reads a Hugging Face checkpoint directory: config.json and *.safetensors, without torch."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from transport.errors import ConfigurationError

#: model_type in config.json → architecture whose weights and layers the engines know
_SUPPORTED = {"llama": "LlamaForCausalLM"}

_STORED = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


@dataclass(frozen=True)
class ModelConfig:
    """What an engine needs to know of config.json."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    tied_embeddings: bool
    inv_freq: np.ndarray
    """float32 [head_dim/2]: rotary angle per position."""


def read_config(model_dir: Path) -> ModelConfig:
    """Raises ConfigurationError for an unreadable config.json or a model that is not supported, by name."""
    path = model_dir / "config.json"
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigurationError(f"{path} holds no object")
    try:
        return _parse(raw)
    except KeyError as error:
        raise ConfigurationError(f"{path} has no field {error}") from error


def _parse(raw: dict[str, Any]) -> ModelConfig:
    model_type = raw.get("model_type")
    architectures = raw.get("architectures") or [_SUPPORTED.get(str(model_type))]
    if model_type not in _SUPPORTED or architectures != [_SUPPORTED[model_type]]:
        raise ConfigurationError(
            f"model_type {model_type!r} with architectures {architectures} is not supported; "
            f"supported: {', '.join(f'{k} ({v})' for k, v in _SUPPORTED.items())}"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigurationError(f"hidden_act {raw['hidden_act']!r} is not supported; supported: 'silu'")
    if raw.get("quantization_config"):
        raise ConfigurationError("quantized checkpoints are not supported")
    for name in ("hidden_size", "intermediate_size"):
        if raw[name] % 16:
            raise ConfigurationError(f"{name} must be a multiple of 16, got {raw[name]}")
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    return ModelConfig(
        num_layers=raw["num_hidden_layers"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        vocab_size=raw["vocab_size"],
        rms_norm_eps=raw["rms_norm_eps"],
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        inv_freq=_inverse_frequencies(raw, head_dim),
    )


def _inverse_frequencies(raw: dict[str, Any], head_dim: int) -> np.ndarray:
    """float32, with the roundings of the reference implementations, which compute in float32."""
    rope: dict[str, Any] = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = np.float32(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigurationError("partial_rotary_factor other than 1 is not supported")
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inv_freq = np.float32(1.0) / theta**exponents
    if rope_type == "default":
        return inv_freq
    if rope_type != "llama3":
        raise ConfigurationError(f"rope_type {rope_type!r} is not supported; supported: 'default', 'llama3'")
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    wavelength = np.float32(2 * math.pi) / inv_freq
    smooth = (np.float32(context) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (1 - smooth) * inv_freq / np.float32(factor) + smooth * inv_freq
    scaled = np.where(wavelength > context / low, inv_freq / np.float32(factor), inv_freq)
    return np.where((wavelength <= context / low) & (wavelength >= context / high), blended, scaled).astype(np.float32)


class Checkpoint:
    """Tensors of one or several safetensors files by name, memory-mapped.

    Format: u64 header length, JSON header {name: {dtype, shape, data_offsets}}, data. Raises ConfigurationError for a
    file that cannot be read, and for a tensor that is missing or has another shape or dtype than expected.
    """

    def __init__(self, model_dir: Path) -> None:
        self._found: dict[str, tuple[np.memmap, dict[str, Any]]] = {}
        for file in sorted(model_dir.glob("*.safetensors")):
            try:
                data = np.memmap(file, np.uint8, mode="r")
                (length,) = struct.unpack("<Q", data[:8].tobytes())
                header = json.loads(data[8 : 8 + length].tobytes())
            except (OSError, ValueError, struct.error) as error:
                raise ConfigurationError(f"cannot read {file}: {error}") from error
            header.pop("__metadata__", None)
            self._found.update((name, (data[8 + length :], entry)) for name, entry in header.items())
        if not self._found:
            raise ConfigurationError(f"no *.safetensors in {model_dir}")

    def read_into(self, out: np.ndarray, name: str) -> None:
        """Convert to the dtype of `out`: float32, or uint16 for bfloat16 (rounded to nearest even)."""
        if name not in self._found:
            raise ConfigurationError(f"the checkpoint has no tensor {name!r}")
        data, entry = self._found[name]
        if entry["dtype"] not in _STORED:
            raise ConfigurationError(
                f"{name}: dtype {entry['dtype']} is not supported; supported: {', '.join(_STORED)}"
            )
        if tuple(entry["shape"]) != out.shape:
            raise ConfigurationError(f"{name}: shape {entry['shape']}, expected {list(out.shape)}")
        start, stop = entry["data_offsets"]
        stored = np.frombuffer(data[start:stop], _STORED[entry["dtype"]]).reshape(out.shape)
        if entry["dtype"] == "BF16":
            if out.dtype == np.uint16:
                out[...] = stored
            else:
                np.left_shift(stored, 16, out=out.view(np.uint32), dtype=np.uint32)
        elif out.dtype == np.uint16:
            bits = stored.astype(np.float32).view(np.uint32)
            out[...] = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        else:
            out[...] = stored
