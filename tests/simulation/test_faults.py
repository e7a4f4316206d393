"""Faults happen where, when and as the plan says, and one seed gives one history."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.error import (
    ConnectError,
    ConnectionLost,
    ConnectionRefusedError,
)
from twisted.internet.protocol import Factory
from twisted.internet.task import deferLater
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.testing.clock import HeapClock
from pipegrid.testing.fault_plan import (
    Crash,
    Cut,
    Fault,
    FaultPlan,
    Partition,
    Refuse,
    Slow,
    Stall,
    shrink,
)
from pipegrid.testing.network import Hung, SentAcross, SimulatedNetwork, run
from pipegrid.testing.simulated_tcp import TcpOptions
from tests.simulation.programs import Echo, Keeping, Recorder, pair

LATENCY_S = 0.05
KB = 1000


class FaultTests(SynchronousTestCase):
    """Each kind of fault, alone."""

    def setUp(self) -> None:
        self.clock = HeapClock()
        self.network = SimulatedNetwork(self.clock, 1, LATENCY_S, 1000 * KB)

    def plan(self, *events: Fault) -> None:
        FaultPlan(events).apply(self.network)

    def pair(self, make: type[Recorder] = Recorder) -> tuple[Recorder, Recorder]:
        near, far = pair(self.network, make)
        self.begun_s = self.clock.seconds()
        return near, far

    def since(self, time_s: float | None) -> float:
        assert time_s is not None
        return round(time_s - self.begun_s, 9)

    def assertLost(self, end: Recorder, since_s: float) -> None:
        assert end.lost is not None
        self.assertIsInstance(end.lost.value, ConnectionLost)
        self.assertEqual(self.since(end.lost_s), round(since_s, 9))

    def test_cut_on_the_way_out(self) -> None:
        """The receiver gets exactly N bytes and the loss, the sender the loss a latency later."""
        self.plan(Cut("client", "server", 0, "server", 12_345))
        near, far = self.pair()
        near.transport.write(b"x" * 50 * KB)
        self.clock.advance(1)
        self.assertEqual(len(far.received), 12_345)
        # Byte 12345 is in the second packet of 10 ms.
        self.assertLost(far, 0.02 + LATENCY_S)
        self.assertLost(near, 0.02 + 2 * LATENCY_S)
        self.assertEqual([s.kind for s in self.network.log].count("cut"), 1)

    def test_cut_on_the_way_back(self) -> None:
        """An answer that is cut: the server did the work, the client cannot know."""
        self.plan(Cut("client", "server", 0, "client", 3))
        near, far = self.pair(Echo)
        near.transport.write(b"request")
        self.clock.advance(1)
        self.assertEqual(far.received, b"request")
        self.assertEqual(near.received, b"req")
        self.assertLost(near, 2 * LATENCY_S + 14e-6)
        self.assertLost(far, 3 * LATENCY_S + 14e-6)

    def test_only_that_connection_is_cut(self) -> None:
        """The plan counts connections; the others live."""
        self.plan(Cut("client", "server", 1, "server", 0))
        first, second = self.pair(), self.pair()
        for near, _ in (first, second):
            near.transport.write(b"x")
        self.clock.advance(1)
        self.assertEqual([bool(end.lost) for end in (*first, *second)], [False, False, True, True])
        self.assertEqual(second[1].received, b"")

    def test_cut_silently(self) -> None:
        """As behind a NAT that forgot: nothing arrives any more, and nobody is told."""
        self.plan(Cut("client", "server", 0, "server", 5, silently=True))
        near, far = self.pair()
        near.transport.write(b"x" * 50)
        self.clock.advance(1)
        far.transport.write(b"are you there?")
        self.clock.advance(10_000)
        self.assertEqual((len(far.received), near.received), (5, b""))
        self.assertEqual((near.lost, far.lost), (None, None))

    def test_stall(self) -> None:
        """A direction that stalls delays what has not entered it, by the rest of the stall."""
        near, far = self.pair(Echo)
        self.plan(Stall(0.01, "client", "server", 2))
        near.transport.write(b"early")
        self.clock.advance(0.02)
        near.transport.write(b"late")
        far.transport.write(b"other direction")
        self.clock.advance(10)
        self.assertEqual(far.pieces[0], (round(self.begun_s + LATENCY_S + 5e-6, 9), 5))
        self.assertEqual(self.since(far.pieces[1][0]), round(2.01 + LATENCY_S + 4e-6, 9))
        self.assertEqual(self.since(near.pieces[0][0]), round(0.02 + LATENCY_S + 15e-6, 9))

    def test_a_connection_that_ends_while_it_is_stalled(self) -> None:
        """What was sent enters the line in several packets when the stall ends, the end behind them all."""
        self.network = SimulatedNetwork(self.clock, 1, LATENCY_S)
        near, far = self.pair()
        self.network.stall("client", "server", 1.0)
        near.transport.write(b"x" * 100 * KB)
        far.transport.loseConnection()
        self.clock.advance(5)
        sent = [(one.kind, one.size_bytes) for one in self.network.log if one.from_host == "client"]
        self.assertEqual(sent[-3:], [("data", 65536), ("data", 100 * KB - 65536), ("fin", 0)])
        for end in (near, far):
            self.assertIsNotNone(end.lost)

    def test_stalled_acknowledgements_stop_the_sender(self) -> None:
        """A window that is full stays full until acknowledgements pass again."""
        self.network.options = TcpOptions(window_bytes=10 * KB)
        near, far = self.pair()
        self.plan(Stall(0, "server", "client", 5))
        self.clock.advance(0)
        near.transport.write(b"x" * 20 * KB)
        self.clock.advance(4)
        self.assertEqual(len(far.received), 10 * KB)
        self.clock.advance(2)
        self.assertEqual(len(far.received), 20 * KB)

    def test_partition_and_overlap(self) -> None:
        """Faults that overlap add up: what is cut off twice is joined when both have ended."""
        near, far = self.pair(Echo)
        self.plan(Partition(0, "server", None, 2), Partition(1, "client", "server", 3))
        self.clock.advance(0.5)
        near.transport.write(b"ping")
        self.clock.advance(3.4)
        self.assertEqual(far.received, b"")
        self.clock.advance(1)
        self.assertEqual(near.received, b"ping")

    def test_slow(self) -> None:
        """Ten times as slow: ten times the latency, a tenth of the rate; then as before."""
        near, far = self.pair()
        self.plan(Slow(0, "client", "server", 10, 5))
        self.clock.advance(0)
        near.transport.write(b"x" * 100 * KB)
        self.assertEqual(self.since(run(self.clock, far.when(100 * KB))), 1 + 10 * LATENCY_S)
        self.assertEqual(self.network.rtt_s("client", "server"), 20 * LATENCY_S)
        self.clock.advance(5)
        self.assertEqual(self.network.rtt_s("client", "server"), 2 * LATENCY_S)

    def test_refuse(self) -> None:
        """New connections are refused for a time; old ones live on."""
        near, _ = self.pair(Echo)
        self.plan(Refuse(0, "server", 1))
        self.clock.advance(0)
        self.network.host("server").listen(80, Keeping())
        endpoint = self.network.endpoint("client", "server", 80)
        self.assertRaises(ConnectionRefusedError, run, self.clock, endpoint.connect(Keeping()))
        near.transport.write(b"still here")
        run(self.clock, near.when(10))
        self.clock.advance(1)
        run(self.clock, endpoint.connect(Factory.forProtocol(Recorder)))

    def test_crash(self) -> None:
        """Peers are reset, the crashed program hears nothing, the port refuses until the restart."""
        near, far = self.pair()
        server = self.network.host("server")
        fired: list[str] = []
        server.clock.callLater(0.5, fired.append, "a timer of the dead")
        server.on_crash.append(lambda: fired.append("crash"))
        server.on_restart.append(lambda: fired.append("restart"))
        server.on_restart.append(lambda: server.listen(80, Keeping(Echo)))
        self.plan(Crash(0.1, "server", 1))
        self.clock.advance(0.1)
        self.assertIn("server is down", self.network.describe())
        near.transport.write(b"to the dead")
        run(self.clock, near.over)
        self.assertLost(near, 0.1 + LATENCY_S)
        endpoint = self.network.endpoint("client", "server", 80)
        self.assertRaises(ConnectionRefusedError, run, self.clock, endpoint.connect(Keeping()))
        self.clock.advance(1)
        again = run(self.clock, endpoint.connect(Factory.forProtocol(Recorder)))
        assert isinstance(again, Recorder)
        again.transport.write(b"hello")
        run(self.clock, again.when(5))
        self.assertEqual(fired, ["crash", "restart"])
        self.assertEqual((far.lost, far.received), (None, b""))

    def test_power_cut(self) -> None:
        """A machine that is gone answers nothing; when it is back, it knows no old connection."""
        near, _ = self.pair()
        self.plan(Crash(0, "server", 10, silently=True))
        self.clock.advance(0)
        near.transport.write(b"one")
        self.clock.advance(9)
        self.assertIsNone(near.lost)
        self.clock.advance(2)
        near.transport.write(b"two")
        run(self.clock, near.over)
        self.assertLost(near, 11 + 2 * LATENCY_S + 3e-6)

    def test_a_crash_in_the_handshake(self) -> None:
        """A server that goes between its two parts of a handshake leaves no half connection."""
        for silently in (False, True):
            network = SimulatedNetwork(clock := HeapClock(), 1, LATENCY_S)
            network.host("server").listen(80, server := Keeping())
            FaultPlan((Crash(0.12, "server", 1, silently),)).apply(network)
            near = run(
                clock,
                network.endpoint("client", "server", 80).connect(Factory.forProtocol(Recorder)),
            )
            assert isinstance(near, Recorder)
            clock.advance(2)
            near.transport.write(b"hello?")
            run(clock, near.over)
            self.assertEqual(server.made, [])

    def test_a_client_that_crashes_while_connecting(self) -> None:
        """Nobody is called back, and the server gets no connection."""
        server = Keeping()
        self.network.host("server").listen(80, server)
        deferred = self.network.endpoint("client", "server", 80).connect(Keeping())
        self.plan(Crash(0.07, "client", None))
        self.clock.advance(100)
        self.assertNoResult(deferred)
        self.assertEqual((server.made, self.network.connecting), ([], {}))


class Stubborn:
    """
    Has a server echo a message, over as many connections as it takes.

    A toy, but it has what the real thing must have: a time-out, retries, a check of every byte.
    """

    TIMEOUT_S = 5.0

    def __init__(self, network: SimulatedNetwork, message: bytes) -> None:
        self.network = network
        self.message = message
        self.clock = network.host("client").clock
        self.attempts = 0

    async def work(self) -> bytes:
        while True:
            self.attempts += 1
            try:
                return await self.attempt()
            except (EOFError, ConnectError, DeferredTimeout):
                await deferLater(self.clock, 1)

    async def attempt(self) -> bytes:
        endpoint = self.network.endpoint("client", "server", 80, self.TIMEOUT_S)
        near = await endpoint.connect(Factory.forProtocol(Recorder))
        assert isinstance(near, Recorder)
        near.transport.write(self.message)
        done: Deferred[None] = Deferred()

        def end(_: object) -> None:
            if not done.called:
                done.callback(None)

        near.when(len(self.message)).addCallback(end)
        near.over.addCallback(end)
        done.addTimeout(self.TIMEOUT_S, self.clock)
        try:
            await done
        finally:
            near.transport.abortConnection()
        assert self.message.startswith(near.received), "the network lied"
        if len(near.received) < len(self.message):
            raise EOFError
        return bytes(near.received)


def play(plan: FaultPlan, limit_s: float = 600) -> tuple[list[SentAcross], int]:
    """Run one schedule; return the whole log and the number of attempts."""
    clock = HeapClock()
    network = SimulatedNetwork(clock, 1, LATENCY_S, 1000 * KB, TcpOptions(shred=True))
    server = network.host("server")

    def boot() -> None:
        server.listen(80, Keeping(Echo))

    boot()
    server.on_restart.append(boot)
    plan.apply(network)
    client = Stubborn(network, bytes(range(256)) * 40)
    answer = run(clock, Deferred.fromCoroutine(client.work()), limit_s, network)
    assert answer == client.message
    clock.advance(100)
    return list(network.log), client.attempts


def planned(seed: int) -> FaultPlan:
    return FaultPlan.random(seed, ["client"], ["server"], 0.3, 8, bytes_scale=15_000)


class PlanTests(SynchronousTestCase):
    """Plans as things: printed, replayed, shrunk."""

    def test_a_plan_prints_as_python(self) -> None:
        """What is printed makes the same plan again."""
        for seed in range(50):
            plan = planned(seed)
            self.assertEqual(eval(str(plan)), plan)
        self.assertEqual(planned(3), planned(3))
        self.assertEqual(len({planned(seed).events for seed in range(50)}), 50)

    def test_every_kind_is_drawn(self) -> None:
        """Random plans hold faults of every kind, and only of those that are wanted."""
        drawn = {type(event) for seed in range(50) for event in planned(seed).events}
        self.assertEqual(drawn, {Cut, Stall, Partition, Crash, Slow, Refuse})
        only = FaultPlan.random(1, ["client"], ["server"], 3, faults=20, kinds=[Cut])
        self.assertEqual({type(event) for event in only.events}, {Cut})

    def test_one_seed_one_history(self) -> None:
        """The same plan gives the same log, to the nanosecond; another plan another."""
        logs = [play(planned(seed))[0] for seed in (1, 2, 1, 2)]
        self.assertEqual(logs[0], logs[2])
        self.assertEqual(logs[1], logs[3])
        self.assertNotEqual(logs[0], logs[1])

    def test_hundreds_of_schedules(self) -> None:
        """Whatever goes wrong, who is stubborn gets the answer, whole and true, and none hangs."""

        def attempts(seed: int) -> int:
            try:
                return play(planned(seed))[1]
            except Exception as error:
                self.fail(f"{error!r} with\n{planned(seed)}")

        # The faults do bite.
        self.assertGreater(sum(attempts(seed) > 1 for seed in range(500)), 150)

    def test_shrink(self) -> None:
        """Of many faults, those that make a run fail are found."""
        fatal = Crash(0, "server", None)
        plan = FaultPlan((Slow(0, "client", "server", 2, 1), fatal, Refuse(0, "server", 1)))

        def fails(candidate: FaultPlan) -> bool:
            try:
                play(candidate, limit_s=60)
            except Hung:
                return True
            return False

        self.assertEqual(shrink(plan, fails).events, (fatal,))
