"""Prometheus metrics, and the small web server for their page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from twisted.internet.interfaces import IAddress, IReactorTime
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure

from pipegrid.errors import ServerRefused
from pipegrid.reactor.deferreds import Timer
from pipegrid.server.gbs.http_connection import GbsSite
from pipegrid.server.gbs.responses import REASONS
from pipegrid.server.gbs.storage_operations import GbsService
from pipegrid.server.listener import ConnectionLimits
from pipegrid.storage.share_store import ShareStore

# Clients of this port are unauthenticated: on 127.0.0.1, every user of the machine can connect. A general web
# server stored unsolicited bodies in temporary files, 100 MB a second, until the disk was full. It also
# accepted connections until it had used all the descriptors, which the storage server then lacked. So in this
# module
#
# * only the head of a request is read, at most 8 KiB;
# * each connection has ten seconds, and ends with its answer;
# * there are at most sixteen connections, by ``ConnectionLimits``: a new one replaces the oldest, but at most
#   sixteen are replaced in one turn of the reactor, since their descriptors are not free before the next
#   turn;
# * each page is made at most once a second.

PLACE = b"/metrics"
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

MAX_CONNECTIONS = 16
MAX_HEAD_BYTES = 8192
TIMEOUT_S = 10.0
KEPT_S = 1.0
"""How long a page is used to answer further requests."""


class StatusPage(NamedTuple):
    """
    A page of the status port.

    Attributes:
        content_type: the type of the content.
        render: returns the content.
    """

    content_type: bytes
    render: Callable[[], bytes]


class MetricsFactory(Factory):
    """
    Makes connections for a limited number of clients.

    Args:
        clock: for timeouts.
        render: returns the page of metrics.
        others: further pages by their paths; a path with a query is only for that query.

    Attributes:
        connections: the open connections, the oldest first.
    """

    noisy = False

    def __init__(
        self,
        clock: IReactorTime,
        render: Callable[[], bytes],
        others: Mapping[bytes, StatusPage] | None = None,
    ) -> None:
        self.clock = clock
        self.connections: dict[MetricsConnection, None] = {}
        # Most clients are on this machine, or come through one proxy, so one address may have all
        # connections.
        self._crowd: ConnectionLimits[MetricsConnection] = ConnectionLimits(
            MAX_CONNECTIONS, MAX_CONNECTIONS, max_closing=MAX_CONNECTIONS
        )
        self._pages = {**(others or {}), PLACE: StatusPage(CONTENT_TYPE, render)}
        self._made: dict[StatusPage, tuple[float, bytes]] = {}

    def buildProtocol(self, addr: IAddress | None) -> MetricsConnection | None:
        """Return a connection for one request; None if too many connections have just been closed."""
        connection = MetricsConnection(self)
        victim = self._crowd.enter(connection, str(getattr(addr, "host", "")))
        if victim is connection:
            return None
        if victim is not None:
            victim.abort()
        return connection

    def stopFactory(self) -> None:
        """Close all connections, since the server stops."""
        for each in list(self.connections):
            each.abort()

    def find(self, url: bytes) -> StatusPage | None:
        """Return the page for a URL, or else for its path without the query; None if there is none."""
        return self._pages.get(url) or self._pages.get(url.partition(b"?")[0])

    def content(self, page: StatusPage) -> bytes:
        """Return the content of a page, which may be up to ``KEPT_S`` old."""
        now_s = self.clock.seconds()
        made_s, content = self._made.get(page, (now_s - KEPT_S, b""))
        if not 0 <= now_s - made_s < KEPT_S:
            content = page.render()
            self._made[page] = (now_s, content)
        return content

    def disconnected(self, connection: MetricsConnection) -> None:
        """Remove a closed connection, whose descriptor is free now."""
        self.connections.pop(connection, None)
        self._crowd.leave(connection)


class MetricsConnection(Protocol):
    """A connection for one request and its answer."""

    transport: Any

    def __init__(self, factory: MetricsFactory) -> None:
        self._factory = factory
        self._head = b""
        self._answered = False
        self._alarm = Timer(factory.clock, self.abort)

    def connectionMade(self) -> None:
        self._alarm.set(TIMEOUT_S)
        self._factory.connections[self] = None

    def dataReceived(self, data: bytes) -> None:
        """Accept part of a request's head; later bytes are ignored."""
        if self._answered:
            return
        self._head += data[: MAX_HEAD_BYTES + 1 - len(self._head)]
        head, end, _ = self._head.partition(b"\r\n\r\n")
        if end or len(self._head) > MAX_HEAD_BYTES:
            self._answered = True
            self.transport.write(self._answer(head) if end else _answer(431))
            self.transport.loseConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._alarm.stop()
        self._factory.disconnected(self)

    def quiet_s(self) -> float:
        """Return 0, so that connections are closed only by age: no client of this port shows a secret."""
        return 0.0

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abortConnection()

    def _answer(self, head: bytes) -> bytes:
        method, url, version = (*head.partition(b"\r\n")[0].split(b" "), b"", b"")[:3]
        if not version.startswith(b"HTTP/1."):
            return _answer(400)
        page = self._factory.find(url)
        if page is None:
            return _answer(404)
        if method not in (b"GET", b"HEAD"):
            return _answer(405)
        content = self._factory.content(page)
        return _answer(200, content, page.content_type, method == b"GET")


def _answer(
    status: int, page: bytes = b"", content_type: bytes = CONTENT_TYPE, with_page: bool = True
) -> bytes:
    head = b"HTTP/1.1 %d %s\r\nConnection: close\r\nContent-Length: %d\r\n" % (
        status,
        REASONS[status],
        len(page),
    )
    if page:
        head += b"Content-Type: %s\r\n" % content_type
    if status == 405:
        head += b"Allow: GET, HEAD\r\n"
    return head + b"\r\n" + (page if with_page else b"")


# The counters are plain numbers of the objects that do the work. They are changed and read only in the
# reactor's thread, and are read only when a client requests the page.


class StorageCollector(Collector):
    """Makes the metrics of one storage server from its counters."""

    def __init__(self, server: GbsSite, service: GbsService, store: ShareStore) -> None:
        self._server = server
        self._service = service
        self._store = store

    def collect(self) -> Iterator[Metric]:
        """Yield the current values of all metrics."""
        answers = CounterMetricFamily(
            "pipegrid_answers", "Answers given.", labels=["operation", "status"]
        )
        for (operation, status), count in self._service.requests.items():
            answers.add_metric([operation, str(status)], count)
        yield answers
        yield counter("received_bytes", "Share data received.", self._service.received_bytes)
        yield counter("sent_bytes", "Share data that clients requested.", self._service.sent_bytes)
        yield counter("accepted_connections", "Connections made.", self._server.accepted)
        yield counter("refused_connections", "Connections refused.", self._server.refused)
        yield gauge("connections", "Open connections.", len(self._server.connections))
        yield gauge("commits", "Shares that wait to become durable.", self._service.commits)
        yield gauge("unfinished_uploads", "Unfinished uploads.", self._store.upload_count)
        usage = self._store.usage
        if usage is not None:
            yield gauge("quota_bytes", "The quota for shares.", usage.quota_bytes)
            yield gauge("used_bytes", "Of the quota, taken by shares.", usage.used_bytes)
            used = usage.granted_bytes() - usage.used_bytes
            yield gauge("allocated_bytes", "Of the quota, allocated to unfinished uploads.", used)
        yield from self._clients()
        with suppress(ServerRefused):  # with a failing disk, the other metrics remain
            room = self._store.available_bytes()
            if room is not None:
                yield gauge("available_bytes", "Space for shares.", room)

    def _clients(self) -> Iterator[Metric]:
        """Yield the quotas and usage of named clients; the usage is left out if it is not counted yet."""
        quota = GaugeMetricFamily(
            "pipegrid_client_quota_bytes", "A client's quota.", labels=["client"]
        )
        used = GaugeMetricFamily(
            "pipegrid_client_used_bytes", "Taken by a client's shares.", labels=["client"]
        )
        allocated = GaugeMetricFamily(
            "pipegrid_client_allocated_bytes", "Allocated to its uploads.", labels=["client"]
        )
        for client, used_bytes, allocated_bytes in self._store.clients.report():
            quota.add_metric([client.name], client.quota_bytes)
            allocated.add_metric([client.name], allocated_bytes)
            if used_bytes is not None:
                used.add_metric([client.name], used_bytes)
        if quota.samples:
            yield from (quota, used, allocated)


def metrics_page(
    clock: IReactorTime, server: GbsSite, service: GbsService, store: ShareStore
) -> MetricsFactory:
    """Return the factory of the metrics port; its page is ``/metrics``."""
    return MetricsFactory(clock, rendering(StorageCollector(server, service, store)))


def rendering(collector: Collector) -> Callable[[], bytes]:
    """Return a function that returns the page with a collector's metrics."""
    registry = CollectorRegistry()
    registry.register(collector)
    return partial(generate_latest, registry)


def counter(name: str, text: str, value: float) -> Metric:
    """Return a metric that only grows; ``name`` lacks the prefix."""
    return CounterMetricFamily(f"pipegrid_{name}", text, value=value)


def gauge(name: str, text: str, value: float) -> Metric:
    """Return a metric that grows and falls; ``name`` lacks the prefix."""
    return GaugeMetricFamily(f"pipegrid_{name}", text, value=value)
