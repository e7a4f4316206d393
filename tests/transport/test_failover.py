"""Several routes to one server: the preferred one from the first moment on, the others where it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import NoSuchShare, ServerError, ServerUnreachable, WriteLost, WrongSwissnum
from pipegrid.transport.failover import MOST_LATE, STAGGER_S, TLS_S, FailoverServer, Route
from pipegrid.transport.interface import disconnected
from pipegrid.wire.storage_messages import ServerIdentity

IDENTITY = ServerIdentity("v0-a", "alice", b"s" * 20, b"l" * 20)
SI = b"i" * 16


class FakeServer:
    """Notes what it is asked, in order; tests answer."""

    def __init__(self, told: Callable[[bool], None]) -> None:
        self.told = told
        self.asked: list[tuple[str, Deferred[Any]]] = []
        self.is_open = True

    def _ask(self, name: str) -> Deferred[Any]:
        answer: Deferred[Any] = Deferred()
        self.asked.append((name, answer))
        return answer

    def version(self) -> Deferred[Any]:
        return self._ask("version")

    def list_shares(self, storage_index: bytes) -> Deferred[Any]:
        return self._ask("list_shares")

    def read(self, storage_index: bytes, number: int, offset: int, length: int) -> Deferred[Any]:
        return self._ask(f"read {number}")

    def write(self, *call: Any, release: Any = None, again: bool = False) -> Deferred[Any]:
        self.release = release
        return self._ask("write")

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.asked]

    def fail(self, error: ServerError) -> None:
        for _, answer in self.asked:
            if not answer.called:
                answer.errback(error)

    def disconnect(self) -> Deferred[None]:
        self.is_open = False
        self.fail(disconnected("alice"))
        gone: Deferred[None] = Deferred()
        gone.callback(None)
        return gone


class FailoverTests(SynchronousTestCase):
    """In virtual time."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.opened: list[list[FakeServer]] = [[], [], []]
        self.chosen: list[str] = []
        self.server = self.over(3)

    def over(self, count: int) -> FailoverServer:
        def opens(place: int) -> Callable[[Callable[[bool], None]], Any]:
            def open_route(told: Callable[[bool], None]) -> FakeServer:
                self.opened[place].append(FakeServer(told))
                return self.opened[place][-1]

            return open_route

        routes = [Route("https", f"route {each}", opens(each)) for each in range(count)]
        return FailoverServer(
            IDENTITY, routes, self.clock, lambda route: self.chosen.append(route.address)
        )

    def route(self, place: int) -> FakeServer:
        return self.opened[place][-1]

    def down(self) -> ServerUnreachable:
        return ServerUnreachable("refused", "alice")

    def test_preferred_alone(self) -> None:
        """One that is usable in time carries everything from the first moment on; no other is asked."""
        first = self.server.list_shares(SI)
        self.assertEqual(self.route(0).names, ["list_shares"])
        self.route(0).told(True)
        self.clock.advance(60)
        self.assertEqual(self.opened[1:], [[], []])
        self.route(0).asked[0][1].callback(frozenset({1}))
        self.assertEqual(self.successResultOf(first), frozenset({1}))
        self.assertEqual(self.chosen, ["route 0"])

    def test_last_activity(self) -> None:
        """The activity of a route counts, or a transfer would give up a server that is busy with others."""
        self.server.list_shares(SI)
        setattr(self.opened[0][0], "last_activity_s", 7.0)  # noqa: B010  only servers of a network have it
        self.assertEqual(getattr(self.server, "last_activity_s", None), 7.0)

    def test_small_reads_that_are_expected(self) -> None:
        """Before a route is chosen, only an answer counts; later, a route without it is asked nothing."""
        expected = self.server.expect_small_reads()
        self.assertEqual((self.route(0).names, self.chosen), (["version"], []))
        self.route(0).fail(self.down())
        self.route(1).asked[0][1].callback(None)
        self.route(1).asked[1][1].callback(None)
        self.assertIsNone(self.successResultOf(expected))
        self.assertEqual(self.chosen, ["route 1"])
        asked = len(self.route(1).names)
        self.assertIsNone(self.successResultOf(self.server.expect_small_reads()))
        self.assertEqual(len(self.route(1).names), asked)

    def test_refused(self) -> None:
        """Others are asked at once; calls follow in their order, and what comes later goes there."""
        calls: list[Deferred[Any]] = [self.server.list_shares(SI), self.server.read(SI, 1, 0, 9)]
        self.route(0).fail(self.down())
        self.assertEqual(self.route(1).names, ["version"])
        calls.append(self.server.read(SI, 2, 0, 9))
        self.route(1).asked[0][1].callback(None)
        self.assertEqual(self.route(1).names, ["version", "list_shares", "read 1", "read 2"])
        self.assertEqual(self.chosen, ["route 1"])
        for _, answer in self.route(1).asked[1:]:
            answer.callback(7)
        self.assertEqual([self.successResultOf(each) for each in calls], [7, 7, 7])
        self.server.read(SI, 3, 0, 9)
        self.assertEqual(self.route(1).names[-1], "read 3")
        self.assertEqual(len(self.opened[0]), 1)

    def test_swallowed(self) -> None:
        """A route that says nothing costs a quarter of a second; the next as much."""
        call = self.server.list_shares(SI)
        self.clock.advance(STAGGER_S)
        self.assertEqual(self.route(1).names, ["version"])
        self.clock.advance(STAGGER_S)
        self.assertEqual(self.route(2).names, ["version"])
        self.route(2).asked[0][1].callback(None)
        self.assertFalse(self.route(0).is_open or self.route(1).is_open)
        self.route(2).asked[1][1].callback(7)
        self.assertEqual(self.successResultOf(call), 7)

    def test_slow_tls(self) -> None:
        """Where TCP has connected it has somewhat longer: together less than half a second."""
        self.server.list_shares(SI)
        self.route(0).told(False)
        self.clock.advance(STAGGER_S)
        self.assertEqual(self.opened[1], [])
        self.clock.advance(TLS_S)
        self.assertEqual(self.route(1).names, ["version"])
        self.assertLess(STAGGER_S + TLS_S, 0.5)

    def test_busy_program(self) -> None:
        """A timer that is late says nothing about the server; so often at most."""
        self.server.list_shares(SI)
        for _ in range(MOST_LATE):
            self.clock.advance(1.0)
            self.assertEqual(self.opened[1], [])
        self.clock.advance(1.0)
        self.assertEqual(self.route(1).names, ["version"])

    def test_usable_while_others_are_asked(self) -> None:
        """What was asked stays where it is; the others are disconnected, and no more are begun."""
        call = self.server.list_shares(SI)
        self.clock.advance(STAGGER_S)
        self.route(0).told(True)
        self.assertFalse(self.route(1).is_open)
        self.clock.advance(60)
        self.assertEqual(self.opened[2], [])
        self.route(0).asked[0][1].callback(7)
        self.assertEqual(self.successResultOf(call), 7)
        self.assertEqual(self.route(0).names, ["list_shares"])

    def test_what_was_sent_is_sent_once(self) -> None:
        """A loss after it was usable is the call's own failure, and the next call begins again."""
        first, second = self.server.list_shares(SI), self.server.read(SI, 1, 0, 9)
        self.route(0).told(True)
        self.route(0).fail(self.down())
        self.failureResultOf(first, ServerUnreachable)
        self.failureResultOf(second, ServerUnreachable)
        self.assertEqual(self.opened[1], [])
        third = self.server.list_shares(SI)
        self.assertEqual(len(self.opened[0]), 2)
        self.route(0).fail(self.down())
        self.route(1).asked[0][1].callback(None)
        self.route(1).asked[1][1].callback(7)
        self.assertEqual(self.successResultOf(third), 7)

    def test_an_answer_is_an_answer(self) -> None:
        """Whatever a server answers is the result, and decides."""
        call = self.server.read(SI, 1, 0, 9)
        self.route(0).fail(NoSuchShare("none", "alice"))
        self.failureResultOf(call, NoSuchShare)
        self.assertEqual(self.chosen, ["route 0"])

    def test_wrong_secret(self) -> None:
        """A server that does not know the secret has done nothing: another address may have the right one."""
        calls: list[Deferred[Any]] = [self.server.list_shares(SI), self.server.read(SI, 1, 0, 9)]
        self.route(0).told(True)
        self.route(0).fail(WrongSwissnum("wrong", "alice"))
        self.route(1).asked[0][1].callback(None)
        for _, answer in self.route(1).asked[1:]:
            answer.callback(7)
        self.assertEqual([self.successResultOf(each) for each in calls], [7, 7])

    def test_bytes_that_are_gone(self) -> None:
        """A write whose bytes were let go of is made again by the caller."""
        gone: list[int] = []
        call = self.server.write(SI, 1, 0, [b"x"], b"u" * 32, release=lambda: gone.append(1))
        self.route(0).told(True)
        self.route(0).release()
        self.route(0).fail(WrongSwissnum("wrong", "alice"))
        self.route(1).asked[0][1].callback(None)
        self.failureResultOf(call, WriteLost)
        self.assertEqual((gone, self.route(1).names), ([1], ["version"]))

    def test_none_works(self) -> None:
        """The preferred one's error is what callers get; the next call begins again."""
        calls: list[Deferred[Any]] = [self.server.list_shares(SI), self.server.read(SI, 1, 0, 9)]
        self.route(0).fail(self.down())
        for place in (1, 2):
            self.route(place).fail(ServerUnreachable(f"route {place} is down", "alice"))
        for call in calls:
            self.assertEqual(str(self.failureResultOf(call, ServerUnreachable).value), "refused")
        self.server.list_shares(SI)
        self.assertEqual([len(each) for each in self.opened], [2, 1, 1])
        self.assertEqual(self.clock.getDelayedCalls()[0].getTime(), self.clock.seconds() + 0.25)

    def test_cancelled(self) -> None:
        """Nothing is left of a race that nobody waits for."""
        call = self.server.list_shares(SI)
        self.clock.advance(STAGGER_S)
        call.cancel()
        self.failureResultOf(call, CancelledError)
        self.assertFalse(self.route(1).is_open)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_disconnect(self) -> None:
        """All calls fail, all routes end, and later calls fail."""
        calls: list[Deferred[Any]] = [self.server.list_shares(SI)]
        self.clock.advance(STAGGER_S)
        self.successResultOf(self.server.disconnect())
        calls.append(self.server.list_shares(SI))
        for call in calls:
            self.failureResultOf(call, ServerUnreachable)
        self.assertFalse(self.route(0).is_open or self.route(1).is_open)
        self.assertEqual(self.clock.getDelayedCalls(), [])
