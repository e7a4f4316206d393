"""Raw TCP: what is counted, what the clock is taken of, and what comes out of it."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase, TestCase

from pipegrid.errors import UsageError
from pipegrid.speedtest import responder as module
from pipegrid.speedtest.raw_tcp_baseline import (
    MIN_STREAM_BYTES,
    WARM_UP_BYTES,
    Bench,
    Effort,
    join,
    measure_baselines,
    perfect_pipe,
    ping_responders,
    stream_bytes,
)
from pipegrid.speedtest.responder import ResponderService, ResponderSettings
from pipegrid.speedtest.responder_client import Probe, Responder, ResponderError
from pipegrid.speedtest.run_results import DOWN, UP, Baseline
from pipegrid.testing.clock import HeapClock
from pipegrid.testing.network import run

reactor: Any = installed_reactor
RTT_S = 0.1
RATE = 1_000_000


class VirtualProbe:
    """A stream over a link of its own, in virtual time; notes what it was asked for."""

    def __init__(self, clock: HeapClock, slower: float = 1.0) -> None:
        self.clock = clock
        self.slower = slower
        self.asked: list[int] = []
        self.closed = False

    async def _wait(self, delay_s: float) -> float:
        waited: Deferred[None] = Deferred()
        self.clock.callLater(delay_s, waited.callback, None)
        await waited
        return self.clock.seconds()

    async def prepare_send(self, size_bytes: int) -> None:
        self.asked.append(size_bytes)
        await self._wait(RTT_S)

    async def send(self) -> float:
        return await self._wait(RTT_S + self.slower * self.asked[-1] / RATE)

    async def receive(self, size_bytes: int) -> float:
        self.asked.append(size_bytes)
        return await self._wait(RTT_S + self.slower * size_bytes / RATE)

    def close(self) -> None:
        self.closed = True


class BenchTests(SynchronousTestCase):
    """The arithmetic, in virtual time."""

    def make(self, *probes: VirtualProbe, sample_s: float = 2.0) -> Bench:
        return Bench(cast("list[Probe]", probes), sample_s, RTT_S, self.clock.seconds)

    def setUp(self) -> None:
        self.clock = HeapClock()

    def run_now(self, work: Any) -> Any:
        return run(self.clock, Deferred.fromCoroutine(work))

    def test_a_sample_is_without_one_round_trip(self) -> None:
        """What is left is the time that the bytes took; asking leave before is not in it either."""
        bench = self.make(VirtualProbe(self.clock))
        for direction in (UP, DOWN):
            rate = self.run_now(bench.rate(direction, 1, 500_000))
            self.assertAlmostEqual(rate, RATE, 3)

    def test_streams_count_together_and_until_the_last(self) -> None:
        """Two with a line each are twice as fast; a slower one is waited for."""
        probes = [VirtualProbe(self.clock), VirtualProbe(self.clock)]
        self.assertAlmostEqual(self.run_now(self.make(*probes).rate(UP, 2, 800_000)), 2 * RATE, 3)
        probes[1].slower = 4.0
        self.assertAlmostEqual(self.run_now(self.make(*probes).rate(DOWN, 2, 800_000)), RATE / 2, 3)

    def test_moving_takes_its_round_trip(self) -> None:
        """As a scenario does: the self-check is measured so."""
        bench = self.make(VirtualProbe(self.clock))
        self.assertAlmostEqual(self.run_now(bench.move(UP, 1, 500_000)), 0.5 + RTT_S, 6)

    def test_warming_up_grows_until_it_takes_a_while(self) -> None:
        """Each is four times the one before; the sample is as long as was wanted."""
        probe = VirtualProbe(self.clock)
        bench = self.make(probe, sample_s=2.0)
        size_bytes = self.run_now(bench.warm_up(UP, 1))
        self.assertEqual(probe.asked, [WARM_UP_BYTES, 4 * WARM_UP_BYTES, 16 * WARM_UP_BYTES])
        self.assertAlmostEqual(size_bytes / RATE, 2.0, 3)

    def test_what_is_known_makes_warming_up_shorter(self) -> None:
        """The next in that direction is at once as large as is needed."""
        probes = [VirtualProbe(self.clock), VirtualProbe(self.clock)]
        bench = self.make(*probes)
        self.run_now(bench.warm_up(UP, 1))
        before = len(probes[0].asked)
        self.run_now(bench.warm_up(UP, 2))
        self.assertLessEqual(len(probes[0].asked) - before, 2)

    def test_a_sample_lasts_ten_round_trips(self) -> None:
        """However short it was wanted: of less, the round trip would be too large a part."""
        bench = self.make(VirtualProbe(self.clock), sample_s=0.01)
        self.assertAlmostEqual(self.run_now(bench.warm_up(DOWN, 1)) / RATE, 10 * RTT_S, 3)

    def test_no_stream_is_idle(self) -> None:
        """Equal shares, rounded up, and a little at least."""
        self.assertEqual(stream_bytes(100_001, 2), 50_001)
        self.assertEqual(stream_bytes(1, 3), MIN_STREAM_BYTES)


class JoinTests(SynchronousTestCase):
    """Before and after."""

    def test_samples_of_two_calls_come_together(self) -> None:
        """By streams, TLS and direction; what was measured only once stays."""
        before = [Baseline(1, False, UP, (1, 2)), Baseline(1, False, DOWN, (3,))]
        after = [Baseline(10, True, UP, (7,)), Baseline(1, False, UP, (4, 5))]
        self.assertEqual(
            join(before, after),
            (
                Baseline(1, False, UP, (1, 2), (4, 5)),
                Baseline(1, False, DOWN, (3,)),
                Baseline(10, True, UP, (), (7,)),
            ),
        )


class LoopbackTests(TestCase):
    """With real responders."""

    KEY = module.make_key()

    def setUp(self) -> None:
        self.patch(module, "make_key", lambda: self.KEY)

    def serve(self, count: int, **limits: Any) -> tuple[list[ResponderService], list[Responder]]:
        """Return so many running responders."""
        token = module.make_token()
        services = [
            ResponderService(reactor, ResponderSettings("127.0.0.1", 0, token, **limits))
            for _ in range(count)
        ]
        for service in services:
            self.addCleanup(service.stop)
        return services, [
            Responder(service.address[0], service.address[1], token, service.spki_hash)
            for service in services
        ]

    def test_every_kind_is_measured(self) -> None:
        """One stream and one to each, plain and TLS, up and down, and nothing is left open."""

        async def measure() -> None:
            services, responders = self.serve(2)
            effort = Effort(rounds=2, sample_s=0.002, pings=1)
            found = await measure_baselines(reactor, responders, effort)
            kinds = [(each.tls, each.direction, each.streams) for each in found]
            self.assertEqual(
                kinds,
                [
                    (tls, direction, streams)
                    for tls in (False, True)
                    for direction in (UP, DOWN)
                    for streams in (1, 2)
                ],
            )
            for each in found:
                self.assertEqual((len(each.before), each.after), (2, ()))
                self.assertGreater(min(each.before), 0)
            await self.settle(services)

        return Deferred.fromCoroutine(measure())  # type: ignore[return-value]

    def test_one_responder_is_measured_once(self) -> None:
        """One stream is as many as there are."""

        async def measure() -> None:
            _, responders = self.serve(1)
            effort = Effort(rounds=1, sample_s=0.001, pings=1)
            found = await measure_baselines(reactor, responders, effort, tls=(False,))
            self.assertEqual([each.direction for each in found], [UP, DOWN])

        return Deferred.fromCoroutine(measure())  # type: ignore[return-value]

    def test_the_perfect_pipe_is_a_scenario(self) -> None:
        """Its bytes and its samples are there, both ways."""

        async def measure() -> None:
            _, responders = self.serve(2)
            effort = Effort(rounds=3, sample_s=0.001, pings=1)
            up, down = await perfect_pipe(reactor, responders, 100_000, effort, tls=True)
            self.assertEqual((up.direction, down.direction), (UP, DOWN))
            for each in (up, down):
                self.assertEqual((each.wire_bytes, len(each.samples_s)), (100_000, 3))

        return Deferred.fromCoroutine(measure())  # type: ignore[return-value]

    def test_pings(self) -> None:
        """As many as were wanted, of each."""

        async def measure() -> None:
            _, responders = self.serve(2)
            trips = await ping_responders(reactor, responders, 4)
            self.assertEqual([len(each.samples_s) for each in trips], [4, 4])
            self.assertEqual([each.server for each in trips], [each.address for each in responders])

        return Deferred.fromCoroutine(measure())  # type: ignore[return-value]

    def test_a_limit_that_is_reached_ends_it(self) -> None:
        """With the responder's sentence; the connections to the others are closed too."""

        async def measure() -> None:
            services, responders = self.serve(2, max_bytes=50_000)
            try:
                await measure_baselines(reactor, responders, Effort(sample_s=60.0))
            except ResponderError as error:
                self.assertIn("limit of bytes", str(error))
            else:
                self.fail("more was moved than is allowed")
            await self.settle(services)

        return Deferred.fromCoroutine(measure())  # type: ignore[return-value]

    def test_without_a_responder(self) -> None:
        """Nothing can be measured, and that is said."""

        async def measure() -> None:
            try:
                await measure_baselines(reactor, [])
            except UsageError as error:
                self.assertIn("responder", str(error))
            else:
                self.fail("nothing was measured, and nothing said")

        return Deferred.fromCoroutine(measure())  # type: ignore[return-value]

    async def settle(self, services: list[ResponderService]) -> None:
        """Let the reactor turn until nobody is connected."""
        while any(service.visitors for service in services):
            turned: Deferred[None] = Deferred()
            reactor.callLater(0, turned.callback, None)
            await turned
