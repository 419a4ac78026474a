"""Metrics that prefill and decode workers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector


class DataPlaneTotals(Collector):
    """`<prefix>_data_plane_total{event}`: what a data plane has counted; `counters()` gives the totals by event."""

    def __init__(self, prefix: str, counters: Callable[[], Mapping[str, int]]) -> None:
        self._name = f"{prefix}_data_plane"
        self._counters = counters

    def describe(self) -> list[CounterMetricFamily]:
        return []

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, "Data-plane totals, by event", labels=["event"])
        for event, count in sorted(self._counters().items()):
            family.add_metric([event], count)
        yield family
