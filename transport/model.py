"""What a Hugging Face model directory says about a model, without torch or transformers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transport.errors import ConfigurationError
from transport.messages import ModelInfo

#: keys of config.json that say where a file came from and not what the model computes
_PROVENANCE = ("_name_or_path", "_model_name_or_path", "transformers_version")


@dataclass(frozen=True)
class KVShape:
    """KV heads of a whole model (before any tensor parallelism)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


def read_config(model_dir: Path) -> dict[str, Any]:
    """config.json as a dict. Raises ConfigurationError if it is missing or not a JSON object."""
    return _read(model_dir / "config.json")


def fingerprint(model_dir: Path) -> str:
    """Hex hash of config.json, independent of key order, whitespace and provenance fields.

    Two workers whose fingerprints agree compute interchangeable KV (given the same weights).
    """
    config = {k: v for k, v in read_config(model_dir).items() if k not in _PROVENANCE}
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def model_info(model_dir: Path, name: str, max_model_len: int | None = None) -> ModelInfo:
    """`max_model_len` None takes the model's own limit; raises ConfigurationError if it is over that."""
    config = read_config(model_dir)
    limit = _positive(config, "max_position_embeddings", model_dir)
    if max_model_len is not None and not 0 < max_model_len <= limit:
        raise ConfigurationError(f"max_model_len must be in 1…{limit} for {name}, got {max_model_len}")
    return ModelInfo(
        name=name,
        fingerprint=fingerprint(model_dir),
        max_model_len=max_model_len or limit,
        vocab_size=_positive(config, "vocab_size", model_dir),
    )


def kv_shape(model_dir: Path) -> KVShape:
    """Layers, KV heads and head dim. Raises ConfigurationError where config.json does not say."""
    config = read_config(model_dir)
    heads = _positive(config, "num_attention_heads", model_dir)
    head_dim = config.get("head_dim") or _positive(config, "hidden_size", model_dir) // heads
    return KVShape(
        num_layers=_positive(config, "num_hidden_layers", model_dir),
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
    )


def eos_token_ids(model_dir: Path) -> frozenset[int]:
    """Tokens that end a text: of generation_config.json where it names any, else of config.json."""
    path = model_dir / "generation_config.json"
    found = _read(path).get("eos_token_id") if path.is_file() else None
    if found is None:
        found = read_config(model_dir).get("eos_token_id")
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


def _positive(config: dict[str, Any], key: str, model_dir: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ConfigurationError(f"{model_dir}/config.json: {key} must be a positive integer, got {value!r}")
    return value
