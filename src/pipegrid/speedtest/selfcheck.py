"""
The self-check of the speed test: it measures quantities whose values are known, to show that the other
figures are right.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from pipegrid.reactor.deferreds import as_deferred
from pipegrid.speedtest.child_processes import at_ports
from pipegrid.speedtest.link_proxies import shape_of, start_proxy
from pipegrid.speedtest.raw_tcp_baseline import (
    Effort,
    Responder,
    join,
    measure_baselines,
    perfect_pipe,
    ping_responders,
)
from pipegrid.speedtest.responder import start_responders
from pipegrid.speedtest.run_results import EmulatedLink

RTT_LINK = EmulatedLink("100 ms", 0.1)
RATE_LINK = EmulatedLink("10 Mbit/s", 0.0, 1.25e6, 1.25e6)
STREAMS = 10
PIPE_LINK = EmulatedLink("100 Mbit/s", 0.020, 12.5e6, 12.5e6)
PIPE_BYTES = 25 * 10**6
PINGS = 15


@attrs.frozen
class KnownFigure:
    """
    One measured figure whose true value is known.

    Attributes:
        name: what was measured.
        measured, expected: the result, and the known value, in ``unit``.
        tolerance: the largest allowed difference.
        low, high: the lowest and the highest sample.
    """

    name: str
    measured: float
    expected: float
    tolerance: float
    unit: str
    low: float
    high: float

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance."""
        return abs(self.measured - self.expected) <= self.tolerance

    def __str__(self) -> str:
        word = "good" if self.passed else "WRONG"
        return (
            f"{word}  {self.name}: {self.measured:.2f} {self.unit} ({self.low:.2f} .. {self.high:.2f});"
            f" {self.expected:g} ± {self.tolerance:g} expected"
        )


def check(
    name: str,
    samples: Sequence[float],
    expected: float,
    tolerance: float,
    unit: str,
    take: Callable[[Sequence[float]], float] = statistics.median,
) -> KnownFigure:
    """
    Compare the median of some samples, or the value that ``take`` computes from them, with the expected
    value.
    """
    return KnownFigure(name, take(samples), expected, tolerance, unit, min(samples), max(samples))


@as_deferred
async def self_check(reactor: Any, say: Callable[[str], object]) -> list[KnownFigure]:
    """
    Measure quantities with known values; fires with the figures.

    * Raw streams, measured as a scenario is, and compared with the raw streams of the baseline: 100 % of raw
      TCP.
    * An emulated link of 100 ms: 100 ms, by the shortest round trip, since other work of the machine only
      lengthens round trips.
    * An emulated link of 10 Mbit/s: 10 Mbit/s, by the median.
    """
    running = await start_responders(reactor, STREAMS)
    try:
        say("an emulated round trip of 100 ms")
        checks = [await _behind(reactor, running.responders[:1], RTT_LINK, _round_trip)]
        say("an emulated link of 10 Mbit/s")
        checks += await _behind(reactor, running.responders[:1], RATE_LINK, _rate)
        say("raw streams as a scenario")
        checks += await _behind(reactor, running.responders, PIPE_LINK, _pipe)
    finally:
        await running.stop()
    return checks


async def _behind(
    reactor: Any, responders: Sequence[Responder], link: EmulatedLink, measure: Callable[..., Any]
) -> Any:
    targets = [(each.host, each.port) for each in responders]
    proxy = await start_proxy(reactor, shape_of(link), targets)
    try:
        return await measure(reactor, at_ports(responders, proxy.said))
    finally:
        await proxy.stop()


async def _round_trip(reactor: Any, responders: Sequence[Responder]) -> KnownFigure:
    [trip] = await ping_responders(reactor, responders, PINGS)
    return check("100 ms link", [1000 * sample for sample in trip.samples_s], 100, 1, "ms", min)


async def _rate(reactor: Any, responders: Sequence[Responder]) -> list[KnownFigure]:
    effort = Effort(rounds=3, sample_s=2.0)
    found = await measure_baselines(reactor, responders, effort, tls=(False,))
    return [
        check(
            f"10 Mbit/s link, {each.direction}",
            [sample * 8 / 1e6 for sample in each.samples],
            10,
            0.2,
            "Mbit/s",
        )
        for each in found
        if each.streams == 1
    ]


async def _pipe(reactor: Any, responders: Sequence[Responder]) -> list[KnownFigure]:
    effort = Effort(rounds=3, sample_s=1.0)
    before = await measure_baselines(reactor, responders, effort, tls=(False,))
    measured = await perfect_pipe(reactor, responders, PIPE_BYTES, effort)
    after = await measure_baselines(reactor, responders, effort, tls=(False,))
    raw = {
        each.direction: statistics.median(each.samples)
        for each in join(before, after)
        if each.streams == len(responders)
    }
    return [
        check(
            f"perfect pipe, {each.direction}",
            [100 * each.wire_bytes / sample / raw[each.direction] for sample in each.samples_s],
            100,
            3,
            "% of raw TCP",
        )
        for each in measured
    ]
