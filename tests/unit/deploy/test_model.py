"""`deploy.model`: made once, atomically, verified; and `deploy.gguf`: the conversion itself."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from deploy import model as models
from deploy.gguf import GgufModel, _bfloat16_bits
from router.openai.rendering import sampling_defaults
from transport.errors import ConfigurationError

gguf = pytest.importorskip("gguf")

HEADS, KV_HEADS, DIM, HIDDEN, FEED, LAYERS = 4, 2, 8, 32, 64, 2
TOKENS = ["<|end|>", "<|start|>", "a", "b", "1", "2", "Ġ", "ab", "12"]


def interleave(weights: np.ndarray, heads: int) -> np.ndarray:
    """HF's rotate-halves row order → llama.cpp's pairs, as its converter permutes Q and K."""
    return weights.reshape(heads, 2, weights.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weights.shape)


@pytest.fixture
def weights() -> dict[str, np.ndarray]:
    """A small Llama by its HF names, float32, of values that bfloat16 holds exactly."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (len(TOKENS), HIDDEN), "model.norm": (HIDDEN,)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm": (HIDDEN,),
            f"{layer}.post_attention_layernorm": (HIDDEN,),
            f"{layer}.self_attn.q_proj": (HEADS * DIM, HIDDEN),
            f"{layer}.self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
            f"{layer}.self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
            f"{layer}.self_attn.o_proj": (HIDDEN, HEADS * DIM),
            f"{layer}.mlp.gate_proj": (FEED, HIDDEN),
            f"{layer}.mlp.up_proj": (FEED, HIDDEN),
            f"{layer}.mlp.down_proj": (HIDDEN, FEED),
        }
    return {f"{name}.weight": rng.integers(-128, 128, shape).astype(np.float32) / 64 for name, shape in shapes.items()}


def write_gguf(path: Path, weights: dict[str, np.ndarray], pre: str = "smollm", architecture: str = "llama") -> Path:
    names = {f"model.layers.{{}}.{hf}.weight": f"blk.{{}}.{own}.weight" for own, hf in _layer_names().items()}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b", "1 2"])
    for kind in ("bos", "eos", "unk", "pad"):
        getattr(writer, f"add_{kind}_token_id")(0)
    writer.add_chat_template("{{ messages }}")
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    for hf, own in names.items():
        for i in range(LAYERS):
            tensor = weights[hf.format(i)]
            if "q_proj" in hf or "k_proj" in hf:
                tensor = interleave(tensor, HEADS if "q_proj" in hf else KV_HEADS)
            writer.add_tensor(own.format(i), np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _layer_names() -> dict[str, str]:
    from deploy.gguf import LAYER_TENSORS

    return LAYER_TENSORS


@pytest.fixture
def source(tmp_path: Path, weights: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> models.Source:
    """A registered model `tiny` whose GGUF file is a small one made here."""
    path = write_gguf(tmp_path / "tiny.gguf", weights)
    out = tmp_path / "expected"
    out.mkdir()
    GgufModel(path).convert(out, {"temperature": 0.5})
    outcome = {file.name: models.sha256(file) for file in out.iterdir()}
    source = models.Source("tiny-package", path.name, models.sha256(path), {"temperature": 0.5}, outcome)
    monkeypatch.setitem(models.SOURCES, "tiny", source)
    monkeypatch.setattr(models, "source_path", lambda _: path)
    return source


# ---- conversion


def test_every_weight_arrives_under_its_hf_name(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    safetensors = pytest.importorskip("safetensors")
    out = tmp_path / "out"
    out.mkdir()
    GgufModel(write_gguf(tmp_path / "m.gguf", weights)).convert(out, {})
    header = _header(out / "model.safetensors")
    assert header.keys() - {"__metadata__"} == weights.keys()
    for name, data in safetensors.deserialize((out / "model.safetensors").read_bytes()):
        bits = np.frombuffer(data["data"], np.uint16).astype(np.uint32) << 16
        np.testing.assert_array_equal(bits.view(np.float32).reshape(data["shape"]), weights[name], err_msg=name)


def test_the_recommended_sampling_is_what_silent_requests_get(source: models.Source, tmp_path: Path) -> None:
    made = models.ensure("tiny", tmp_path / "models")
    assert sampling_defaults(made) == {"temperature": 0.5}


def test_config_is_that_of_the_model(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    config = GgufModel(write_gguf(tmp_path / "m.gguf", weights)).config()
    assert config["num_hidden_layers"] == LAYERS
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (HEADS, KV_HEADS, DIM)
    assert config["tie_word_embeddings"] is True
    assert config["rms_norm_eps"] == 1e-5


def test_tokenizer_splits_digits_and_applies_merges_elsewhere(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_str(
        json.dumps(GgufModel(write_gguf(tmp_path / "m.gguf", weights)).tokenizer())
    )
    assert tokenizer.encode("ab12").tokens == ["ab", "1", "2"]
    assert tokenizer.encode("<|start|>a").ids == [1, 2]


@pytest.mark.parametrize(("field", "value"), [("pre", "unheard-of"), ("architecture", "mamba")])
def test_an_unknown_kind_of_model_is_refused(
    field: str, value: str, tmp_path: Path, weights: dict[str, np.ndarray]
) -> None:
    path = write_gguf(tmp_path / "m.gguf", weights, **{field: value})
    with pytest.raises(ValueError, match=value):
        GgufModel(path)


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -1.00390625, 1.005, 0.0, -0.0], np.float32)
    expected = [0x3F80, 0x3F80, 0x3F82, 0xBF80, 0x3F81, 0x0000, 0x8000]
    assert _bfloat16_bits(values).tolist() == expected


def _header(path: Path) -> dict[str, object]:
    raw = path.read_bytes()
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])


# ---- ensure


def test_made_once_then_found(source: models.Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = models.ensure("tiny", tmp_path / "models")
    assert {file.name for file in first.iterdir()} == source.outcome.keys() | {models.MANIFEST}
    monkeypatch.setattr(models, "_make", lambda *_: pytest.fail("converted again"))
    assert models.ensure("tiny", tmp_path / "models") == first


def test_two_at_once_convert_once(source: models.Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = models._make
    monkeypatch.setattr(models, "_make", lambda *args: (calls.append(args), original(*args)))
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: models.ensure("tiny", tmp_path / "models"), range(4)))
    assert len(found) == len(calls) == 1


def _truncate(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"")


def _lose_manifest(directory: Path) -> None:
    (directory / models.MANIFEST).unlink()


def _break_manifest(directory: Path) -> None:
    (directory / models.MANIFEST).write_text("[]")


@pytest.mark.parametrize("damage", [_truncate, _lose_manifest, _break_manifest])
def test_a_damaged_model_is_made_again(damage: Callable[[Path], None], source: models.Source, tmp_path: Path) -> None:
    directory = models.ensure("tiny", tmp_path / "models")
    damage(directory)
    assert models.ensure("tiny", tmp_path / "models") == directory
    assert models.verify("tiny", tmp_path / "models") == []


def test_verify_names_changed_and_missing_files(source: models.Source, tmp_path: Path) -> None:
    directory = models.ensure("tiny", tmp_path / "models")
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").unlink()
    assert sorted(models.verify("tiny", tmp_path / "models")) == ["config.json", "tokenizer.json"]


def test_a_wrong_source_is_refused_and_leaves_nothing(
    source: models.Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.gguf"
    shutil.copy(models.source_path(source), other)
    with other.open("ab") as file:
        file.write(b"x")
    monkeypatch.setattr(models, "source_path", lambda _: other)
    with pytest.raises(ConfigurationError, match="sha256"):
        models.ensure("tiny", tmp_path / "models")
    assert [file.name for file in (tmp_path / "models").iterdir()] == [".tiny.lock"]


def test_another_outcome_is_refused_and_leaves_nothing(
    source: models.Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = dataclasses.replace(source, outcome=source.outcome | {"config.json": "0" * 64})
    monkeypatch.setitem(models.SOURCES, "tiny", wrong)
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        models.ensure("tiny", tmp_path / "models")
    assert [file.name for file in (tmp_path / "models").iterdir()] == [".tiny.lock"]


def test_resolve_takes_a_directory_or_a_name(source: models.Source, tmp_path: Path) -> None:
    directory = models.ensure("tiny", tmp_path / "models")
    assert models.resolve(str(directory)) == directory
    assert models.resolve("tiny", tmp_path / "models") == directory
    with pytest.raises(ConfigurationError, match="'nowhere'"):
        models.resolve("nowhere")


def test_unknown_names_and_missing_packages_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="unknown model 'x'"):
        models.ensure("x")
    with pytest.raises(ConfigurationError, match="no-such-package"):
        models.source_path(models.Source("no-such-package", "f", "", {}, {}))
