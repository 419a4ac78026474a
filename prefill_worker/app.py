"""The prefill worker's process: engine, control socket, service and HTTP, put together and taken down."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from prefill_worker.control.messages import LocalKV, Start
from prefill_worker.control.service_end import ServiceEnd
from prefill_worker.engine import Engine
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.service import PrefillService
from prefill_worker.settings import PrefillSettings
from transport.errors import EngineFailed
from transport.generation import new_generation
from transport.http import bind, serve, worker_app
from transport.logging import setup_logging
from transport.messages import Writer
from transport.model import model_info
from transport.serve import run as run_loop

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 60.0
FLUSH_S = 1.0
"""Seconds for the last messages to reach the routers when the engine has failed."""


def run(settings: PrefillSettings) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigurationError at start, EngineFailed when the engine breaks."""
    setup_logging("prefill", settings.log_level, as_json=settings.log_json, secrets=[settings.secret])
    # Until the loop handles signals: an exception runs the clean-up, which ends the engine's process too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(bind(settings.host, settings.port))  # a taken port is said at once
        control = stack.enter_context(contextlib.closing(ServiceEnd()))

        def in_engine() -> None:
            """The forked engine must not keep our sockets open when we die."""
            sock.close()
            control.close_inherited()

        # The engine forks, so it starts before the loop and before any thread.
        engine = Engine.start(settings, control.path, in_engine)
        stack.callback(engine.shutdown)
        run_loop(main(settings, sock, control, engine))
        gc.freeze()  # or the interpreter's last collection walks all that vLLM imported, for seconds


async def main(settings: PrefillSettings, sock: socket.socket, control: ServiceEnd, engine: Engine) -> None:
    """`run` inside a running loop, with a started engine."""
    worker = Writer(worker=settings.name, generation=new_generation())
    model = model_info(settings.model, settings.model_name, engine.max_model_len)
    registry = CollectorRegistry()
    metrics = PrefillMetrics(registry)
    service = PrefillService(
        worker, model, engine, control, metrics, max_queued=settings.max_queued, stall_s=settings.stall_s
    )
    start = Start(
        token=settings.secret,
        writer=worker,
        fingerprint=model.fingerprint,
        hold_ttl_s=settings.hold_ttl_s,
        push_chunk_bytes=settings.push_chunk_bytes,
        push_threads=settings.push_threads,
        rdma_devices=settings.devices,
        push_staging_bytes=settings.push_staging_bytes,
    )
    kv = await control.serve(start, service.on_engine_message, service.engine_lost, JOIN_TIMEOUT_S)
    try:
        await _serve(settings, sock, service, engine, kv, registry)
    finally:
        control.stop_watching()
        await asyncio.to_thread(engine.shutdown)
        await control.wait_closed()


async def _serve(
    settings: PrefillSettings,
    sock: socket.socket,
    service: PrefillService,
    engine: Engine,
    kv: LocalKV,
    registry: CollectorRegistry,
) -> None:
    await engine.warm_up(min(settings.max_num_batched_tokens, engine.max_model_len - 1))

    def info() -> Mapping[str, Any]:
        return {**service.hello().model_dump(), "kv": kv.model_dump(), "kv_cache_tokens": _tokens(kv)}

    def started(port: int) -> None:
        log.info("prefill worker %s ready on %s port %d", settings.name, settings.host, port)

    app = worker_app("prefill", settings, service, info=info, ready=service.unready_reason, registry=registry)
    serving = asyncio.create_task(
        serve(
            app,
            settings.host,
            settings.port,
            sock=sock,
            drain=service.drain,
            grace_s=settings.grace_s,
            max_frame_bytes=settings.max_frame_bytes,
            on_started=started,
        )
    )
    broken = asyncio.create_task(service.failed.wait())
    try:
        await asyncio.wait({serving, broken}, return_when=asyncio.FIRST_COMPLETED)
        if service.failed.is_set():
            await asyncio.sleep(FLUSH_S)
            raise EngineFailed(service.unready_reason() or "the prefill engine died")
        serving.result()
    finally:
        for task in (broken, serving):
            task.cancel()
        await asyncio.gather(broken, serving, return_exceptions=True)


def _tokens(kv: LocalKV) -> int:
    return kv.num_blocks * kv.block_size
