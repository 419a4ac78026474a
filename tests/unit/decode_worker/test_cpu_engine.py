"""The CPU engine against transformers, on tiny random models, over poisoned channels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_models import ArrayDevice, reference_logits, relative_error, rounded_reference_logits, save_tiny_llama

from decode_worker.engines.base import DecodeBatch
from decode_worker.engines.cpu.engine import CpuEngine
from transport.errors import ConfigurationError
from transport.geometry import KVGeometry

GEOMETRY = KVGeometry(2, 2, 32, 32, 16, 8, "float32")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("tiny")
    return path, save_tiny_llama(path)


def make(path: Path, geometry: KVGeometry, dtype: str = "float32", threads: int = 1) -> CpuEngine:
    device = ArrayDevice(geometry)
    return CpuEngine(path, device, geometry, device.bases, dtype=dtype, threads=threads)


def run(engine: CpuEngine, sequences: list[np.ndarray], starts: list[int], seed: int = 0) -> list[np.ndarray]:
    """Feed the sequences token by token in one batch, each from the step in `starts` on → logits [T, V] of each."""
    geometry = engine.geometry
    width = max(-(-len(s) // geometry.block_size) for s in sequences)
    blocks = np.random.default_rng(seed).permutation(geometry.num_blocks)
    tables = np.zeros((len(sequences), width), np.int32)
    at = 0
    for row, sequence in enumerate(sequences):
        count = -(-len(sequence) // geometry.block_size)
        tables[row, :count] = blocks[at : at + count]
        at += count
    out: list[list[np.ndarray]] = [[] for _ in sequences]
    for step in range(max(start + len(s) for start, s in zip(starts, sequences, strict=True))):
        rows = [r for r, s in enumerate(sequences) if 0 <= step - starts[r] < len(s)]
        if not rows:
            continue
        positions = np.array([step - starts[r] for r in rows], np.int32)
        tokens = np.array([sequences[r][p] for r, p in zip(rows, positions, strict=True)], np.int32)
        logits = engine.step(DecodeBatch(tokens, positions, tables[rows])).logits()
        assert logits.shape == (len(rows), engine.vocab_size)
        assert logits.dtype == np.float32
        for row, values in zip(rows, logits, strict=True):
            out[row].append(values)
    return [np.stack(each) for each in out]


def sequences(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 211, length).astype(np.int32) for length in lengths]


@pytest.mark.parametrize(("block_size", "channels"), [(32, 8), (64, 7), (32, 1), (128, 3)])
def test_ragged_batches_give_the_logits_of_transformers(tiny: tuple[Path, Any], block_size: int, channels: int) -> None:
    path, model = tiny
    engine = make(path, replace(GEOMETRY, block_size=block_size, num_channels=channels))
    given = sequences(1, 31, 33, 70, 100)
    for logits, tokens in zip(run(engine, given, [40, 0, 7, 3, 0]), given, strict=True):
        assert relative_error(logits, reference_logits(model, tokens)) < 1e-5


@pytest.mark.parametrize(
    "overrides",
    [
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 6},
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
    ids=["tied", "biases", "no groups", "one KV head of 128", "llama3 rope"],
)
def test_variants_of_llama_give_the_logits_of_transformers(tmp_path: Path, overrides: dict[str, Any]) -> None:
    model = save_tiny_llama(tmp_path, **overrides)
    geometry = replace(
        GEOMETRY,
        num_kv_heads=overrides.get("num_key_value_heads", 2),
        head_dim=overrides.get("head_dim", 32),
    )
    (logits,) = run(make(tmp_path, geometry), given := sequences(75), [0])
    assert relative_error(logits, reference_logits(model, given[0])) < 1e-5


def test_interleaved_keys_change_the_pool_but_not_the_logits(tiny: tuple[Path, Any]) -> None:
    path, model = tiny
    engine = make(path, replace(GEOMETRY, rope="interleaved"))
    (logits,) = run(engine, given := sequences(40), [0])
    assert relative_error(logits, reference_logits(model, given[0])) < 1e-5


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "bfp8_b", "bfp4_b"])
def test_a_narrow_pool_changes_the_logits_by_the_rounding_of_k_and_v_alone(
    tiny: tuple[Path, Any], kv_dtype: Any
) -> None:
    path, _ = tiny
    (logits,) = run(make(path, replace(GEOMETRY, dtype=kv_dtype)), given := sequences(64), [0])
    model = save_tiny_llama(path)
    plain = relative_error(logits, reference_logits(model, given[0]))
    rounded = relative_error(logits, rounded_reference_logits(model, given[0], kv_dtype))
    assert rounded < 2e-3 < plain  # where a value lies on the edge between two codes, the sides may differ


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32"])
def test_bfloat16_weights_stay_within_their_rounding(tiny: tuple[Path, Any], kv_dtype: Any) -> None:
    path, model = tiny
    (logits,) = run(make(path, replace(GEOMETRY, dtype=kv_dtype), "bfloat16"), given := sequences(64), [0])
    assert 1e-4 < relative_error(logits, reference_logits(model, given[0])) < 0.05


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_half_precision_checkpoints_are_widened_exactly(tmp_path: Path, stored: str) -> None:
    model = save_tiny_llama(tmp_path, dtype=stored)
    (logits,) = run(make(tmp_path, GEOMETRY), given := sequences(20), [0])
    assert relative_error(logits, reference_logits(model, given[0])) < 1e-5


def test_a_float32_checkpoint_is_rounded_as_torch_rounds_it(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "wide")
    save_tiny_llama(tmp_path / "narrow", dtype="bfloat16")
    given = sequences(10)
    (wide,) = run(make(tmp_path / "wide", GEOMETRY, "bfloat16"), given, [0])
    (narrow,) = run(make(tmp_path / "narrow", GEOMETRY, "bfloat16"), given, [0])
    # norms stay float32 in the one and were rounded in the other
    assert relative_error(wide, narrow) < 0.02


def test_logits_do_not_depend_on_batch_threads_or_blocks(tiny: tuple[Path, Any]) -> None:
    path, _ = tiny
    given = sequences(50, 45, 33, 40, 12, 9, 3, 20, 35)
    together = run(make(path, GEOMETRY), given, [0] * 9)
    threaded_engine = make(path, GEOMETRY, threads=3)
    threaded = run(threaded_engine, given, [0] * 9, seed=1)
    threaded_engine.close()
    for row, tokens in enumerate(given[:3]):
        (alone,) = run(make(path, GEOMETRY), [tokens], [0], seed=2)
        np.testing.assert_array_equal(alone, together[row])
        np.testing.assert_array_equal(threaded[row], together[row])


def test_a_step_writes_one_row_per_head_and_tensor_and_nothing_else(tiny: tuple[Path, Any]) -> None:
    path, _ = tiny
    device = ArrayDevice(GEOMETRY)
    engine = CpuEngine(path, device, GEOMETRY, device.bases, dtype="float32")
    before = [channel.copy() for channel in device.channels]
    assert all((channel == 0xFF).all() for channel in before), "construction must not touch the pool"
    engine.step(DecodeBatch(np.array([7], np.int32), np.array([0], np.int32), np.array([[3]], np.int32)))
    expected = set()
    for tensor in range(GEOMETRY.num_tensors):
        for head in range(GEOMETRY.num_kv_heads):
            channel, offset = GEOMETRY.locate(GEOMETRY.page_index(3, head, 0, 0))
            for half in (0, 1024):  # the first row of the upper two faces
                start = device.bases[tensor] + offset + half
                expected.update((channel, byte) for byte in range(start, start + 64))
    changed = {
        (channel, int(byte))
        for channel, (now, then) in enumerate(zip(device.channels, before, strict=True))
        for byte in np.flatnonzero(now != then)
    }
    assert changed <= expected
    assert len(changed) > 0.9 * len(expected)


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        (([211], [0], [[0]]), "token"),
        (([-1], [0], [[0]]), "token"),
        (([1], [32], [[0]]), "position"),
        (([1], [-1], [[0]]), "position"),
        (([1], [0], [[16]]), "block"),
        (([1], [0], [[-1]]), "block"),
        (([1, 2], [0], [[0]]), "rows"),
        (([], [], np.zeros((0, 1))), "rows"),
    ],
)
def test_a_batch_that_points_outside_is_refused(tiny: tuple[Path, Any], batch: tuple[Any, ...], named: str) -> None:
    engine = make(tiny[0], GEOMETRY)
    with pytest.raises(ValueError, match=named):
        engine.step(DecodeBatch(*(np.array(field, np.int32) for field in batch)))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_layers": 3}, "num_layers"),
        ({"num_kv_heads": 4}, "num_kv_heads"),
        ({"head_dim": 64}, "head_dim"),
        ({"layout": "gpu", "num_channels": 1}, "layout"),
    ],
)
def test_a_pool_of_another_shape_is_refused(tiny: tuple[Path, Any], change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        make(tiny[0], replace(GEOMETRY, **change))


def test_devices_and_bases_that_do_not_fit_are_refused(tiny: tuple[Path, Any]) -> None:
    path, _ = tiny
    device = ArrayDevice(GEOMETRY)
    with pytest.raises(ConfigurationError, match="bases are needed"):
        CpuEngine(path, device, GEOMETRY, device.bases[:-1], dtype="float32")
    with pytest.raises(ConfigurationError, match="leaves its channel"):
        CpuEngine(path, device, GEOMETRY, [base + 65 for base in device.bases], dtype="float32")
    with pytest.raises(ConfigurationError, match="8 channels"):
        CpuEngine(path, device, replace(GEOMETRY, num_channels=7), device.bases, dtype="float32")
    with pytest.raises(ConfigurationError, match="dtype"):
        CpuEngine(path, device, GEOMETRY, device.bases, dtype="float16")
    with pytest.raises(ConfigurationError, match="threads"):
        CpuEngine(path, device, GEOMETRY, device.bases, dtype="float32", threads=0)
