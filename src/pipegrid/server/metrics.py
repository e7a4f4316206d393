"""
What the server counts, for Prometheus.

The counters themselves are plain numbers where the work is done; they are looked at only when asked for, on
the reactor's thread, which alone changes them. Who may ask, and how often, is ``metricspage``'s business.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from twisted.internet.interfaces import IReactorTime

from pipegrid.errors import ServerRefused
from pipegrid.server.gbs.service import GbsService
from pipegrid.server.gbs.site import GbsSite
from pipegrid.server.metricspage import MetricsFactory
from pipegrid.storage.store import ShareStore


class StorageCollector(Collector):
    """Reads the counters of one server."""

    def __init__(self, server: GbsSite, service: GbsService, store: ShareStore) -> None:
        self._server = server
        self._service = service
        self._store = store

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics as they are now."""
        answers = CounterMetricFamily(
            "pipegrid_answers", "Answers given.", labels=["operation", "status"]
        )
        for (operation, status), count in self._service.requests.items():
            answers.add_metric([operation, str(status)], count)
        yield answers
        yield _counter("received_bytes", "Share data received.", self._service.received_bytes)
        yield _counter("sent_bytes", "Share data asked for.", self._service.sent_bytes)
        yield _counter("accepted_connections", "Connections made.", self._server.accepted)
        yield _counter("refused_connections", "Connections refused.", self._server.refused)
        yield _gauge("connections", "Open connections.", len(self._server.connections))
        yield _gauge("commits", "Shares that wait to become durable.", self._service.commits)
        yield _gauge("unfinished_uploads", "Unfinished uploads.", self._store.upload_count)
        with suppress(ServerRefused):  # of a disk that fails all else is told
            room = self._store.available_bytes()
            if room is not None:
                yield _gauge("available_bytes", "Room for shares.", room)


def metrics_page(
    clock: IReactorTime, server: GbsSite, service: GbsService, store: ShareStore
) -> MetricsFactory:
    """Return what to listen with; ``/metrics`` is the page."""
    registry = CollectorRegistry()
    registry.register(StorageCollector(server, service, store))
    return MetricsFactory(clock, lambda: generate_latest(registry))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"pipegrid_{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"pipegrid_{name}", text, value=value)
