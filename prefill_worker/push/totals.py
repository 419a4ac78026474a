"""Totals of the data plane over all connections that this process has had."""

from __future__ import annotations

import threading
from collections import Counter

from transport.backends.base import PoolWriter
from transport.backends.verbs import hw_counters


class Totals:
    """Thread-safe. Connections that are over keep counting, but are not kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writers: list[PoolWriter] = []
        self._over: Counter[str] = Counter()

    def add(self, writer: PoolWriter) -> None:
        with self._lock:
            self._writers.append(writer)

    def counters(self) -> dict[str, int]:
        """By event: bytes, writes, completions, revoked, aborts, failures by cause (`failed_…`); and the NICs' own."""
        with self._lock:
            for writer in [writer for writer in self._writers if not writer.alive]:
                self._writers.remove(writer)
                self._over.update(writer.counters)
            total = self._over.copy()
            for writer in self._writers:
                total.update(dict(writer.counters))
            nics = {nic for writer in self._writers for nic in writer.nics}
        return dict(total) | hw_counters.events(sorted(nics))
