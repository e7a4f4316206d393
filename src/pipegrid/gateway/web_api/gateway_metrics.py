"""The gateway's metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from pipegrid.gateway.server_states import ServerState
from pipegrid.gateway.transfer_records import BOUNDS_S, TransferKind, TransferRecords, TransferState
from pipegrid.gateway.web_api.operation_handles import OperationHandles

# Labels have a limited number of values: kinds and states of transfers, statuses of responses, and names of
# at most ``MAX_SERVERS`` servers. No label contains a path or a cap.

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_SERVERS = 100

_KINDS: tuple[TransferKind, ...] = get_args(TransferKind)
_ENDS: tuple[TransferState, ...] = ("finished", "failed", "cancelled")


class GatewayCollector(Collector):
    """
    Collects the metrics of one gateway.

    Args:
        servers: returns the known states of servers, without a query.
        responses: returns the number of responses by status.
        connections: returns the number of open connections.
    """

    def __init__(
        self,
        records: TransferRecords,
        handles: OperationHandles,
        servers: Callable[[], Iterable[ServerState]],
        responses: Callable[[], Mapping[int, int]],
        connections: Callable[[], int],
    ) -> None:
        self._records = records
        self._handles = handles
        self._servers = servers
        self._responses = responses
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        """Yield the current values of all metrics."""
        yield from self._transfers()
        yield from self._server_metrics()
        responses = CounterMetricFamily(
            "pipegrid_gateway_responses", "Responses over HTTP.", labels=["status"]
        )
        for status, count in sorted(self._responses().items()):
            responses.add_metric([str(status)], count)
        yield responses
        yield GaugeMetricFamily(
            "pipegrid_gateway_connections", "Open connections over HTTP.", self._connections()
        )
        yield GaugeMetricFamily(
            "pipegrid_gateway_operations",
            "Operations that are kept by their handles.",
            len(self._handles),
        )
        yield GaugeMetricFamily(
            "pipegrid_gateway_operations_running",
            "Operations that have not ended.",
            self._handles.running,
        )

    def _transfers(self) -> Iterator[Metric]:
        records = self._records
        ended = CounterMetricFamily(
            "pipegrid_gateway_transfers", "Transfers that ended.", labels=["kind", "state"]
        )
        amount = CounterMetricFamily(
            "pipegrid_gateway_transferred_bytes",
            "Plaintext of transfers that succeeded.",
            labels=["kind"],
        )
        active = GaugeMetricFamily(
            "pipegrid_gateway_transfers_active", "Transfers that run.", labels=["kind"]
        )
        took = HistogramMetricFamily(
            "pipegrid_gateway_transfer_seconds",
            "How long transfers took that succeeded.",
            labels=["kind"],
        )
        for kind in _KINDS:
            for state in _ENDS:
                ended.add_metric([kind, state], records.ended[kind, state])
            amount.add_metric([kind], records.bytes[kind])
            active.add_metric([kind], sum(one.kind == kind for one in records.active))
            took.add_metric([kind], _buckets(records, kind), records.seconds[kind])
        yield from (ended, amount, active, took)

    def _server_metrics(self) -> Iterator[Metric]:
        servers = list(self._servers())
        states = GaugeMetricFamily(
            "pipegrid_gateway_servers", "Storage servers that are known.", labels=["state"]
        )
        connected = sum(server.is_connected for server in servers)
        states.add_metric(["connected"], connected)
        states.add_metric(["not_connected"], len(servers) - connected)
        latency = GaugeMetricFamily(
            "pipegrid_gateway_server_latency_seconds",
            "Time from a request to its response.",
            labels=["server"],
        )
        space = GaugeMetricFamily(
            "pipegrid_gateway_server_available_bytes", "Space for shares.", labels=["server"]
        )
        for server in servers[:MAX_SERVERS]:
            status = server.status
            if status is None or not status.reachable:
                continue
            if status.rtt_s is not None:
                latency.add_metric([server.identity.server_id], status.rtt_s)
            if status.available_bytes is not None:
                space.add_metric([server.identity.server_id], status.available_bytes)
        yield from (states, latency, space)


def _buckets(records: TransferRecords, kind: TransferKind) -> list[tuple[str, float]]:
    bounds = [*(f"{bound_s:g}" for bound_s in BOUNDS_S), "+Inf"]
    counts = (float(records.durations[kind, place]) for place in range(len(bounds)))
    return list(zip(bounds, accumulate(counts), strict=True))


def metrics_text(collector: GatewayCollector) -> bytes:
    """Return all metrics in the text format of Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)
