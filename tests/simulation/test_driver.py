"""Running until done, or finding out why it never is."""

from __future__ import annotations

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock, deferLater
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.testing.clock import HeapClock
from pipegrid.testing.network import Hung, SimulatedNetwork, leaks, run
from tests.simulation.programs import Keeping, pair


class RunTests(SynchronousTestCase):
    """The loop."""

    def test_results_and_failures(self) -> None:
        """A result is returned, a failure raised, and time stands where it was decided."""
        for clock in (HeapClock(), Clock()):
            self.assertEqual(run(clock, succeed(1)), 1)
            self.assertRaises(ZeroDivisionError, run, clock, fail(ZeroDivisionError()))
            clock.callLater(7, lambda: None)
            self.assertEqual(run(clock, deferLater(clock, 2.5, lambda: "late")), "late")
            self.assertEqual(clock.seconds(), 2.5)

    def test_nothing_scheduled(self) -> None:
        """If nothing can ever happen, that is known at once."""
        deferred: Deferred[None] = Deferred()
        error = self.assertRaises(Hung, run, HeapClock(), deferred)
        self.assertIn("nothing is scheduled", str(error))

    def test_the_limit(self) -> None:
        """At the limit, the report names what is pending: connections, stalls, timers."""
        clock = HeapClock()
        network = SimulatedNetwork(clock)
        near, _ = pair(network)
        network.partition("client", "server")
        near.transport.write(b"anybody there?")
        clock.callLater(1000, self.fail)
        deferred: Deferred[None] = Deferred()
        error = self.assertRaises(Hung, run, clock, deferred, 60, network)
        for part in (
            "not done after 60 s",
            "<connection #0 at client",
            "client → server is stalled",
            "fail",
        ):
            self.assertIn(part, str(error))

    def test_standstill(self) -> None:
        """Calls without delay that make each other for ever are found out."""
        clock = HeapClock()

        def again() -> None:
            clock.callLater(0, again)

        again()
        deferred: Deferred[None] = Deferred()
        self.assertIn("in no time", str(self.assertRaises(Hung, run, clock, deferred)))

    def test_leaks(self) -> None:
        """What is still there is listed: connections, attempts to connect, timers."""
        clock = HeapClock()
        network = SimulatedNetwork(clock)
        near, _ = pair(network)
        self.assertEqual(len(leaks(clock, network)), 2)
        near.transport.loseConnection()
        clock.advance(1)
        self.assertEqual(leaks(clock, network), [])
        deferred = network.endpoint("client", "server", 9).connect(Keeping())
        self.assertIn("<connecting client → server:9>", leaks(clock, network)[0])
        deferred.cancel()
        self.failureResultOf(deferred)
        clock.callLater(1, self.fail)
        clock.advance(0.5)
        self.assertEqual(len(leaks(clock, network)), 1)
