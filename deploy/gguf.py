"""GGUF → Hugging Face model directory, for the Llama architecture: numpy alone, one tensor in memory at a time.

The outcome is deterministic (equal input, equal bytes), so that its checksums can be pinned. Weights become
bfloat16. transformers can load a GGUF file too, to the same weights, but needs torch and five times as long, and
drops the digit split of SmolLM2's tokenizer (" ½" and " ³" get other ids than the model was trained with).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Progress = Callable[[int], None]
"""Called with the bytes of each tensor once it is written."""

#: GGUF tensor names inside a layer → HF names inside a layer
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}

#: llama.cpp's names of pre-tokenisers → those of `tokenizers`, whose split they stand for
PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}
CONTROL_TOKEN = 3


class GgufModel:
    """One GGUF file, opened (memory-mapped) for conversion. Raises ValueError where it is not a known Llama model."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self._reader = GGUFReader(str(path))
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise ValueError(f"{path.name}: architecture {architecture!r} is not supported, expected 'llama'")
        pre = self._field("tokenizer.ggml.pre")
        if pre not in PRE_TOKENIZERS:
            raise ValueError(f"{path.name}: pre-tokeniser {pre!r} is not supported, expected {sorted(PRE_TOKENIZERS)}")

    def _field(self, name: str) -> Any:
        field = self._reader.get_field(name)
        if field is None:
            raise ValueError(f"the GGUF file has no field {name!r}")
        return field.contents()

    def convert(self, out: Path, sampling: Mapping[str, Any], progress: Progress = lambda _: None) -> None:
        """Write the whole model directory into `out` (which exists and is empty).

        `sampling`: what requests get that say nothing, which a GGUF file does not hold.
        """
        self._write_weights(out / "model.safetensors", progress)
        _dump(out / "config.json", self.config())
        _dump(out / "generation_config.json", {**self.special_tokens(), **sampling})
        _dump(out / "tokenizer.json", self.tokenizer(), indent=None)
        _dump(out / "tokenizer_config.json", self.tokenizer_config())
        (out / "chat_template.jinja").write_text(self._field("tokenizer.chat_template"), encoding="utf-8")

    @property
    def weight_bytes(self) -> int:
        """Size of the converted weights in bytes (bfloat16)."""
        return sum(2 * int(np.prod(tensor.shape)) for tensor in self._reader.tensors)

    # ---- configuration

    def config(self) -> dict[str, Any]:
        heads = self._field("llama.attention.head_count")
        hidden = self._field("llama.embedding_length")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            **self.special_tokens(),
            "dtype": "bfloat16",
            "head_dim": hidden // heads,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "initializer_range": 0.02,
            "intermediate_size": self._field("llama.feed_forward_length"),
            "max_position_embeddings": self._field("llama.context_length"),
            "mlp_bias": False,
            "num_attention_heads": heads,
            "num_hidden_layers": self._field("llama.block_count"),
            "num_key_value_heads": self._field("llama.attention.head_count_kv"),
            "rms_norm_eps": float(f"{self._field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_parameters": {"rope_theta": float(self._field("llama.rope.freq_base")), "rope_type": "default"},
            "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in self._reader.tensors),
            "use_cache": True,
            "vocab_size": self._field("llama.vocab_size"),
        }

    def special_tokens(self) -> dict[str, Any]:
        names = {"bos": "bos", "eos": "eos", "pad": "padding"}
        return {f"{hf}_token_id": self._field(f"tokenizer.ggml.{gguf}_token_id") for hf, gguf in names.items()}

    # ---- tokenizer

    def tokenizer(self) -> dict[str, Any]:
        """`tokenizer.json`: byte-level BPE as llama.cpp's `gpt2` model."""
        tokens, kinds = self._field("tokenizer.ggml.tokens"), self._field("tokenizer.ggml.token_type")
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": i, "content": token, **plain}
                for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
                if kind == CONTROL_TOKEN
            ],
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": PRE_TOKENIZERS[self._field("tokenizer.ggml.pre")],
            },
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {token: i for i, token in enumerate(tokens)},
                "merges": self._field("tokenizer.ggml.merges"),
            },
        }

    def tokenizer_config(self) -> dict[str, Any]:
        tokens = self._field("tokenizer.ggml.tokens")
        ids = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self._field("llama.context_length"),
            "clean_up_tokenization_spaces": False,
            **{f"{hf}_token": tokens[self._field(f"tokenizer.ggml.{gguf}_token_id")] for hf, gguf in ids.items()},
        }

    # ---- weights

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        """(HF name, GGUF tensor) in the file's order. Raises ValueError on a tensor that has no place."""
        for tensor in self._reader.tensors:
            match tensor.name.split("."):
                case ["blk", layer, part, "weight"] if part in LAYER_TENSORS:
                    yield f"model.layers.{layer}.{LAYER_TENSORS[part]}.weight", tensor
                case ["output", "weight"]:
                    yield "lm_head.weight", tensor
                case _ if tensor.name in TOP_TENSORS:
                    yield TOP_TENSORS[tensor.name], tensor
                case _:
                    raise ValueError(f"unexpected tensor {tensor.name!r}")

    def _write_weights(self, path: Path, progress: Progress) -> None:
        """One safetensors file, written tensor by tensor: u64 header length, JSON header, data."""
        tensors, header, offset = list(self._tensors()), {}, 0
        for name, tensor in tensors:
            shape = [int(n) for n in reversed(tensor.shape)]
            size = 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for name, tensor in tensors:
                out.write(_bfloat16_bits(self._dequantise(name, tensor)).tobytes())
                progress(header[name]["data_offsets"][1] - header[name]["data_offsets"][0])

    def _dequantise(self, name: str, tensor: Any) -> np.ndarray:
        """float32, in HF's order of rows."""
        from gguf.quants import dequantize

        values: np.ndarray = dequantize(tensor.data, tensor.tensor_type)
        if name.endswith("q_proj.weight"):
            return _rotate_halves(values, self._field("llama.attention.head_count"))
        if name.endswith("k_proj.weight"):
            return _rotate_halves(values, self._field("llama.attention.head_count_kv"))
        return values


def _rotate_halves(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows of Q or K [heads · D, hidden] from llama.cpp's interleaved RoPE pairs to HF's two halves."""
    pairs = weights.reshape(heads, weights.shape[0] // heads // 2, 2, weights.shape[1])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def _bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """uint16 bits of float32 `values` rounded to the nearest bfloat16, ties to even (finite values only)."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _dump(path: Path, value: dict[str, Any], indent: int | None = 2) -> None:
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
