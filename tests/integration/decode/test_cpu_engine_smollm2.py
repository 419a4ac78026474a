"""The CPU engine on a real model, against transformers in float32."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decode_worker.engines.base import DecodeBatch
from decode_worker.engines.cpu.engine import CpuEngine
from decode_worker.npu.emulated import EmulatedNpu
from decode_worker.pool import KVPool
from transport.geometry import KVGeometry

TOKENS = 100


@pytest.fixture(scope="module")
def model() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory."""
    given = os.environ.get("HAWK_TEST_MODEL")
    if given:
        return Path(given)
    from deploy.model import ensure

    return ensure(name="smollm2-135m-instruct")


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [2, T] and transformers' float32 logits [2, T, V]."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    tokens = np.random.default_rng(11).integers(10, 49000, (2, TOKENS)).astype(np.int32)
    with torch.inference_mode():
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        return tokens, reference(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "channels", "bound"),
    [
        ("float32", "float32", 8, 1e-5),
        ("float32", "float32", 7, 1e-5),
        ("bfloat16", "bfloat16", 8, 3e-2),
        ("bfloat16", "bfp8_b", 8, 0.2),
    ],
)
def test_logits_of_a_real_model(
    model: Path, expected: tuple[np.ndarray, np.ndarray], dtype: Any, kv_dtype: Any, channels: int, bound: float
) -> None:
    tokens, logits = expected
    geometry = KVGeometry(30, 3, 64, 32, 10, channels, kv_dtype)
    device = EmulatedNpu(channels, geometry.num_tensors * (geometry.bank_bytes + 64))
    engine = CpuEngine(model, device, geometry, KVPool(device, geometry).bases, dtype=dtype)
    blocks = np.array([[9, 0, 4, 2], [1, 8, 3, 7]], np.int32)
    worst, lag = 0.0, 7  # the second sequence joins later: positions differ within the batch
    for step in range(TOKENS):
        rows = [0, 1] if step >= lag else [0]
        positions = np.array([step, step - lag][: len(rows)], np.int32)
        given = np.array([tokens[r, p] for r, p in zip(rows, positions, strict=True)], np.int32)
        actual = engine.step(DecodeBatch(given, positions, blocks[rows])).logits()
        for row, position, values in zip(rows, positions, actual, strict=True):
            wanted = logits[row, position]
            worst = max(worst, float(np.abs(values - wanted).max() / np.abs(wanted).max()))
    engine.close()
    device.close()
    assert worst < bound
