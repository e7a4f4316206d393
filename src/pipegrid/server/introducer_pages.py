"""
The pages of an introducer's status port: one for people, one in Tahoe-LAFS's JSON, and metrics for
Prometheus.
"""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Callable, Iterator

import attrs
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from twisted.internet.interfaces import IReactorTime

from pipegrid.core.text import printable
from pipegrid.server.introducer_service import IntroducerService
from pipegrid.server.metrics import MetricsFactory, StatusPage, counter, gauge, rendering
from pipegrid.wire.announcements import SERVICE

# Addresses of servers are secrets, so no page has them. Names are untrusted, so they are escaped. Clients may
# announce any number of services, so the metrics distinguish only storage from all other services.

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Introducer</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>body {{ font-family: sans-serif }} td, th {{ text-align: left; padding-right: 2em }}</style>
</head><body>
<h1>Introducer</h1>
<p>Announced: {announced}. Subscribed: {subscribed}. Connections: {connections}.</p>
<table><tr><th>Name</th><th>Service</th><th>Id</th><th>State</th><th>Connected for</th></tr>
{rows}
</table></body></html>
"""


@attrs.frozen(eq=False)
class IntroducerPages(Collector):
    """
    Makes the pages.

    Args:
        connections: returns how many connections are open.
        refused: returns how many connections were refused.
    """

    service: IntroducerService
    connections: Callable[[], int]
    refused: Callable[[], int]

    def factory(self, clock: IReactorTime) -> MetricsFactory:
        """Return the factory of the status port, with the pages ``/``, ``/?t=json`` and ``/metrics``."""
        others = {
            b"/": StatusPage(b"text/html; charset=utf-8", self.as_html),
            b"/?t=json": StatusPage(b"application/json", self.as_json),
        }
        return MetricsFactory(clock, rendering(self), others)

    def announced(self) -> Counter[str]:
        """Return the number of listed servers, by service."""
        return Counter(each.service for each in self.service.registry)

    def as_json(self) -> bytes:
        """Return the numbers of servers and subscribers of each service, as Tahoe-LAFS's introducer does."""
        document = {
            "subscription_summary": self.service.subscribers,
            "announcement_summary": self.announced(),
        }
        return (json.dumps(document, indent=1) + "\n").encode("ascii")

    def as_html(self) -> bytes:
        """Return the page for people."""
        self.service.registry.count_times()
        servers = sorted(
            self.service.registry, key=lambda each: (each.service, each.nickname, each.server_id)
        )
        rows = []
        for each in servers:
            state = "connected" if each.holders else f"absent for {_duration(each.absent_s)}"
            cells = (
                each.nickname,
                each.service,
                each.server_id,
                state,
                _duration(each.seniority_s),
            )
            rows.append(f"<tr>{''.join(f'<td>{_shown(cell)}</td>' for cell in cells)}</tr>")
        page = _PAGE.format(
            announced=_shown(_summary(self.announced())),
            subscribed=_shown(_summary(self.service.subscribers)),
            connections=self.connections(),
            rows="\n".join(rows),
        )
        return page.encode("utf-8", "replace")

    def collect(self) -> Iterator[Metric]:
        """Yield the current values of all metrics."""
        service = self.service
        yield _by_service("servers", "Listed servers.", self.announced())
        yield _by_service("subscribers", "Subscribers.", service.subscribers)
        registry = service.registry
        yield gauge("introducer_established", "Established servers.", registry.established)
        yield gauge("introducer_units", "Used units of the space for servers.", registry.units)
        yield counter("introducer_replaced", "Servers that gave way.", registry.replaced)
        outcomes = CounterMetricFamily(
            "pipegrid_introducer_announcements", "Announcements received.", labels=["outcome"]
        )
        for outcome, count in service.outcomes.items():
            outcomes.add_metric([outcome], count)
        yield outcomes
        yield gauge("connections", "Open connections.", self.connections())
        yield counter("refused_connections", "Connections refused.", self.refused())


def _by_service(name: str, text: str, counts: Counter[str]) -> Metric:
    family = GaugeMetricFamily(f"pipegrid_introducer_{name}", text, labels=["service"])
    storage = counts[SERVICE]
    family.add_metric([SERVICE], storage)
    family.add_metric(["other"], counts.total() - storage)
    return family


def _summary(counts: Counter[str]) -> str:
    return ", ".join(f"{service}: {count}" for service, count in sorted(counts.items())) or "none"


def _duration(seconds: float) -> str:
    minutes = int(seconds) // 60
    days, hours, minutes = minutes // 1440, minutes // 60 % 24, minutes % 60
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min"


def _shown(text: str) -> str:
    return html.escape(printable(text))
