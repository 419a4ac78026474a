"""Which data plane writers reach the pool by."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from decode_worker.pool import KVPool
from decode_worker.settings import DecodeSettings
from transport.backends.base import ReceiverEvents
from transport.backends.link.receiver import LinkReceiver


def receiver(settings: DecodeSettings, generation: str, pool: KVPool) -> Callable[[ReceiverEvents], LinkReceiver]:
    """How to make the receiver of the configured transport. Raises ConfigurationError where it cannot be had."""
    what = (settings.name, generation, settings.secret, pool.handed_out())

    def make(events: ReceiverEvents) -> LinkReceiver:
        if settings.transport == "shm":
            from transport.backends.shm import ShmReceiver

            return ShmReceiver(*what, events, socket_path(settings))
        if settings.transport == "nixl":
            from transport.backends.nixl.receiver import NixlReceiver

            host = settings.data_host or settings.host
            return NixlReceiver(*what, events, host, settings.data_port, slots=settings.lanes)
        from transport.backends.verbs.receiver import VerbsReceiver

        return VerbsReceiver(
            *what, events, settings.data_host, settings.data_port, devices=settings.devices, slots=settings.lanes
        )

    return make


def socket_path(settings: DecodeSettings) -> str:
    """Short whatever the worker's name (a Unix socket's path has 107 bytes); a restart takes the same one.

    The address keeps workers of equal names apart: those of two `hawk up` on one machine.
    """
    key = f"{settings.name}/{settings.host}:{settings.port}"
    name = hashlib.blake2b(key.encode(), digest_size=6).hexdigest()
    return str((settings.socket_dir / f"hawk-{name}.sock").absolute())
