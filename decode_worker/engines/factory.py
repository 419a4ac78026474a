"""The engine that the settings ask for. Each is imported only when it is chosen: they load compilers and devices."""

from __future__ import annotations

from decode_worker.engines.base import Engine
from decode_worker.npu.base import NpuDevice
from decode_worker.pool import KVPool
from decode_worker.settings import DecodeSettings
from transport.model import model_info


def make_engine(settings: DecodeSettings, device: NpuDevice, pool: KVPool) -> Engine:
    """Raises ConfigurationError where model, pool and device do not fit the engine."""
    return {"cpu": _cpu, "numpy": _numpy, "ttnn": _ttnn}[settings.engine](settings, device, pool)


def _cpu(settings: DecodeSettings, device: NpuDevice, pool: KVPool) -> Engine:
    from decode_worker.engines.cpu.engine import CpuEngine

    return CpuEngine(settings.model, device, pool.geometry, pool.bases, dtype=settings.dtype, threads=settings.threads)


def _numpy(settings: DecodeSettings, device: NpuDevice, pool: KVPool) -> Engine:
    from decode_worker.engines.checkpoint import read_config
    from decode_worker.engines.ttnn.cache import DeviceCache
    from decode_worker.engines.ttnn.engine import TtnnEngine
    from decode_worker.engines.ttnn.numpy_ops import NumpyOps

    ops = NumpyOps(
        [DeviceCache(device, pool.geometry, pool.bases)],
        slots=settings.max_batch,
        block_size=pool.geometry.block_size,
        inv_freq=read_config(settings.model).inv_freq,
        rope=pool.geometry.rope,
        dtype=settings.dtype,
        threads=settings.threads,
    )
    return TtnnEngine(settings.model, ops, pool.geometry, _longest_table(settings))


def _ttnn(settings: DecodeSettings, device: NpuDevice, pool: KVPool) -> Engine:
    from transport.errors import ConfigurationError

    raise ConfigurationError("engine ttnn is not built in yet: use engine numpy")


def _longest_table(settings: DecodeSettings) -> int:
    """Blocks of the longest context."""
    longest = model_info(settings.model, settings.model_name, settings.max_model_len).max_model_len
    return -(-longest // settings.block_size)
