"""One connection, in up to two attempts: a lost packet, or a handshake that hangs, costs no server."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.error import ConnectionLost
from twisted.internet.interfaces import INegotiated, IProtocol
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import classImplements

from pipegrid.http11.connection import PipelinedConnection
from pipegrid.http11.connection_limits import Limits
from pipegrid.http11.connection_loss import NoOwner
from pipegrid.http11.dialer import (
    LATE_S,
    MOST_LATE,
    SECOND_AFTER,
    STAGGER_S,
    Alternatives,
    Dialer,
)
from pipegrid.http11.exchange import WrongServerKey
from pipegrid.http11.host_pool import HostPool
from pipegrid.http11.upload_connection import UploadConnection
from pipegrid.reactor.client_tls import PreconnectedEndpoint, TlsFailed
from pipegrid.reactor.tls_settings import http_context
from tests.http11.network import Network, ServerSide
from tests.http11.wire import get

LIMIT_S = 16.0
SECOND_S = LIMIT_S * SECOND_AFTER


class TlsSide(ServerSide):
    """The other end of a connection over TLS."""

    negotiatedProtocol = None

    def setTcpNoDelay(self, enabled: bool) -> None:
        """As of a socket."""


class Place(Network):
    """A network whose connections are over TLS, as far as they can see; nothing is accepted by itself."""

    def __init__(self) -> None:
        super().__init__(auto_accept=False)
        self.clock.advance(1000)
        self.tries = 0

    def connect(self, protocolFactory: Any) -> Deferred[IProtocol]:
        self.tries += 1
        return super().connect(protocolFactory)

    def connected(self, number: int) -> ServerSide:
        """TCP is there, and TLS has begun, of the attempt with this number among those that wait."""
        factory, made = self.attempts.pop(number)
        side: Any = TlsSide()
        side.protocol = factory.buildProtocol(None)
        self.connections.append(side)
        side.protocol.makeConnection(side)
        made.callback(side.protocol)
        return side  # type: ignore[no-any-return]


declare: Any = classImplements  # mypy wants all of its members
declare(TlsSide, INegotiated)


class DialerCase(SynchronousTestCase):
    """A dialer, and what it dials."""

    def setUp(self) -> None:
        self.network = Place()
        self.clock = self.network.clock
        clock: Any = self.clock
        self.limits = Limits(connect_timeout_s=LIMIT_S)
        endpoints: Any = lambda: self.network  # noqa: E731
        self.dialer = Dialer(clock, self.limits, "alice", endpoints)
        self.owner = NoOwner()

    def dial(self) -> Deferred[PipelinedConnection]:
        """Want a connection."""
        return self.dialer.dial(self.owner)

    def assert_nothing_left(self, *kept: ServerSide) -> None:
        """No timer is, but for those that are kept, and no connection; it says so."""
        self.network.turn()
        for side in self.network.connections:
            self.assertEqual(side.is_lost, side not in kept)
        for side in kept:
            side.protocol.abort()
        self.network.turn()
        self.successResultOf(self.dialer.when_gone())
        self.assertEqual(self.clock.getDelayedCalls(), [])


class SecondAttemptTests(DialerCase):
    """An attempt that hangs."""

    def test_when_it_is_not_connected(self) -> None:
        """After a quarter of the time another one is made, and no third; whichever is usable is taken."""
        d = self.dial()
        self.clock.advance(SECOND_S - 0.01)
        self.assertEqual(self.network.tries, 1)
        self.clock.advance(0.01)
        self.assertEqual(self.network.tries, 2)
        (_, first), _ = self.network.attempts
        side = self.network.connected(1)
        self.assertNoResult(d)
        side.protocol.handshakeCompleted()
        connection = self.successResultOf(d)
        self.assertIs(connection, side.protocol)
        self.assertIs(connection.owner, self.owner)
        self.assertTrue(first.called, "it was cancelled")
        self.clock.advance(LIMIT_S)
        self.assertEqual(self.network.tries, 2)
        self.assertTrue(connection.open)
        self.assert_nothing_left(side)

    def test_when_its_handshake_is_not_over(self) -> None:
        """It counts as long as TLS is not ready: the server may have dropped it without a word."""
        d = self.dial()
        hangs = self.network.connected(0)
        self.clock.advance(SECOND_S)
        side = self.network.connected(0)
        side.protocol.handshakeCompleted()
        self.assertIs(self.successResultOf(d), side.protocol)
        self.assertTrue(hangs.disconnecting)
        hangs.protocol.handshakeCompleted()  # too late
        self.assert_nothing_left(side)

    def test_the_first_was_only_slow(self) -> None:
        """Then it is taken, and the second one is given up, whatever has become of that."""
        for accepted in (False, True):
            d = self.dial()
            side = self.network.connected(0)
            self.clock.advance(SECOND_S)
            if accepted:
                self.network.connected(0)
            side.protocol.handshakeCompleted()
            self.assertIs(self.successResultOf(d), side.protocol)
            self.network.attempts.clear()
            self.network.turn()
            self.assertEqual(self.network.live(), [side])
            side.lose()
        self.assert_nothing_left()

    def test_neither_is_usable(self) -> None:
        """All of it takes no longer than one attempt may: TCP and TLS count together."""
        d = self.dial()
        self.clock.advance(SECOND_S)
        self.network.connected(0)
        self.clock.advance(LIMIT_S - SECOND_S - 0.1)
        self.network.connected(0)
        self.assertNoResult(d)
        self.clock.advance(0.1)
        error = self.failureResultOf(d, ConnectionError).value
        self.assertEqual(str(error), f"it was not usable after {LIMIT_S:g} s")
        self.assertEqual(self.network.tries, 2)
        self.assert_nothing_left()

    def test_a_hung_connection_costs_no_request(self) -> None:
        """Neither of a pool nor of uploads: they are asked on the second connection."""
        clock: Any = self.clock
        endpoints: Any = lambda: self.network  # noqa: E731
        pool = HostPool(clock, endpoints, "alice", self.limits)
        uploads = UploadConnection(clock, endpoints, "alice", self.limits, time_limit_s=20.0)
        for ask in (pool.request, uploads.request):
            d: Deferred[Any] = ask(get("/a"))
            self.network.connected(0)
            self.clock.advance(SECOND_S)
            self.network.connected(0).protocol.handshakeCompleted()
            self.network.serve()
            self.successResultOf(d)
        closed = [pool.close(), uploads.close()]
        self.network.turn()
        for each in closed:
            self.successResultOf(each)
        self.assertEqual(self.network.tries, 4)
        self.assert_nothing_left()

    def test_closing_waits_for_what_is_given_up(self) -> None:
        """Who closes a pool or uploads hears when the last transport is gone, usable or not."""
        clock: Any = self.clock
        endpoints: Any = lambda: self.network  # noqa: E731
        pool = HostPool(clock, endpoints, "alice", self.limits)
        uploads = UploadConnection(clock, endpoints, "alice", self.limits, time_limit_s=20.0)
        owners: tuple[HostPool | UploadConnection, ...] = pool, uploads
        for owner in owners:
            d: Deferred[Any] = owner.request(get("/a"))
            self.network.connected(0)
            closed = owner.close()
            self.failureResultOf(d)
            self.assertNoResult(closed)
            self.network.turn()
            self.successResultOf(closed)
        self.assert_nothing_left()


class FailedAttemptTests(DialerCase):
    """An attempt that fails."""

    def test_alone(self) -> None:
        """It fails at once: there are others to ask."""
        d = self.dial()
        _, first = self.network.attempts.pop()
        first.errback(ConnectionRefusedError())
        self.failureResultOf(d, ConnectionRefusedError)
        self.clock.advance(LIMIT_S)
        self.assertEqual(self.network.tries, 1)
        self.assert_nothing_left()

    def test_either_of_two(self) -> None:
        """The other one may still succeed."""
        for number in (0, 1):
            d = self.dial()
            self.clock.advance(SECOND_S)
            _, failing = self.network.attempts.pop(number)
            failing.errback(ConnectionRefusedError())
            self.assertNoResult(d)
            side = self.network.connected(0)
            side.protocol.handshakeCompleted()
            self.assertIs(self.successResultOf(d), side.protocol)
            side.lose()
        self.assert_nothing_left()

    def test_lost_in_its_handshake(self) -> None:
        """Another one is made at once, but only once; and not for what will be the same again."""
        d = self.dial()
        self.network.connected(0).lose(ConnectionLost())
        self.assertNoResult(d)
        self.network.turn()
        side = self.network.connected(0)
        side.protocol.handshakeCompleted()
        self.assertIs(self.successResultOf(d), side.protocol)
        side.lose()
        d = self.dial()
        self.network.connected(0).lose(ConnectionLost())
        self.network.turn()
        self.network.connected(0).lose(ConnectionLost())
        self.failureResultOf(d, ConnectionError)
        for why in (WrongServerKey("it is another one", "alice"), TlsFailed("it speaks no TLS")):
            d = self.dial()
            self.network.connected(0).lose(why)
            self.failureResultOf(d)
        self.assertEqual(self.network.tries, 6)
        self.assert_nothing_left()

    def test_given_up_between_two(self) -> None:
        """Nothing is dialled any more."""
        d = self.dial()
        self.network.connected(0).lose(ConnectionLost())
        d.cancel()
        self.failureResultOf(d, CancelledError)
        self.assert_nothing_left()
        self.assertEqual(self.network.tries, 1)

    def test_both(self) -> None:
        """What the last one says is told."""
        d = self.dial()
        side = self.network.connected(0)
        self.clock.advance(SECOND_S)
        side.lose(ConnectionLost())
        self.assertNoResult(d)
        other = self.network.connected(0)
        other.lose(WrongServerKey("it is another one", "alice"))
        self.failureResultOf(d, WrongServerKey)
        self.assert_nothing_left()

    def test_one_that_cannot_be_made_at_all(self) -> None:
        """It is told as any other failure, and a second one ends nothing."""
        with self.subTest("the second"):
            d = self.dial()
            self.network.refuse = OSError("no files to spare")
            self.clock.advance(SECOND_S)
            self.assertNoResult(d)
            side = self.network.connected(0)
            side.protocol.handshakeCompleted()
            self.assertIs(self.successResultOf(d), side.protocol)
            side.lose()
        with self.subTest("the first"):
            self.failureResultOf(self.dial(), OSError)
        self.assert_nothing_left()

    def test_closed_before_the_endpoint_says_that_it_is_there(self) -> None:
        """Then it was closed at once, and the second one, too."""
        hasties: list[object] = []

        class Hasty:
            def connect(self, factory: Any) -> Deferred[Any]:
                side = ServerSide()
                hasties.append(side)
                side.protocol = factory.buildProtocol(None)
                side.protocol.makeConnection(side)
                side.lose()
                return succeed(side.protocol)

        clock: Any = self.clock
        hasty: Any = Hasty
        d = Dialer(clock, self.limits, "alice", hasty).dial(self.owner)
        self.clock.advance(0)
        self.assertEqual(len(hasties), 2)
        error = self.failureResultOf(d, ConnectionError).value
        self.assertEqual(str(error), "it was closed at once")
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_an_endpoint_that_tries_again_by_itself(self) -> None:
        """What became of its first protocol is its own affair: the last one is the connection."""
        d = self.dial()
        (factory, _) = self.network.attempts[0]
        lost: Any = TlsSide()
        lost.protocol = factory.buildProtocol(None)
        lost.protocol.makeConnection(lost)
        lost.lose(ConnectionLost())
        self.assertNoResult(d)
        side = self.network.connected(0)
        side.protocol.handshakeCompleted()
        self.assertIs(self.successResultOf(d), side.protocol)
        self.assert_nothing_left(side)

    def test_cancelled(self) -> None:
        """Nothing goes on: of two attempts no more than of one."""
        for second in (False, True):
            d = self.dial()
            self.network.connected(0)
            if second:
                self.clock.advance(SECOND_S)
            d.cancel()
            self.failureResultOf(d, CancelledError)
            for _, attempt in self.network.attempts:
                self.assertTrue(attempt.called, "it was cancelled")
            self.network.attempts.clear()
            gone = self.dialer.when_gone()
            self.assertNoResult(gone)
            self.network.turn()
            self.successResultOf(gone)
            self.assert_nothing_left()


class MadeAheadTests(DialerCase):
    """Connections that were begun before Twisted was there."""

    def test_one_that_hangs(self) -> None:
        """The second attempt does not wait for it, but dials."""
        taken: list[object] = []

        class Hanging:
            def take(self, address: object, ready: object) -> bool:
                taken.append(ready)
                return len(taken) == 1  # the first one to ask gets it, some time

        def endpoint() -> Any:
            hanging: Any = Hanging()
            network: Any = self.network
            return PreconnectedEndpoint(
                self.clock, hanging, ("127.0.0.1", 1), http_context(), lambda _: None, network
            )

        clock: Any = self.clock
        d = Dialer(clock, self.limits, "alice", endpoint).dial(self.owner)
        self.clock.advance(SECOND_S - 0.01)
        self.assertEqual(self.network.tries, 0)
        self.clock.advance(0.01)
        self.assertEqual(self.network.tries, 1)
        d.cancel()
        self.failureResultOf(d, CancelledError)
        self.assertEqual(len(taken), 2)
        self.assertEqual(self.clock.getDelayedCalls(), [])


class StandstillTests(DialerCase):
    """A process that was suspended, or a reactor that something blocked, while it connects."""

    def test_in_the_middle(self) -> None:
        """What has come meanwhile is looked at before anything is given up; a second attempt is made, too."""
        d = self.dial()
        side = self.network.connected(0)
        self.clock.advance(LIMIT_S + 20)
        self.assertNoResult(d)
        self.assertEqual(self.network.tries, 2)
        side.protocol.handshakeCompleted()
        self.assertIs(self.successResultOf(d), side.protocol)
        self.network.attempts.clear()
        self.assert_nothing_left(side)

    def test_nothing_has_come(self) -> None:
        """Then there is a quarter of the time more."""
        d = self.dial()
        self.clock.advance(LIMIT_S + 20)
        self.clock.advance(SECOND_S - 0.1)
        self.assertNoResult(d)
        self.clock.advance(0.1)
        self.failureResultOf(d, ConnectionError)
        self.assert_nothing_left()

    def test_again_and_again(self) -> None:
        """It is not for ever."""
        d = self.dial()
        self.network.connected(0)
        self.clock.advance(LIMIT_S + LATE_S + 0.1)
        for _ in range(MOST_LATE - 1):
            self.clock.advance(SECOND_S + LATE_S + 0.1)
            self.assertNoResult(d)
        self.clock.advance(SECOND_S + LATE_S + 0.1)
        self.failureResultOf(d, ConnectionError)
        self.assert_nothing_left()


class AlternativesTests(DialerCase):
    """Several addresses of one host."""

    def use(self, count: int) -> None:
        """Have the dialer know so many addresses, of which ``places`` are in their order."""
        self.places = [self.network, *(Place() for _ in range(count - 1))]
        for each in self.places:
            each.clock = self.clock
        endpoints: Any = [lambda each=each: each for each in self.places]
        self.dialer = Dialer(self.clock, self.limits, "alice", Alternatives(endpoints))

    @property
    def tries(self) -> list[int]:
        """How often each address was dialled."""
        return [each.tries for each in self.places]

    def usable(self, place: int, d: Deferred[PipelinedConnection]) -> ServerSide:
        """Have the only attempt at an address become usable; it is the one that is taken."""
        side = self.places[place].connected(0)
        side.protocol.handshakeCompleted()
        self.assertIs(self.successResultOf(d), side.protocol)
        return side

    def gone(self, *kept: ServerSide) -> None:
        """Nothing is left anywhere."""
        for each in self.places[1:]:
            self.network.connections += each.connections
        self.assert_nothing_left(*kept)

    def test_the_first_refuses(self) -> None:
        """The second is dialled in the same moment."""
        self.use(2)
        d = self.dial()
        self.network.attempts.pop()[1].errback(ConnectionRefusedError())
        self.assertEqual(self.tries, [1, 1])
        self.gone(self.usable(1, d))

    def test_the_first_swallows_packets(self) -> None:
        """The second is dialled after a quarter of a second; no more than half a second is lost in all."""
        self.use(2)
        d = self.dial()
        self.clock.advance(STAGGER_S - 0.01)
        self.assertEqual(self.tries, [1, 0])
        self.clock.advance(0.01)
        self.assertEqual(self.tries, [1, 1])
        self.assertLessEqual(STAGGER_S, 0.5)
        side = self.usable(1, d)
        self.assertTrue(self.network.attempts[0][1].called, "it was cancelled")
        self.gone(side)

    def test_the_first_is_slow(self) -> None:
        """It counts when TLS is ready; whichever is ready first is taken, and the other one cut."""
        for winner in (0, 1):
            self.setUp()
            self.use(2)
            d = self.dial()
            sides = [self.network.connected(0)]
            self.clock.advance(STAGGER_S)
            sides.append(self.places[1].connected(0))
            sides[winner].protocol.handshakeCompleted()
            self.assertIs(self.successResultOf(d), sides[winner].protocol)
            self.gone(sides[winner])

    def test_the_first_is_another_machine(self) -> None:
        """As an address of a private network is, in another one: its key is wrong, and nothing else is."""
        self.use(2)
        d = self.dial()
        self.network.connected(0).lose(WrongServerKey("no", "alice"))
        self.assertEqual(self.tries, [1, 1])
        self.gone(self.usable(1, d))

    def test_what_worked_is_tried_first(self) -> None:
        """From then on; the others wait for their turn as ever."""
        self.use(3)
        d = self.dial()
        for number in (1, 2):
            self.clock.advance(STAGGER_S)
            self.assertEqual(self.tries, [1 if each <= number else 0 for each in range(3)])
        first = self.usable(2, d)
        d = self.dial()
        self.assertEqual(self.tries, [1, 1, 2])
        second = self.usable(2, d)
        self.clock.advance(LIMIT_S)
        self.assertEqual(self.tries, [1, 1, 2])
        self.gone(first, second)

    def test_none_works(self) -> None:
        """Each is tried, at once where the one before has failed, and that is said."""
        self.use(3)
        d = self.dial()
        for place in self.places:
            place.attempts.pop()[1].errback(ConnectionRefusedError())
        self.failureResultOf(d, ConnectionRefusedError)
        self.assertEqual(self.tries, [1, 1, 1])
        d = self.dial()
        self.clock.pump([STAGGER_S] * round(LIMIT_S / STAGGER_S))
        self.failureResultOf(d, ConnectionError)
        self.assertEqual(self.tries, [3, 2, 2])  # the second attempt is the best address's
        self.gone()

    def test_given_up(self) -> None:
        """Nothing goes on."""
        self.use(3)
        d = self.dial()
        self.clock.advance(STAGGER_S)
        d.cancel()
        self.failureResultOf(d)
        self.gone()
