"""The graph of ttnn's operations in numpy against transformers and the CPU engine, on the emulated device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from decode_worker.engines.base import DecodeBatch
from decode_worker.engines.checkpoint import read_config
from decode_worker.engines.cpu.engine import CpuEngine
from decode_worker.engines.ttnn.cache import DeviceCache
from decode_worker.engines.ttnn.engine import TtnnEngine
from decode_worker.engines.ttnn.numpy_ops import NumpyOps
from decode_worker.npu.emulated import EmulatedNpu
from decode_worker.pool import KVPool
from transport.errors import ConfigurationError
from transport.geometry import KVGeometry
from transport.geometry.kv import KVDtype, RopeOrder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENS = 70
TABLES = np.array([[3, 5, 1], [0, 7, 2]], np.int32)
"""Blocks of two rows, out of order; block 4 and 6 belong to nobody."""
NOBODY = (4, 6)

CONFIGS = {
    "grouped": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    "biases": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "tied": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True},
    "llama3": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, npt.NDArray]:
    """(checkpoint directory, float32 logits [2, TOKENS, V] of `tokens()` by transformers); weights at random.

    The vocabulary, 301, is no multiple of a tile, and the hidden size is not heads times head_dim everywhere.
    """
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        vocab_size=301, hidden_size=128, intermediate_size=256, num_hidden_layers=2, **CONFIGS[request.param]
    )
    reference = transformers.LlamaForCausalLM(config).eval().float()
    for name, parameter in reference.named_parameters():
        sharp = 0.16 if "q_proj" in name or "k_proj" in name else 0.1  # attention that prefers some positions
        parameter.data.normal_(1.0 if "norm" in name else 0.0, sharp)
    directory = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(directory)
    with torch.no_grad():
        logits = reference(torch.from_numpy(tokens().astype(np.int64))).logits.numpy()
    return directory, logits


def tokens() -> npt.NDArray[np.int32]:
    return np.random.default_rng(5).integers(0, 301, (2, TOKENS)).astype(np.int32)


class Machine:
    """An engine on `chips` emulated devices."""

    def __init__(
        self,
        model_dir: Path,
        chips: int = 1,
        rope: RopeOrder = "half",
        dtype: KVDtype = "float32",
        channels: int = 8,
        cache_rope: RopeOrder | None = None,
    ) -> None:
        config = read_config(model_dir)
        self.geometry = KVGeometry(
            num_layers=config.num_layers,
            num_kv_heads=max(1, config.num_kv_heads // chips),
            head_dim=config.head_dim,
            block_size=32,
            num_blocks=8,
            num_channels=channels,
            dtype=dtype,
            rope=rope,
        )
        self.devices = [EmulatedNpu(channels, 1 << 22) for _ in range(chips)]
        self.pools = [KVPool(device, self.geometry) for device in self.devices]
        self.caches = [
            DeviceCache(device, self.geometry, pool.bases)
            for device, pool in zip(self.devices, self.pools, strict=True)
        ]
        ops = NumpyOps(
            self.caches, slots=4, block_size=32, inv_freq=config.inv_freq, rope=cache_rope or rope, dtype="float32"
        )
        self.engine = TtnnEngine(model_dir, ops, self.geometry, 3)

    def decode(self, given: npt.NDArray[np.int32], rows: list[int], first: int = 0) -> npt.NDArray[np.float32]:
        """Logits [rows, tokens, V] of the rows' tokens, one step each."""
        out = [
            self.engine.step(
                DecodeBatch(given[rows, t], np.full(len(rows), first + t, np.int32), TABLES[rows])
            ).logits()
            for t in range(given.shape[1])
        ]
        return np.stack(out, axis=1)


@pytest.mark.parametrize("chips", [1, 2])
@pytest.mark.parametrize("rope", ["half", "interleaved"])
def test_logits_are_those_of_transformers(model: tuple[Path, npt.NDArray], rope: RopeOrder, chips: int) -> None:
    directory, expected = model
    found = Machine(directory, chips, rope).decode(tokens(), [0, 1])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert (found.argmax(-1) == expected.argmax(-1)).all()


def test_weights_in_another_rope_order_than_the_cache_give_other_logits(model: tuple[Path, npt.NDArray]) -> None:
    directory, expected = model
    found = Machine(directory, rope="interleaved", cache_rope="half").decode(tokens(), [0, 1])
    assert np.abs(found - expected).max() > 0.05 * np.abs(expected).max()


def test_the_cpu_engine_goes_on_from_what_it_wrote(model: tuple[Path, npt.NDArray]) -> None:
    """Both engines read and write the same tiles: one continues the other's requests."""
    directory, expected = model
    machine = Machine(directory, channels=7)
    machine.decode(tokens()[:, :50], [0, 1])
    cpu = CpuEngine(directory, machine.devices[0], machine.geometry, machine.pools[0].bases, dtype="float32")
    for t in range(50, TOKENS):
        found = cpu.step(DecodeBatch(tokens()[:, t], np.full(2, t, np.int32), TABLES)).logits()
        np.testing.assert_allclose(found, expected[:, t], rtol=0, atol=1e-5 * np.abs(expected).max() + 1e-5)
    cpu.close()


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 0.03), ("bfp8_b", 0.12)])
def test_narrow_caches_stay_close(model: tuple[Path, npt.NDArray], dtype: KVDtype, bound: float) -> None:
    directory, expected = model
    found = Machine(directory, dtype=dtype).decode(tokens()[:, :40], [0, 1])
    assert 0 < np.abs(found - expected[:, :40]).max() < bound * np.abs(expected).max()


def test_nobody_elses_blocks_are_written(model: tuple[Path, npt.NDArray]) -> None:
    """One request of two, two slots idle: neither the other's blocks nor free ones change."""
    directory, _ = model
    machine = Machine(directory)
    for bank in range(8):
        machine.devices[0].host_channels()[bank][:] = 0x5A
    before = [channel.copy() for channel in machine.devices[0].host_channels()]
    machine.decode(tokens()[:, :40], [0])
    changed = set()
    size = machine.geometry.page_bytes
    for tensor, base in enumerate(machine.pools[0].bases):
        for page in range(machine.geometry.num_pages):
            bank, offset = machine.geometry.locate(page)
            span = slice(base + offset, base + offset + size)
            if (machine.devices[0].host_channels()[bank][span] != before[bank][span]).any():
                changed.add((tensor, page // machine.geometry.pages_per_block))
    assert {block for _, block in changed} == {3, 5}
    assert {tensor for tensor, _ in changed} == {0, 1, 2, 3}


def test_the_best_tokens_are_those_of_the_logits(model: tuple[Path, npt.NDArray]) -> None:
    directory, _ = model
    machine = Machine(directory, chips=2)
    scores = machine.engine.step(DecodeBatch(tokens()[:, 0], np.zeros(2, np.int32), TABLES))
    logits = scores.logits()
    assert logits.shape == (2, 301)
    for k in (1, 2, scores.max_top):
        ids, values = scores.top(k)
        order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
        assert (ids == order).all()
        assert (values == np.take_along_axis(logits, order, axis=1)).all()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (([301, 0], [0, 0], TABLES), "token must lie in 0…300, got 301"),
        (([0, 0], [96, 0], TABLES), "position must lie in 0…95, got 96"),
        (([0, 0], [0, 0], [[8, 0, 0], [0, 0, 0]]), "block must lie in 0…7, got 8"),
        (([0] * 5, [0] * 5, [[0]] * 5), "at most 4 rows"),
        (([0], [0], [[0, 0, 0, 0]]), "rows of 3 blocks, got 1 of 4"),
    ],
)
def test_a_batch_out_of_range_is_refused(model: tuple[Path, npt.NDArray], batch: tuple, message: str) -> None:
    directory, _ = model
    given = DecodeBatch(*(np.array(field, np.int32) for field in batch))
    with pytest.raises(ValueError, match=message):
        Machine(directory).engine.step(given)


def test_chips_that_cannot_share_the_heads_are_refused(model: tuple[Path, npt.NDArray]) -> None:
    directory, _ = model
    with pytest.raises(ConfigurationError, match="num_kv_heads"):
        Machine(directory, chips=3)
