"""What the router counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from router.workers import DecodeWorker, PrefillWorker, Worker

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
GAP_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10)


class RouterMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter(
            "requests", "HTTP requests by endpoint and status (499: the client left)", "endpoint", "status"
        )
        self.errors = self._counter("errors", "Failed requests by error code", "code")
        self.retries = self._counter("retries", "Further tries by the code of the error that led to them", "code")
        self.preemptions = self._counter("preemptions", "Requests that a decode worker dropped for want of blocks")
        self.aborts = self._counter("aborts", "Requests whose client left before the end")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of placed requests")
        self.cached_tokens = self._counter("cached_prompt_tokens", "Prompt tokens found in a prefill worker's cache")
        self.completion_tokens = self._counter("completion_tokens", "Generated tokens given to clients")
        self.reservations = self._counter("reservations", "Leases asked of decode workers")
        self.tokenised = self._counter("tokenised_texts", "Texts that were tokenised")
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Streamed request received until first token", SECONDS
        )
        self.gap = self._histogram("inter_token_seconds", "Time between two engine steps of a stream", GAP_SECONDS)
        self.duration = self._histogram("request_seconds", "Request received until its end", SECONDS)
        self.queue_time = self._histogram("queue_seconds", "Waiting for a prefill slot and blocks", SECONDS)
        self.observe_gap: Callable[[float], None] = self.gap.observe

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"hawk_router_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"hawk_router_{name}", text, registry=self.registry, buckets=buckets)

    def watch(
        self,
        workers: Callable[[], Iterable[Worker]],
        in_flight: Callable[[], int],
        queued: Callable[[], dict[str, int]],
        calls: Callable[[], int],
    ) -> None:
        """Read these at each scrape: a worker that was removed leaves no stale series."""
        self.registry.register(_Live(workers, in_flight, queued, calls))


class _Live:
    def __init__(
        self,
        workers: Callable[[], Iterable[Worker]],
        in_flight: Callable[[], int],
        queued: Callable[[], dict[str, int]],
        calls: Callable[[], int],
    ) -> None:
        self._workers = workers
        self._in_flight = in_flight
        self._queued = queued
        self._calls = calls

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("hawk_router_requests_in_flight", "Admitted HTTP requests", self._in_flight())
        yield GaugeMetricFamily("hawk_router_calls", "Generations on workers", self._calls())
        queued = GaugeMetricFamily("hawk_router_queued", "Waiting, by what for", labels=["for"])
        for what, count in self._queued().items():
            queued.add_metric([what], count)
        yield queued
        up = GaugeMetricFamily("hawk_router_worker_up", "1: takes new requests", labels=["role", "worker"])
        calls = GaugeMetricFamily("hawk_router_worker_calls", "Generations on it", labels=["role", "worker"])
        outstanding = GaugeMetricFamily("hawk_router_worker_outstanding_tokens", "Not yet prefilled", labels=["worker"])
        free = GaugeMetricFamily("hawk_router_worker_free_blocks", "By its last status", labels=["worker"])
        for worker in self._workers():
            up.add_metric([worker.role, worker.url], float(worker.usable))
            calls.add_metric([worker.role, worker.url], worker.calls)
            if isinstance(worker, PrefillWorker):
                outstanding.add_metric([worker.url], worker.outstanding)
            elif isinstance(worker, DecodeWorker) and worker.status is not None:
                free.add_metric([worker.url], worker.status.free_blocks)
        yield from (up, calls, outstanding, free)
