"""
Measures raw TCP: the throughput of unencrypted and TLS streams on the path of the scenarios, and its
round-trip time.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import Deferred

from pipegrid.errors import UsageError
from pipegrid.reactor.deferreds import as_deferred, gather
from pipegrid.speedtest.raw_socket import Buffers
from pipegrid.speedtest.responder_client import Probe
from pipegrid.speedtest.responder_client import Responder as Responder
from pipegrid.speedtest.run_results import (
    DIRECTIONS,
    SCENARIO,
    UP,
    Baseline,
    Measurement,
    RoundTrip,
)

SAMPLE_TRIPS = 10
"""The shortest duration of a sample, in round trips."""

WARM_UP_BYTES = 1 << 15
WARM_UP_FACTOR = 4
MAX_SAMPLE_BYTES = 1 << 34
MIN_STREAM_BYTES = 1 << 12
_SHORTEST_S = 1e-6

T = TypeVar("T")


@attrs.frozen
class Effort:
    """
    How much to measure.

    Attributes:
        rounds: the number of samples for each kind of stream.
        sample_s: about how long one sample takes; at least ten round trips.
        pings: how many exchanges measure each round-trip time.
    """

    rounds: int = 3
    sample_s: float = 0.5
    pings: int = 20


@as_deferred
async def measure_baselines(
    reactor: Any,
    responders: Sequence[Responder],
    effort: Effort = Effort(),
    *,
    tls: Sequence[bool] = (False, True),
) -> list[Baseline]:
    """
    Measure the throughput of one stream, and of one stream to each responder together, up and down. The
    samples are in ``before`` of the returned baselines.

    Call this before and after the scenarios, and join the two results with ``join``.

    Fails with ResponderError.
    """
    found = []
    for secure in tls:
        async with Bench.open(reactor, responders, secure, effort) as bench:
            for direction in DIRECTIONS:
                for streams in sorted({1, len(responders)}):
                    size_bytes = await bench.warm_up(direction, streams)
                    rates = [
                        await bench.rate(direction, streams, size_bytes)
                        for _ in range(effort.rounds)
                    ]
                    found.append(Baseline(streams, secure, direction, tuple(rates)))
    return found


def join(before: Sequence[Baseline], after: Sequence[Baseline]) -> tuple[Baseline, ...]:
    """
    Return the baselines of two calls of ``measure_baselines``, with the samples of the first as ``before``
    and of the second as ``after``.
    """

    def key(baseline: Baseline) -> tuple[int, bool, str]:
        return baseline.streams, baseline.tls, baseline.direction

    later = {key(each): each.samples for each in after}
    joined = [attrs.evolve(each, after=later.pop(key(each), ())) for each in before]
    alone = [each for each in after if key(each) in later]
    return (*joined, *(attrs.evolve(each, before=(), after=each.samples) for each in alone))


@as_deferred
async def ping_responders(
    reactor: Any, responders: Sequence[Responder], count: int = 20
) -> list[RoundTrip]:
    """Measure the round-trip time to each responder by tiny exchanges on an open connection."""
    trips = []
    buffers = Buffers()
    for responder in responders:
        with closing(await Probe.connect(reactor, responder, buffers=buffers)) as probe:
            samples = [await probe.ping() for _ in range(count)]
        trips.append(RoundTrip(responder.address, tuple(samples)))
    return trips


@as_deferred
async def perfect_pipe(
    reactor: Any,
    responders: Sequence[Responder],
    size_bytes: int,
    effort: Effort = Effort(),
    *,
    tls: bool = False,
) -> list[Measurement]:
    """
    Self-check: measure raw streams of ``size_bytes`` together as a scenario is measured, up and down.

    The result must be 100 % of raw TCP, within 3 %, compared with ``measure_baselines`` of the same run. As
    in a scenario, the round trip is included: choose a size that takes a hundred round trips.
    """
    found = []
    streams = len(responders)
    moved_bytes = streams * stream_bytes(size_bytes, streams)
    async with Bench.open(reactor, responders, tls, effort) as bench:
        for direction in DIRECTIONS:
            await bench.warm_up(direction, streams)
            samples = [
                await bench.move(direction, streams, size_bytes) for _ in range(effort.rounds)
            ]
            found.append(
                Measurement(
                    name="perfect pipe",
                    group=SCENARIO,
                    direction=direction,
                    files=1,
                    file_bytes=moved_bytes,
                    wire_bytes=moved_bytes,
                    samples_s=tuple(samples),
                )
            )
    return found


class Bench:
    """
    Connections to all responders, and measurements over them.

    In a sample, one stream, or one stream to each responder at the same time, moves incompressible bytes in
    one direction. The time starts with the first byte. It ends when the last receiver has confirmed the last
    byte (up), or has received it (down). The shortest round trip of these connections is subtracted, since it
    is latency. Connecting, the TLS handshake and the request are not included.

    TCP starts slowly, even after a pause. So before the samples, transfers of increasing size are made, until
    one takes a quarter of ``sample_s``; its rate determines the size of a sample.

    Args:
        rtt_s: the shortest round trip of these connections.
        now: the clock whose times the probes return, in seconds.
    """

    def __init__(
        self,
        probes: Sequence[Probe],
        sample_s: float,
        rtt_s: float,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._probes = probes
        self._now = now
        self._sample_s = max(sample_s, SAMPLE_TRIPS * rtt_s)
        self._rtt_s = rtt_s
        self._known_rates: dict[str, float] = {}

    @classmethod
    @asynccontextmanager
    async def open(
        cls, reactor: Any, responders: Sequence[Responder], tls: bool, effort: Effort
    ) -> AsyncIterator[Bench]:
        """
        Connect to all responders, one after the other, and measure the round trip; close the connections when
        the context ends.
        """
        if not responders:
            raise UsageError("raw TCP needs a responder at the other end; name one")
        buffers = Buffers()
        probes: list[Probe] = []
        trips: list[float] = []
        try:
            for responder in responders:
                probe = await Probe.connect(reactor, responder, tls=tls, buffers=buffers)
                probes.append(probe)
                trips += [await probe.ping() for _ in range(min(effort.pings, 5))]
            yield cls(probes, effort.sample_s, min(trips))
        finally:
            for probe in probes:
                probe.close()

    async def warm_up(self, direction: str, streams: int) -> int:
        """Warm up that many streams; return how many bytes a sample needs."""
        wanted_s = self._sample_s / 4
        known = self._known_rates.get(direction, 0.0)
        size_bytes = max(WARM_UP_BYTES, int(known * wanted_s))
        while True:
            took_s = await self.move(direction, streams, size_bytes) - self._rtt_s
            rate = size_bytes / max(took_s, _SHORTEST_S)
            if took_s >= wanted_s or size_bytes >= MAX_SAMPLE_BYTES:
                break
            size_bytes = min(size_bytes * WARM_UP_FACTOR, MAX_SAMPLE_BYTES)
        self._known_rates[direction] = rate
        return min(int(rate * self._sample_s), MAX_SAMPLE_BYTES)

    async def rate(self, direction: str, streams: int, size_bytes: int) -> float:
        """Measure one sample; return the bytes per second of all streams together."""
        took_s = await self.move(direction, streams, size_bytes) - self._rtt_s
        return streams * stream_bytes(size_bytes, streams) / max(took_s, _SHORTEST_S)

    async def move(self, direction: str, streams: int, size_bytes: int) -> float:
        """Move bytes over that many streams; return the seconds until the last byte has arrived."""
        each_bytes = stream_bytes(size_bytes, streams)
        probes = self._probes[:streams]
        if direction == UP:
            await together(probe.prepare_send(each_bytes) for probe in probes)
            began = self._now()
            ends = await together(probe.send() for probe in probes)
        else:
            began = self._now()
            ends = await together(probe.receive(each_bytes) for probe in probes)
        return max(ends) - began


def stream_bytes(size_bytes: int, streams: int) -> int:
    """Return how many bytes each stream moves: an equal share, but at least ``MIN_STREAM_BYTES``."""
    return max(-(-size_bytes // streams), MIN_STREAM_BYTES)


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at the same time, and return their results; if one fails, the others are cancelled."""
    return await gather([Deferred.fromCoroutine(each) for each in work])
