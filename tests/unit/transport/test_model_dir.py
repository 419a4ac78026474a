"""What config.json says of a model, and when two of them name the same one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from transport.errors import ConfigurationError
from transport.model import KVShape, eos_token_ids, fingerprint, kv_shape, model_info

CONFIG = {
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "eos_token_id": 2,
}


def write(directory: Path, config: object, generation: object = None) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_shape_and_info(tmp_path: Path) -> None:
    model = write(tmp_path, CONFIG)
    assert kv_shape(model) == KVShape(30, 3, 64)
    info = model_info(model, "smol")
    assert (info.name, info.max_model_len, info.vocab_size) == ("smol", 8192, 49152)
    assert model_info(model, "smol", 100).max_model_len == 100


def test_head_dim_and_multi_head_attention(tmp_path: Path) -> None:
    config = CONFIG | {"head_dim": 128, "num_key_value_heads": None}
    assert kv_shape(write(tmp_path, config)) == KVShape(30, 9, 128)


def test_fingerprint_is_of_what_the_model_computes(tmp_path: Path) -> None:
    same = dict(reversed(CONFIG.items())) | {"_name_or_path": "/elsewhere", "transformers_version": "9"}
    other = CONFIG | {"rope_theta": 5.0}
    first = fingerprint(write(tmp_path / "a", CONFIG))
    assert fingerprint(write(tmp_path / "b", json.dumps(same, indent=3))) == first
    assert fingerprint(write(tmp_path / "c", other)) != first


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, {2}),
        ([2, 3], None, {2, 3}),
        (2, {"eos_token_id": [7, 8]}, {7, 8}),
        (2, {}, {2}),
        (None, None, set()),
    ],
)
def test_eos_ids(tmp_path: Path, config: object, generation: object, expected: set[int]) -> None:
    assert eos_token_ids(write(tmp_path, CONFIG | {"eos_token_id": config}, generation)) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[1]", "must hold a JSON object, got list"),
        ("{", "is not JSON"),
        (json.dumps(CONFIG | {"vocab_size": 0}), "vocab_size must be a positive integer, got 0"),
        (json.dumps(CONFIG | {"max_position_embeddings": "8k"}), "max_position_embeddings .* got '8k'"),
    ],
)
def test_a_bad_config_is_a_configuration_error(tmp_path: Path, config: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        model_info(write(tmp_path, config), "m")


def test_missing_directory_and_too_long_a_context(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read .*config\.json"):
        fingerprint(tmp_path / "nothing")
    with pytest.raises(ConfigurationError, match=r"max_model_len must be in 1…8192 for m, got 9000"):
        model_info(write(tmp_path, CONFIG), "m", 9000)
