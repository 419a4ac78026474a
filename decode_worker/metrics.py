"""What a decode worker says about itself on /metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from decode_worker.lease import LeaseState
from decode_worker.leases import LeaseTable
from decode_worker.npu.base import NpuDevice
from decode_worker.scheduler import Scheduler
from transport.backends.link.receiver import LinkReceiver
from transport.backends.verbs import hw_counters
from transport.metrics import DataPlaneTotals

PREFIX = "hawk_decode"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class DecodeMetrics:
    """Counters and histograms that events feed; gauges are read off the live objects at each scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.tokens = Counter(f"{PREFIX}_tokens", "Tokens decoded", registry=registry)
        self.steps = Counter(f"{PREFIX}_steps", "Engine steps", registry=registry)
        self.preemptions = Counter(f"{PREFIX}_preemptions", "Requests that gave their blocks up", registry=registry)
        self.failures = Counter(f"{PREFIX}_failures", "Requests that failed here", ["code"], registry=registry)
        self.unknown = Counter(
            f"{PREFIX}_unknown_messages", "Messages about requests not known here", ["message"], registry=registry
        )
        self.pieces = Counter(f"{PREFIX}_announced_pieces", "Pieces announced by writers", registry=registry)
        self.checksum_failures = Counter(
            f"{PREFIX}_checksum_failures", "Leases whose bytes were not what their writer sent", registry=registry
        )
        self.relayed_bytes = Counter(
            f"{PREFIX}_relayed_bytes", "kv_path relay: bytes copied from host memory to the device", registry=registry
        )
        self.step_seconds = Histogram(
            f"{PREFIX}_step_seconds", "One engine step with sampling", registry=registry, buckets=_SECONDS
        )
        self.landed_seconds = Histogram(
            f"{PREFIX}_landed_seconds",
            "From reservation until the KV is decodable",
            registry=registry,
            buckets=_SECONDS,
        )
        self.landing_seconds = Histogram(
            f"{PREFIX}_landing_seconds",
            "From the writer's last byte until the KV is decodable: re-layout, checksum, barrier",
            registry=registry,
            buckets=_SECONDS,
        )
        self.batch_rows = Histogram(
            f"{PREFIX}_batch_rows",
            "Rows per engine step",
            registry=registry,
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
        )

    def watch(self, leases: LeaseTable, scheduler: Scheduler, device: NpuDevice) -> None:
        """Export the state of these at every scrape."""
        self.registry.register(_State(leases, scheduler, device))

    def watch_data_plane(self, receiver: LinkReceiver) -> None:
        """Export the data plane's totals, by event, and what its NICs count."""
        self.registry.register(
            DataPlaneTotals(PREFIX, lambda: dict(receiver.counters) | hw_counters.events(receiver.nics))
        )


class _State(Collector):
    def __init__(self, leases: LeaseTable, scheduler: Scheduler, device: NpuDevice) -> None:
        self._leases, self._scheduler, self._device = leases, scheduler, device

    def describe(self) -> list[GaugeMetricFamily]:
        return []

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        counts, blocks = self._leases.counts, self._leases.blocks
        states = self._leases.by_state()
        live = [state for state in LeaseState if state is not LeaseState.FREED]
        yield _gauge("leases", "Leases by state", "state", {s.value: states[s] for s in live})
        yield _gauge(
            "blocks",
            "KV blocks: free, cached (free, but findable), held by leases, and all",
            "state",
            {"free": blocks.free, "cached": blocks.cached, "held": blocks.held, "total": blocks.total},
        )
        yield _gauge(
            "requests",
            "Requests in the running batch, and waiting for a place in it",
            "state",
            {"running": self._scheduler.running, "waiting": self._scheduler.waiting},
        )
        banks = self._device.memory_view()
        yield _gauge(
            "bank_used_bytes", "Used bytes per DRAM bank", "bank", {str(i): b.used for i, b in enumerate(banks)}
        )
        yield _gauge("bank_total_bytes", "Bytes per DRAM bank", "bank", {str(i): b.total for i, b in enumerate(banks)})
        yield _counter("leases_ended", "Leases ended, by what ended them", "how", counts.ended)
        yield _counter("fences", "Leases fenced while a writer might still write", None, {"": counts.fences})
        yield _counter("fence_errors", "Fences that had to be tried again", None, {"": counts.fence_errors})
        yield _counter("late_events", "Data-plane events about leases that had ended", "event", counts.late)


def _gauge(name: str, text: str, label: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counter(name: str, text: str, label: str | None, values: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"{PREFIX}_{name}", text, labels=[label] if label else [])
    for key, value in values.items():
        family.add_metric([key] if label else [], value)
    return family
