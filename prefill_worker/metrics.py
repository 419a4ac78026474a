"""What a prefill worker says about itself on /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from transport.metrics import DataPlaneTotals

PREFIX = "hawk_prefill"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class PrefillMetrics:
    """One set per worker, in its own registry. Token and byte counters count what is finished."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"{PREFIX}_{name}", text, registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"{PREFIX}_{name}", text, registry=registry, buckets=_SECONDS)

        self.requests = counter("requests", "Prefill messages accepted")
        self.prefilled = counter("prefilled", "Requests that got their first token")
        self.failures = counter("failures", "Requests that failed here", "code")
        self.aborts = counter("aborts", "Requests cancelled by their router, or with its session")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts prefilled")
        self.cached_tokens = counter("cached_tokens", "Of these, tokens that the prefix cache saved")
        self.queue_seconds = seconds("queue_seconds", "From arrival in the engine until first scheduled")
        self.prefill_seconds = seconds("prefill_seconds", "From first scheduled until the first token")

        self.pushes = counter("pushes", "Pushes acknowledged by the decode worker")
        self.pushed_bytes = counter("pushed_bytes", "Bytes of acknowledged pushes")
        self.push_seconds = seconds("push_seconds", "From a push's first range until its acknowledgement")
        self.push_failures = counter("push_failures", "Pushes that failed", "code")
        self.data_plane: dict[str, int] = {}
        """Totals of the engine's data plane, by event, as it told them last."""
        registry.register(DataPlaneTotals(PREFIX, lambda: self.data_plane))
        self.unknown = counter("unknown_messages", "Messages about requests not known here", "message")

        self.outstanding_tokens = gauge("outstanding_tokens", "Prompt tokens accepted and not yet prefilled")
        self.unprefilled = gauge("unprefilled_requests", "Requests accepted and not yet prefilled")
        self.pushing = gauge("pushing_requests", "Requests prefilled and not yet acknowledged")
        self.held_requests = gauge("held_requests", "Finished requests whose blocks a push still holds")
        self.held_blocks = gauge("held_blocks", "KV blocks of finished requests that a push still holds")
        self.open_pools = gauge("open_pools", "Decode workers' pools this worker may write")
