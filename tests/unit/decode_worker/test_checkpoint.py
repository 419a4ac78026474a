"""What the checkpoint reader refuses, and sharded checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_models import save_tiny_llama

from decode_worker.engines.checkpoint import read_config
from decode_worker.engines.cpu.weights import load_weights
from transport.errors import ConfigurationError


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    save_tiny_llama(tmp_path)
    return tmp_path


def edit(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "'mamba'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"hidden_size": 100}, "hidden_size"),
        ({"intermediate_size": 150}, "intermediate_size"),
    ],
)
def test_unsupported_models_are_refused_by_name(tiny: Path, changes: dict[str, Any], named: str) -> None:
    edit(tiny, **changes)
    with pytest.raises(ConfigurationError, match=named):
        read_config(tiny)


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_an_unreadable_config_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_config_without_a_needed_field_is_refused(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    del config["num_hidden_layers"]
    (tiny / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match="num_hidden_layers"):
        read_config(tiny)


def test_old_style_rope_settings_mean_the_same(tiny: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    edit(tiny, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    new = read_config(tiny).inv_freq
    edit(tiny, rope_parameters=None, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling})
    np.testing.assert_array_equal(read_config(tiny).inv_freq, new)


def test_shards_give_the_weights_of_one_file(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    config = read_config(tmp_path / "whole")
    whole = load_weights(tmp_path / "whole", config, "float32")
    shards = load_weights(tmp_path / "shards", config, "float32")
    for one, other in zip(whole, shards, strict=True):
        np.testing.assert_array_equal(one, other)


def test_tied_embeddings_are_held_once(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, tie_word_embeddings=True)
    weights = load_weights(tmp_path, read_config(tmp_path), "bfloat16")
    assert np.shares_memory(weights.embed, weights.lm_head)


def test_missing_files_tensors_and_wrong_shapes_are_named(tiny: Path) -> None:
    edit(tiny, attention_bias=True)
    with pytest.raises(ConfigurationError, match=r"q_proj\.bias"):
        load_weights(tiny, read_config(tiny), "float32")
    edit(tiny, attention_bias=False, vocab_size=210)
    with pytest.raises(ConfigurationError, match=r"embed_tokens.*210"):
        load_weights(tiny, read_config(tiny), "float32")
    file = tiny / "model.safetensors"
    file.write_bytes(file.read_bytes()[:6])
    with pytest.raises(ConfigurationError, match=r"model\.safetensors"):
        load_weights(tiny, read_config(tiny), "float32")
    file.unlink()
    with pytest.raises(ConfigurationError, match="safetensors"):
        load_weights(tiny, read_config(tiny), "float32")
