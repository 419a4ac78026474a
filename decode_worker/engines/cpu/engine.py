"""The engine object: checks, buffers and threads around the compiled step."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numba
import numpy as np

from decode_worker.engines.base import DecodeBatch, HostScores, check_batch
from decode_worker.engines.checkpoint import ModelConfig, read_config
from decode_worker.engines.cpu.step import Activations, Pool, Rows, Work, step
from decode_worker.engines.cpu.tiles import KIND
from decode_worker.engines.cpu.weights import load_weights
from decode_worker.npu.base import NpuDevice
from transport.errors import ConfigurationError
from transport.geometry import TILE, KVGeometry

log = logging.getLogger(__name__)


class CpuEngine:
    """Decodes Llama-family models on the host CPU out of `device.host_channels()`; see `Engine`.

    `bases[t]` is the byte offset of tensor t (2·layer: K, 2·layer + 1: V) in every channel. `dtype` is that of
    the weights; activations and sums are float32 always, and a row's logits depend neither on the rows beside
    it nor on the number of threads. Raises ConfigurationError where model, geometry and device do not fit.
    """

    def __init__(
        self,
        model_dir: Path,
        device: NpuDevice,
        geometry: KVGeometry,
        bases: Sequence[int],
        *,
        dtype: Literal["bfloat16", "float32"],
        threads: int = 1,
    ) -> None:
        if dtype not in ("bfloat16", "float32"):
            raise ConfigurationError(f"dtype must be bfloat16 or float32, got {dtype!r}")
        if threads < 1:
            raise ConfigurationError(f"threads must be at least 1, got {threads}")
        self._config = read_config(model_dir)
        _check_geometry(self._config, geometry)
        self._geometry = geometry
        self._channels = _checked_channels(device, geometry, bases)
        self._pool = Pool(
            channels=np.array([channel.ctypes.data for channel in self._channels], np.int64),
            bases=np.array(bases, np.int64),
            kind=KIND[geometry.dtype],
            heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            block_size=geometry.block_size,
            page_bytes=geometry.page_bytes,
            interleave=geometry.rope == "interleaved",
        )
        self._threads = threads
        self._others = ThreadPoolExecutor(threads - 1, "engine") if threads > 1 else None
        started = time.monotonic()
        self._weights = load_weights(model_dir, self._config, dtype)
        log.info("weights loaded in %.1f s, %s", time.monotonic() - started, dtype)
        self._compile()

    @property
    def geometry(self) -> KVGeometry:
        return self._geometry

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    def step(self, batch: DecodeBatch) -> HostScores:
        """See `Engine.step`. Raises ValueError for a token, position or block that is out of range."""
        check_batch(batch, self._config.vocab_size, self._geometry)
        arguments = self._arguments(batch)
        if self._others is None:
            step(*arguments[0])
        else:
            others = [self._others.submit(step, *each) for each in arguments[1:]]
            step(*arguments[0])
            for other in others:
                other.result()
        return HostScores(arguments[0][7])

    def close(self) -> None:
        if self._others is not None:
            self._others.shutdown()

    def _compile(self) -> None:
        """Compile (or load from the cache) for the types that `step` will pass, without touching any block."""
        started = time.monotonic()
        zero = np.zeros(1, np.int32)
        arguments = self._arguments(DecodeBatch(zero, zero, zero[np.newaxis]))[0]
        log.info("compiling the decode kernels (20 s or more; cached)")
        step.compile(tuple(numba.typeof(argument) for argument in arguments))
        log.info("decode kernels ready in %.1f s", time.monotonic() - started)

    def _arguments(self, batch: DecodeBatch) -> list[tuple]:
        """Arguments of `step` for each thread; buffers are shared except `Work` and the thread's index."""
        config, rows = self._config, len(batch.tokens)
        angles = batch.positions.astype(np.float32)[:, np.newaxis] * config.inv_freq
        tokens = -(-(int(batch.positions.max()) + 1) // TILE) * TILE
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        group = config.num_heads // config.num_kv_heads

        def buffer(*shape: int) -> np.ndarray:
            return np.empty(shape, np.float32)

        activations = Activations(
            hidden=buffer(rows, config.hidden_size),
            qkv=buffer(rows, queries + 2 * keys),
            attended=buffer(rows, queries),
            gate_up=buffer(rows, 2 * config.intermediate_size),
            gated=buffer(rows, config.intermediate_size),
            sync=np.zeros(1, np.int64),
        )
        inputs = Rows(
            tokens=np.ascontiguousarray(batch.tokens, np.int32),
            positions=np.ascontiguousarray(batch.positions, np.int32),
            blocks=np.ascontiguousarray(batch.block_tables, np.int32),
            cos=np.cos(angles.astype(np.float64)).astype(np.float32),
            sin=np.sin(angles.astype(np.float64)).astype(np.float32),
        )
        logits = buffer(rows, config.vocab_size)
        out = []
        for thread in range(self._threads):
            work = Work(
                normed=buffer(rows, config.hidden_size),
                rows=buffer(TILE, config.head_dim),
                scores=buffer(group, tokens),
                totals=buffer(group),
                q=buffer(group, config.head_dim),
                k=buffer(config.head_dim),
            )
            out.append(
                (self._weights, self._pool, inputs, activations, work, np.float32(config.rms_norm_eps),
                 np.float32(config.head_dim**-0.5), logits, thread, self._threads)
            )  # fmt: skip
        return out


def _check_geometry(config: ModelConfig, geometry: KVGeometry) -> None:
    if geometry.layout != "npu":
        raise ConfigurationError(f"the CPU engine decodes from layout 'npu', not {geometry.layout!r}")
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        if getattr(config, name) != getattr(geometry, name):
            raise ConfigurationError(
                f"the model has {name} {getattr(config, name)}, the pool {getattr(geometry, name)}"
            )
    if config.num_heads % config.num_kv_heads:
        raise ConfigurationError(f"{config.num_heads} heads are no multiple of {config.num_kv_heads} KV heads")


def _checked_channels(device: NpuDevice, geometry: KVGeometry, bases: Sequence[int]) -> list[np.ndarray]:
    channels = device.host_channels()
    if channels is None:
        raise ConfigurationError(f"the CPU engine needs channels that the host can address; {device.name} has none")
    if len(channels) != geometry.num_channels:
        raise ConfigurationError(f"{device.name} has {len(channels)} channels, the geometry {geometry.num_channels}")
    if len(bases) != geometry.num_tensors:
        raise ConfigurationError(f"{geometry.num_tensors} tensor bases are needed, got {len(bases)}")
    for channel in channels:
        if min(bases) < 0 or max(bases) + geometry.bank_bytes > channel.nbytes:
            raise ConfigurationError(f"a tensor of {geometry.bank_bytes} bytes leaves its channel of {channel.nbytes}")
    return channels
