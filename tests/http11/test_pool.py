"""Many requests to one host: where they go, and what happens to them when connections are lost."""

from __future__ import annotations

import functools
import random
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectionLost, ConnectionRefusedError, UserError
from twisted.internet.interfaces import IProtocol
from twisted.logger import LogEvent, globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.http11.connection_limits import Limits
from pipegrid.http11.dialer import quiet
from pipegrid.http11.exchange import (
    AgentClosed,
    RawResponse,
    RequestMaybeProcessed,
    RequestNotSent,
    RequestTimedOut,
    ResponseError,
    TooManyRequests,
)
from pipegrid.http11.host_pool import HostPool
from tests.http11.network import Network
from tests.http11.test_connection import Consumer
from tests.http11.wire import get, ok, post


def _always(answer: bytes, request: bytes) -> bytes:
    return answer


class PoolCase(SynchronousTestCase):
    """A pool on a network in memory."""

    def make(self, auto_accept: bool = True, **limits: Any) -> None:
        """Begin anew."""
        self.network = Network(auto_accept)
        self.pool = HostPool(
            self.network.clock, lambda: self.network, "host.test:80", Limits(**limits)
        )

    def setUp(self) -> None:
        self.make()

    def ask(self, *paths: str, **options: Any) -> list[Deferred[RawResponse]]:
        """GETs."""
        return [self.pool.request(get(path, **options)) for path in paths]

    def turn(self) -> None:
        """End this turn of the reactor."""
        self.network.turn()
        self.pool._check_invariants()

    def bodies(self, asked: list[Deferred[RawResponse]]) -> list[bytes]:
        """All answers, which must be here."""
        return [self.successResultOf(d).body for d in asked]


class AssignmentTests(PoolCase):
    """Which connection gets what."""

    def test_small_requests_share_a_connection(self) -> None:
        """A burst of small requests needs one connection, and waits while that is made."""
        self.make(auto_accept=False)
        asked = self.ask(*(f"/{n}" for n in range(50)))
        self.assertEqual(len(self.network.attempts), 1)
        side = self.network.accept()
        self.turn()
        self.assertEqual(side.take_requests(), [b"GET /%d" % n for n in range(50)])
        side.answer(b"".join(ok(b"%d" % n) for n in range(50)))
        self.assertEqual(self.bodies(asked), [b"%d" % n for n in range(50)])

    def test_large_answers_have_their_own(self) -> None:
        """Large answers come in parallel, on as many connections as there may be, and no more."""
        self.make(max_connections=3)
        asked = self.ask(*"abcde", expected_response_bytes=10**6)
        self.turn()
        self.assertEqual(
            [side.take_requests() for side in self.network.connections],
            [[b"GET a"], [b"GET b"], [b"GET c"]],
        )
        self.network.connections[1].answer(ok())
        self.turn()
        self.assertEqual(self.network.connections[1].take_requests(), [b"GET d"])
        for side in self.network.connections:
            side.answer(ok())
        self.network.serve()
        self.bodies(asked)

    def test_a_raised_budget(self) -> None:
        """A host that is known to take more gets more on each connection, old and new; never less."""
        self.make(max_connections=3)
        self.ask("a", expected_response_bytes=100_000)
        self.turn()
        for budget_bytes in (250_000, 10):
            self.pool.raise_budget(budget_bytes)
        self.ask(*"bcdefg", expected_response_bytes=100_000)
        self.turn()
        self.assertEqual(
            [side.take_requests() for side in self.network.connections],
            [[b"GET a", b"GET b", b"GET c"], [b"GET d", b"GET e", b"GET f"], [b"GET g"]],
        )

    def test_an_idle_connection_is_used_again(self) -> None:
        """One request after the other needs one connection."""
        for n in range(3):
            asked = self.ask(f"/{n}")
            self.network.serve()
            self.bodies(asked)
        self.assertEqual(len(self.network.connections), 1)

    def test_the_size_of_answers_is_learnt(self) -> None:
        """A host of small answers gets more requests at once, one of large answers fewer."""
        options = {"expected_response_bytes": None}
        first = self.ask(*(f"/{n}" for n in range(60)), **options)
        self.turn()
        self.assertEqual(len(self.network.connections), 4)
        self.assertEqual(len(self.network.connections[0].take_requests()), 16)
        for _ in range(16):
            for side in self.network.live():
                side.answer(ok())
        self.network.serve()
        self.bodies(first)
        for size, at_once in ((100, 128), (20_000, 3), (10**6, 1)):
            warm = self.ask(*(f"/w{n}" for n in range(150)), **options)
            answer = ok(b"x" * size)
            self.network.serve(functools.partial(_always, answer), turns=200)
            asked = self.ask(*(f"/{n}" for n in range(999)), **options)
            self.turn()
            counts = [len(side.take_requests()) for side in self.network.live()]
            self.assertEqual(counts, [at_once] * 4)
            for d in asked:
                d.cancel()
                self.failureResultOf(d, CancelledError)
            for _ in range(at_once):
                for side in self.network.live():
                    side.answer(ok())
            self.turn()
            self.bodies(warm)

    def test_unproven_hosts(self) -> None:
        """What must not be repeated stands behind nothing, until the host has shown HTTP/1.1."""
        self.ask("/a")
        posts = [self.pool.request(post("/p")) for _ in range(2)]
        self.turn()
        self.assertEqual(
            [side.take_requests() for side in self.network.connections],
            [[b"GET /a"], [b"POST /p"], [b"POST /p"]],
        )
        for side in self.network.connections:
            side.answer(ok())
        self.bodies(posts)
        self.make(max_connections=1)
        self.ask("/a")
        self.network.serve()
        self.ask("/b")
        self.pool.request(post("/p"))
        self.turn()
        self.assertEqual(self.network.connections[0].take_requests(), [b"GET /b", b"POST /p"])

    def test_cancelled_while_it_waits(self) -> None:
        """A request that is cancelled before there is a connection is never sent."""
        self.make(auto_accept=False)
        first, second = self.ask("/1", "/2")
        first.cancel()
        self.failureResultOf(first, CancelledError)
        self.network.accept()
        self.turn()
        self.assertEqual(self.network.connections[0].take_requests(), [b"GET /2"])
        self.network.connections[0].answer(ok(b"2"))
        self.assertEqual(self.bodies([second]), [b"2"])

    def test_too_many(self) -> None:
        """One request more than may wait fails at once."""
        self.make(auto_accept=False, max_waiting=3)
        asked = self.ask(*"abcd")
        self.failureResultOf(asked[3], TooManyRequests)
        self.assertNoResult(asked[2])


class LogTests(SynchronousTestCase):
    """What a program that makes many connections finds in its log."""

    def test_nothing(self) -> None:
        """What makes a connection begins and ends without a line."""
        logged: list[LogEvent] = []
        observer: Any = logged.append
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)
        connection: Any = object()
        factory = quiet(lambda: connection)
        factory.doStart()
        factory.doStop()
        self.assertEqual(logged, [])


class NoConnectionTests(PoolCase):
    """Hosts that cannot be reached."""

    def test_refused(self) -> None:
        """All that waits fails with one sentence that names the host; later it may go well."""
        self.network.refuse = ConnectionRefusedError("Connection refused")
        for d in self.ask("/a", "/b"):
            error = self.failureResultOf(d, RequestNotSent).value
            self.assertIn("host.test:80", str(error))
            self.assertIsInstance(error.__cause__, ConnectionRefusedError)
        self.network.refuse = None
        again = self.ask("/a")
        self.network.serve()
        self.assertEqual(self.bodies(again), [b"GET /a"])

    def test_no_answer(self) -> None:
        """An attempt is given up after connect_timeout_s."""
        self.make(auto_accept=False, connect_timeout_s=5)
        (d,) = self.ask("/a")
        self.network.clock.advance(4.9)
        self.assertNoResult(d)
        self.network.clock.advance(0.2)
        error = self.failureResultOf(d, RequestNotSent).value
        self.assertIn("(it was not usable after 5 s)", str(error))

    def test_an_attempt_that_says_it_was_given_up(self) -> None:
        """As TCP's do: what counts for a person is how long it was waited for."""

        class Silent:
            def connect(self, _factory: object) -> Deferred[IProtocol]:
                return Deferred(lambda attempt: attempt.errback(UserError()))

        clock: Any = self.network.clock
        silent: Any = Silent
        pool = HostPool(clock, silent, "alice", Limits(connect_timeout_s=5))
        d = pool.request(get("/a"))
        self.network.clock.advance(5.1)
        error = self.failureResultOf(d, RequestNotSent).value
        self.assertIn("to alice could be used (it was not usable after 5 s)", str(error))

    def test_one_connection_of_several_that_gets_nothing(self) -> None:
        """On a slow line that may last: the server is not silent while it sends on others."""
        self.make(max_connections=2)
        asked = self.ask("/a", "/b", expected_response_bytes=10**6)
        self.turn()
        sending = self.network.connections[0]
        sending.take_requests()
        sending.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nabc")
        self.network.clock.advance(40)
        sending.answer(b"de")
        self.network.clock.advance(30)
        self.assertNoResult(asked[1])
        self.assertTrue(self.network.connections[1].disconnecting)
        sending.answer(b"f")
        self.network.serve()
        self.assertEqual(self.bodies(asked), [b"abcdef", b"GET /b"])

    def test_a_second_connection_that_cannot_be_had(self) -> None:
        """A host that allows one connection is used through that one."""
        large = {"expected_response_bytes": 10**6}
        first = self.ask("/a", **large)
        self.turn()
        self.network.refuse = ConnectionRefusedError()
        second = self.ask("/b", "/c", **large)
        self.network.serve()
        self.assertEqual(self.bodies(first + second), [b"GET /a", b"GET /b", b"GET /c"])
        self.assertEqual(len(self.network.connections), 1)

    def test_the_only_connection_is_lost_after_another_could_not_be_had(self) -> None:
        """As when a host goes away: what was asked is tried anew, and whoever waits hears of the end."""
        for is_back in (False, True):
            self.make()
            asked = self.ask("/a", expected_response_bytes=10**6)
            self.turn()
            self.network.refuse = ConnectionRefusedError()
            asked += self.ask("/b", "/c", expected_response_bytes=10**6)
            if is_back:
                self.network.refuse = None
            self.network.connections[0].lose()
            if is_back:
                self.network.serve()
                self.assertEqual(self.bodies(asked), [b"GET /a", b"GET /b", b"GET /c"])
            else:
                for each in asked:
                    self.failureResultOf(each, RequestNotSent, RequestMaybeProcessed)

    def paused(self) -> Consumer:
        """Return the reader of a long answer, which has paused the only connection."""
        reader = Consumer()
        self.pool.request(get("/a", consumer_for=lambda _: reader, expected_response_bytes=10**6))
        self.turn()
        self.network.connections[0].answer(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\nabc")
        reader.producer.pauseProducing()
        return reader

    def test_no_connection_beside_one_that_is_held_up(self) -> None:
        """What waits fails: nobody knows when the reader goes on."""
        self.paused()
        self.network.clock.advance(1)
        self.network.refuse = ConnectionRefusedError()
        (second,) = self.ask("/b")
        self.failureResultOf(second, RequestNotSent)

    def test_a_connection_that_is_held_up_when_no_other_can_be_had(self) -> None:
        """As soon as it is, another is tried for: its answer may not come for long."""
        reader = self.paused()
        self.network.refuse = ConnectionRefusedError()
        asked = self.ask("/b", "/c")
        self.assertNoResult(asked[0])
        self.network.refuse = None
        self.network.clock.advance(1)
        self.turn()
        other = self.network.connections[1]
        other.answer(b"".join(map(ok, other.take_requests())))
        self.assertEqual(self.bodies(asked), [b"GET /b", b"GET /c"])
        self.assertEqual(reader.received, [b"abc"])

    def test_a_slow_reader_is_not_the_hosts_fault(self) -> None:
        """What stands behind its answer is not asked twice, unless the pause lasts for half a minute."""
        reader = Consumer()
        self.pool.request(get("/a", consumer_for=lambda _: reader))
        behind = self.ask("/b", "/c")
        self.turn()
        first = self.network.connections[0]
        first.take_requests()
        first.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nabc")
        reader.producer.pauseProducing()
        self.network.clock.advance(29)
        self.turn()
        self.assertEqual(len(self.network.connections), 1)
        # New requests do not wait for the reader.
        (new,) = self.ask("/d")
        self.turn()
        second = self.network.connections[1]
        self.assertEqual(second.take_requests(), [b"GET /d"])
        second.answer(ok(b"D"))
        self.assertEqual(self.bodies([new]), [b"D"])
        reader.producer.resumeProducing()
        first.answer(b"def" + ok(b"B") + ok(b"C"))
        self.assertEqual(self.bodies(behind), [b"B", b"C"])

    def test_a_reader_that_has_stopped_reading(self) -> None:
        """After half a minute what stands behind its answer is asked anew."""
        reader = Consumer()
        self.pool.request(get("/a", consumer_for=lambda _: reader))
        behind = self.ask("/b")
        self.turn()
        self.network.connections[0].answer(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nabc")
        reader.producer.pauseProducing()
        self.network.clock.pump([1] * 31)
        self.turn()
        self.network.connections[1].answer(ok(b"B"))
        self.assertEqual(self.bodies(behind), [b"B"])


class DropTests(PoolCase):
    """A host is given up by whoever has another to ask."""

    def test_everything_fails_at_once(self) -> None:
        """What was sent, what waits, what is being connected; nothing is repeated."""
        self.make(max_connections=2, max_requests_in_flight=1)
        asked = self.ask(*"abc")
        self.turn()
        self.pool.drop("it was too slow")
        for d, error in zip(
            asked, (RequestMaybeProcessed, RequestMaybeProcessed, RequestNotSent), strict=True
        ):
            self.assertIn("it was too slow", str(self.failureResultOf(d, error).value))
        self.turn()
        self.assertEqual(self.network.live(), [])
        self.assertTrue(self.pool.is_idle)

    def test_attempts_too(self) -> None:
        """A connection that is not made yet is not waited for."""
        self.make(auto_accept=False)
        (d,) = self.ask("/a")
        self.pool.drop("it was too slow")
        self.failureResultOf(d, RequestNotSent)
        self.assertTrue(self.pool.is_idle)

    def test_it_can_be_asked_again(self) -> None:
        """Later, or by whoever hears of the failure, on a new connection."""
        (d,) = self.ask("/a")
        again: list[Deferred[RawResponse]] = []
        d.addErrback(lambda _: again.extend(self.ask("/b")))
        self.turn()
        self.pool.drop("it was too slow")
        self.network.serve()
        self.assertEqual(self.bodies(again), [b"GET /b"])
        self.assertEqual(len(self.network.connections), 2)


class ReplayTests(PoolCase):
    """Lost connections."""

    def test_replayed_in_order(self) -> None:
        """Unanswered requests that may be repeated are, in order, on another connection."""
        asked = self.ask(*"abcde")
        self.turn()
        first = self.network.connections[0]
        first.answer(ok(b"A") + ok(b"B"))
        first.lose(ConnectionLost())
        self.turn()
        second = self.network.connections[1]
        self.assertEqual(second.take_requests(), [b"GET c", b"GET d", b"GET e"])
        second.answer(ok(b"C") + ok(b"D") + ok(b"E"))
        self.assertEqual(self.bodies(asked), [b"A", b"B", b"C", b"D", b"E"])

    def test_post_is_not_repeated(self) -> None:
        """A request that must not be repeated fails, and says that it may have been processed."""
        d = self.pool.request(post("/p"))
        get_behind = self.ask("/a")
        self.turn()
        self.network.connections[0].lose()
        error = self.failureResultOf(d, RequestMaybeProcessed).value
        self.assertTrue(error.may_have_happened)
        self.assertIn("may have processed", str(error))
        self.network.serve()
        self.assertEqual(self.bodies(get_behind), [b"GET /a"])

    def test_post_that_is_known_to_be_harmless(self) -> None:
        """The caller may say that a POST can be repeated."""
        d = self.pool.request(post("/p", idempotent=True))
        self.turn()
        self.network.connections[0].lose()
        self.network.serve()
        self.assertEqual(self.bodies([d]), [b"POST /p"])

    def test_keepalive_limit(self) -> None:
        """A server that closes after two answers each, and says so, answers even every POST once."""
        self.make(max_connections=1)
        self.ask("/warm")
        self.network.serve()
        asked = [self.pool.request(post(f"/{n}")) for n in range(7)]
        seen: list[bytes] = []
        for _ in range(8):
            self.turn()
            for side in self.network.live():
                requests = side.take_requests()[:2]
                seen += requests
                for n, request in enumerate(requests):
                    side.answer(ok(request, b"Connection: close" if n else b"A: b"))
        self.assertEqual(seen, [b"POST /%d" % n for n in range(7)])
        self.assertEqual(self.bodies(asked), seen)

    def test_idle_close_race(self) -> None:
        """A server that closes an idle connection just as a request is sent costs nothing."""
        self.bodies_after_serving(self.ask("/a"))
        asked = self.ask("/b")
        self.turn()
        self.network.connections[0].lose()
        self.bodies_after_serving(asked)

    def bodies_after_serving(self, asked: list[Deferred[RawResponse]]) -> None:
        """Answer, and expect all answers."""
        self.network.serve()
        self.bodies(asked)

    def test_attempts_are_bounded(self) -> None:
        """A host that always hangs up is not tried for ever."""
        asked = self.ask("/a", "/b")
        for _ in range(10):
            self.turn()
            for side in self.network.live():
                side.lose()
        for d in asked:
            self.failureResultOf(d, RequestMaybeProcessed)
        self.assertLessEqual(len(self.network.connections), 6)

    def test_hung_up_before_anything_was_sent(self) -> None:
        """The same if it hangs up even before the requests are written."""
        asked = self.ask("/a", "/b")
        for _ in range(10):
            for side in self.network.live():
                side.lose()
        for d in asked:
            self.failureResultOf(d, RequestNotSent)
        self.assertLessEqual(len(self.network.connections), 6)

    def test_an_answer_that_was_cut_off(self) -> None:
        """A request whose answer had begun is not repeated: its reader has seen half of it."""
        asked = self.ask("/a", "/b")
        self.turn()
        self.network.connections[0].answer(ok(b"12345")[:-2])
        self.network.connections[0].lose()
        self.failureResultOf(asked[0], ResponseError)
        self.network.serve()
        self.assertEqual(self.bodies(asked[1:]), [b"GET /b"])

    def test_close(self) -> None:
        """Closing waits for nobody: what was sent fails as well, and everything says why."""
        self.make(max_connections=1)
        asked = self.ask("/a", "/b", expected_response_bytes=10**6)
        self.turn()
        closed = self.pool.close()
        sent = self.failureResultOf(asked[0], RequestMaybeProcessed).value
        self.assertIn("(the agent was closed)", str(sent))
        self.failureResultOf(asked[1], AgentClosed)
        self.turn()
        self.successResultOf(closed)
        self.successResultOf(self.pool.close())
        late = self.failureResultOf(self.ask("/c")[0], AgentClosed).value
        self.assertIn("The agent was closed, so nothing more is sent to", str(late))
        self.assertEqual(len(self.network.connections), 1)
        self.assertEqual(self.network.clock.getDelayedCalls(), [])

    def test_close_drops_answers_nobody_wants(self) -> None:
        """A request that was taken back holds up no end."""
        self.make()
        (asked,) = self.ask("/a")
        self.turn()
        asked.cancel()
        self.failureResultOf(asked, CancelledError)
        closed = self.pool.close()
        self.turn()
        self.successResultOf(closed)

    def test_close_while_connecting(self) -> None:
        """Closing gives up attempts to connect."""
        self.make(auto_accept=False)
        (d,) = self.ask("/a")
        self.successResultOf(self.pool.close())
        self.failureResultOf(d, RequestNotSent)
        self.assertEqual(self.network.clock.getDelayedCalls(), [])


class PipeliningFailsTests(PoolCase):
    """Servers that mishandle pipelining are remembered, and spoken to one request at a time."""

    def setUp(self) -> None:
        self.make(max_connections=1)

    def assert_serial(self, serial: bool = True) -> None:
        """The next requests go one at a time, or not."""
        asked = self.ask(*"xyz")
        self.turn()
        (side,) = self.network.live()
        self.assertEqual(len(side.take_requests()), 1 if serial else 3)
        for _ in range(3):
            side.answer(ok())
            self.turn()
        self.bodies(asked)

    def test_one_answer_then_closed(self) -> None:
        """A server that closes after one answer, unannounced, twice."""
        asked = self.ask(*"abcd")
        for _ in range(2):
            self.turn()
            (side,) = self.network.live()
            side.answer(ok(side.take_requests()[0]))
            side.lose()
        self.network.serve()
        self.assertEqual(self.bodies(asked), [b"GET a", b"GET b", b"GET c", b"GET d"])
        self.assert_serial()

    def test_one_answer_then_silence(self) -> None:
        """A server that forgets what it had read ahead: the forgotten are asked again."""
        asked = self.ask(*"abc")
        self.turn()
        (side,) = self.network.live()
        side.answer(ok(side.take_requests()[0]))
        self.network.clock.advance(61)
        self.network.serve()
        self.assertEqual(self.bodies(asked), [b"GET a", b"GET b", b"GET c"])
        self.assert_serial()

    def test_garbage(self) -> None:
        """A server that mixes up its answers."""
        asked = self.ask(*"abc")
        self.turn()
        (side,) = self.network.live()
        side.answer(ok(b"A") + b"and then some")
        self.network.serve()
        self.assertEqual(self.bodies(asked), [b"A", b"GET b", b"GET c"])
        self.assert_serial()

    def test_old_http(self) -> None:
        """HTTP/1.0, even with keep-alive."""
        old = b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\nx"
        asked = self.ask("/a")
        self.network.serve(lambda request: old)
        self.bodies(asked)
        self.assert_serial()

    def test_old_http_that_closes(self) -> None:
        """HTTP/1.0 answers that end with the connection are complete, one connection each."""
        asked = self.ask(*"abc")
        for _ in range(4):
            self.turn()
            for side in self.network.live():
                for request in side.take_requests()[:1]:
                    side.answer(b"HTTP/1.0 200 OK\r\n\r\n" + request)
                    side.lose()
        self.assertEqual(self.bodies(asked), [b"GET a", b"GET b", b"GET c"])

    def test_alone_it_is_not_pipelining(self) -> None:
        """Silence or garbage in answer to a single request fails it, and proves nothing else."""
        (d,) = self.ask("/a")
        self.turn()
        self.network.clock.advance(61)
        self.failureResultOf(d, RequestTimedOut)
        self.turn()
        (d,) = self.ask("/a")
        self.network.serve(lambda request: b"nonsense")
        self.failureResultOf(d, ResponseError)
        self.turn()
        self.assert_serial(False)

    def test_never_again_after_silence(self) -> None:
        """Who has another host to ask hears of silence at once, also of what stood behind; no repeats."""
        asked = self.ask(*"abc", again_after_silence=False, timeout_s=1)
        self.turn()
        (side,) = self.network.live()
        side.answer(ok(side.take_requests()[0]))
        self.network.clock.advance(1.1)
        self.assertEqual(self.bodies(asked[:1]), [b"GET a"])
        self.failureResultOf(asked[1], RequestTimedOut)
        error = self.failureResultOf(asked[2], RequestMaybeProcessed).value
        self.assertIn("silent for 1 s", str(error))
        self.turn()
        self.assertEqual(self.network.live(), [])

    def test_accepts_and_never_answers(self) -> None:
        """Everything that waits for a host that never answered fails after its time of silence."""
        for cautious in (False, True):
            self.make()
            self.pool._unknown = cautious  # as an agent's
            asked = self.ask(*map(str, range(900)))
            late = self.ask("late", timeout_s=90)
            self.turn()
            self.network.clock.advance(59.9)
            self.assertFalse(any(d.called for d in asked))
            self.network.clock.advance(0.2)
            self.turn()
            kinds = Counter(type(self.failureResultOf(d).value) for d in asked)
            self.assertLessEqual(kinds[RequestTimedOut], 4)
            self.assertGreater(kinds[RequestNotSent], 300)
            self.assertNoResult(late[0])
            self.network.clock.advance(90)
            self.assertIn("silent for 90 s", str(self.failureResultOf(late[0]).value))
            again = self.ask("again")
            self.network.serve()
            self.assertEqual(self.bodies(again), [b"GET again"])

    def test_stops_answering(self) -> None:
        """One that has answered before has twice that time: perhaps it only cannot pipeline."""
        first = self.ask("first")
        self.network.serve()
        self.bodies(first)
        self.turn()
        self.network.clock.advance(1000)
        asked = self.ask(*map(str, range(300)))
        self.turn()
        self.network.clock.advance(60.1)
        self.turn()
        self.assertLess(sum(d.called for d in asked), 300)
        self.network.clock.advance(60.1)
        self.turn()
        for d in asked:
            self.failureResultOf(d)
        again = self.ask("again")
        self.network.serve()
        self.assertEqual(self.bodies(again), [b"GET again"])

    def test_one_bad_moment_is_soon_forgotten(self) -> None:
        """The first time a host is spoken to one at a time for a minute, then for twice as long each time."""
        for minutes in (1, 2, 4, 8, 16, 32, 60, 60):
            asked = self.ask(*"abc")
            self.turn()
            (side,) = self.network.live()
            side.answer(ok(b"A") + b"and then some")
            self.network.serve()
            self.bodies(asked)
            self.network.clock.advance(60 * minutes - 1)
            self.turn()
            self.assert_serial()
            self.network.live()[0].take_requests()
            self.network.clock.advance(1)
            self.turn()
            self.assert_serial(False)

    def test_restarts_are_forgiven(self) -> None:
        """A server that pipelines well may close connections without warning."""
        for _ in range(5):
            asked = self.ask(*"abcdefghijklmnop")
            self.turn()
            (side,) = self.network.live()
            side.answer(b"".join(map(ok, side.take_requests()[:14])))
            side.lose()
            self.network.serve()
            self.bodies(asked)
        self.assert_serial(False)

    def test_it_is_forgotten(self) -> None:
        """After serial_memory_s the host gets another chance."""
        self.test_garbage()
        self.network.clock.advance(3600)
        self.turn()
        self.assert_serial(False)


class RandomFaultTests(PoolCase):
    """Whatever a server does to its connections, no answer goes astray and nothing hangs."""

    @given(st.integers(0, 2**32))
    @settings(max_examples=150, deadline=None, derandomize=True)
    def test_faults(self, seed: int) -> None:
        """Each request gets its own answer or one error; a POST is carried out at most once."""
        rng = random.Random(seed)
        self.make(
            max_connections=rng.choice([1, 3]),
            max_requests_in_flight=rng.choice([2, 5, 50]),
            response_budget_bytes=rng.choice([500, 3000]),
        )
        asked: dict[bytes, Deferred[RawResponse]] = {}
        outcome: dict[bytes, object] = {}
        carried_out: dict[bytes, int] = {}

        def ask(n: int) -> None:
            request = post if rng.random() < 0.3 else get
            name = b"%s /%d" % (request.__name__.upper().encode(), n)
            expected = rng.choice([None, 100, 2000])
            d = asked[name] = self.pool.request(request(f"/{n}", expected_response_bytes=expected))
            d.addBoth(lambda result: outcome.__setitem__(name, result))

        for n in range(40):
            ask(n)
            if rng.random() < 0.2:
                rng.choice(list(asked.values())).cancel()
            if rng.random() < 0.5:
                self.turn()
            for side in self.network.live():
                self.misbehave(side, rng, carried_out)
        for _ in range(300):
            if len(outcome) == len(asked):
                break
            self.turn()
            self.network.clock.advance(rng.choice([0, 0, 0, 10]))
            for side in self.network.live():
                self.misbehave(side, rng, carried_out, 0.05)
        self.assertEqual(set(outcome), set(asked), f"seed {seed}: all came to something")
        for name, result in outcome.items():
            if isinstance(result, RawResponse):
                self.assertEqual(result.body, name, f"seed {seed}")
            if name.startswith(b"POST"):
                self.assertLessEqual(carried_out.get(name, 0), 1, f"seed {seed}: {name!r}")
            value = getattr(result, "value", None)
            if value is not None and not getattr(value, "may_have_happened", True):
                self.assertNotIn(name, carried_out, f"seed {seed}: {value}")
        self.successResultOf(self.settle(self.pool.close()))
        self.assertEqual(self.network.clock.getDelayedCalls(), [], f"seed {seed}")

    def settle(self, d: Any) -> Any:
        """Give the client the turns it needs."""
        self.network.serve()
        self.turn()
        return d

    def misbehave(
        self, side: Any, rng: random.Random, carried_out: dict[bytes, int], fault: float = 0.25
    ) -> None:
        """Answer some requests, maybe not quite, or hang up."""
        for request in side.take_requests():
            carried_out[request] = carried_out.get(request, 0) + 1
            whole = ok(request)
            if rng.random() < 0.1:
                size = len(request)
                whole = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
                whole += b"%x\r\n%s\r\n0\r\n\r\n" % (size, request)
            if rng.random() > fault:
                cut = rng.randrange(len(whole))
                side.answer(whole[:cut])
                side.answer(whole[cut:])
                continue
            kind = rng.randrange(4)
            if kind == 0:
                side.lose(rng.choice([None, ConnectionLost()]))
            elif kind == 1:
                side.answer(whole[: rng.randrange(len(whole))])
                side.lose()
            elif kind == 2:
                side.answer(ok(request, b"Connection: close"))
                side.lose()
            else:
                side.answer(b"garbage")
                side.lose()
            return
