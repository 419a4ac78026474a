"""The decode role's process: device, pool, engine and worker put together and served."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from decode_worker.engines import factory
from decode_worker.engines.base import Engine
from decode_worker.lease import LeaseLimits
from decode_worker.metrics import DecodeMetrics
from decode_worker.npu.base import NpuDevice, OutOfDeviceMemory
from decode_worker.npu.emulated import EmulatedNpu
from decode_worker.pool import KVPool
from decode_worker.receivers import receiver
from decode_worker.settings import DecodeSettings
from decode_worker.worker import DecodeWorker, WorkerLimits
from transport.backends.base import Receiver, ReceiverEvents
from transport.errors import ConfigurationError
from transport.generation import new_generation
from transport.http import bind, serve, worker_app
from transport.logging import setup_logging
from transport.messages import ModelInfo
from transport.model import eos_token_ids, model_info
from transport.serve import run as run_loop

log = logging.getLogger(__name__)

FLUSH_S = 1.0
"""Seconds for the last messages to reach the routers when the engine has failed."""

MakeEngine = Callable[[DecodeSettings, NpuDevice, KVPool], Engine]


def run(settings: DecodeSettings) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigurationError at start, EngineFailed when the engine breaks."""
    setup_logging("decode", settings.log_level, as_json=settings.log_json, secrets=[settings.secret])
    run_loop(main(settings))


async def main(
    settings: DecodeSettings,
    make_engine: MakeEngine | None = None,
    on_started: Callable[[int], None] = lambda port: None,
) -> None:
    """`run` inside a running loop. `make_engine` replaces the configured engine; `on_started(port)`: it serves now."""
    sock = bind(settings.host, settings.port)  # before the model is loaded: a taken port is said at once
    try:
        device, worker, registry = _build(settings, make_engine or factory.make_engine)
    except BaseException:
        sock.close()
        raise
    app = worker_app("decode", settings, worker, info=worker.info, ready=worker.ready, registry=registry)

    def started(port: int) -> None:
        described = f"{_describe(worker.pool)}, transport {settings.transport}"
        log.info("decode worker %s ready on %s port %d: %s", worker.name, settings.host, port, described)
        on_started(port)

    serving: asyncio.Task[None] | None = None
    working: asyncio.Task[None] | None = None
    try:
        await worker.start()
        working = asyncio.create_task(worker.run(), name="worker")
        serving = asyncio.create_task(
            serve(
                app,
                settings.host,
                settings.port,
                sock=sock,
                drain=worker.drain,
                grace_s=settings.grace_s,
                max_frame_bytes=settings.max_frame_bytes,
                on_started=started,
            )
        )
        done, _ = await asyncio.wait({serving, working}, return_when=asyncio.FIRST_COMPLETED)
        if working in done:
            await asyncio.sleep(FLUSH_S)
            working.result()
        serving.result()
    finally:
        for task in (serving, working):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
        await worker.close()
        device.close()
        sock.close()


def open_device(settings: DecodeSettings) -> NpuDevice:
    """The device that the settings name. Raises ConfigurationError where it cannot be had."""
    if settings.device == "emulated":
        return EmulatedNpu(settings.channels, settings.bank_bytes)
    from decode_worker.npu.tenstorrent.opening import open_chip

    return open_chip(settings.device_id, simulator=settings.simulator)


def _build(settings: DecodeSettings, make_engine: MakeEngine) -> tuple[NpuDevice, DecodeWorker, CollectorRegistry]:
    model = model_info(settings.model, settings.model_name, settings.max_model_len)
    device = open_device(settings)
    try:
        return device, *_build_on(device, model, settings, make_engine)
    except BaseException:
        device.close()
        raise


def _build_on(
    device: NpuDevice, model: ModelInfo, settings: DecodeSettings, make_engine: MakeEngine
) -> tuple[DecodeWorker, CollectorRegistry]:
    try:
        pool = KVPool(
            device,
            settings.geometry(device.get_device_num_bank()),
            kv_path=settings.kv_path,
            staging_size=settings.staging_bytes,
            source_dtype=settings.dtype,
            slots=settings.staging_slots,
            slot_bytes=settings.staging_slot_bytes,
            checksum=settings.checksum,
        )
    except OutOfDeviceMemory as error:
        raise ConfigurationError(
            f"the KV pool does not fit the device ({error}): lower num_blocks or kv_bytes, or raise bank_bytes"
        ) from error
    generation = new_generation()
    make = receiver(settings, generation, pool)

    def make_receiver(events: ReceiverEvents) -> Receiver:
        made = make(events)
        metrics.watch_data_plane(made)
        return made

    registry = CollectorRegistry()
    metrics = DecodeMetrics(registry)
    worker = DecodeWorker(
        name=settings.name,
        generation=generation,
        model=model,
        eos_ids=eos_token_ids(settings.model),
        pool=pool,
        engine=make_engine(settings, device, pool),
        make_receiver=make_receiver,
        metrics=metrics,
        limits=WorkerLimits(
            max_batch=settings.max_batch,
            status_interval_s=settings.status_interval_s,
            stall_s=settings.stall_s,
            relayout_threads=settings.relayout_threads,
            leases=LeaseLimits(settings.lease_ttl_s, settings.lease_max_hold_s, settings.watermark),
        ),
    )
    return worker, registry


def _describe(pool: KVPool) -> str:
    """The pool in words, for the log."""
    kv = pool.geometry
    return (
        f"{kv.num_blocks} blocks of {kv.block_size} tokens, {kv.dtype}, {kv.num_channels} channels of "
        f"{pool.device.name}, kv_path {pool.kv_path}"
    )
