"""Large downloads take turns, in virtual time: who stops reading holds nothing, and nothing is sent twice."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import CancelledError, Deferred, DeferredSemaphore, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import ChkCap
from pipegrid.errors import NotEnoughSharesError
from pipegrid.gateway.http_response import WebError
from pipegrid.gateway.web_api import download_turns
from pipegrid.gateway.web_api.download_turns import LONGEST_TURN_S, TURN_S, PacedDownload

DATA = bytes(range(256)) * 40
CAP = ChkCap(b"k" * 16, b"h" * 32, 3, 10, len(DATA))
PIECE = 1000


class _Grid:
    """
    Gives a piece of the file for each step, unless its consumer has paused it.

    Attributes:
        latency: how many steps pass before the first piece of a get.
    """

    latency = 0

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.running: list[_Get] = []
        self.started: list[int] = []
        self.version = 1

    def get(self, cap: ChkCap, consumer: Any, *, range_of: Any, seen: Any) -> Deferred[None]:
        seen(self.version)
        start, length = range_of(len(DATA))
        if not length:
            return succeed(None)
        self.started.append(start)
        return _Get(self, consumer, start, start + length).done

    def step(self) -> None:
        """Have each get deliver a piece."""
        for each in list(self.running):
            each.step()


class _Get:
    def __init__(self, grid: _Grid, consumer: Any, at: int, end: int) -> None:
        self.grid, self.consumer, self.at, self.end = grid, consumer, at, end
        self.paused = False
        self.latency = grid.latency
        self.began_s = grid.clock.seconds()
        self.done: Deferred[None] = Deferred(self._cancel)
        grid.running.append(self)
        consumer.registerProducer(self, True)

    def step(self) -> None:
        if self.paused:
            return
        if self.latency:
            self.latency -= 1
            return
        piece = DATA[self.at : min(self.at + PIECE, self.end)]
        self.at += len(piece)
        self.consumer.write(piece)
        if self.at == self.end:
            self._end()
            self.done.callback(None)

    def _end(self) -> None:
        self.grid.running.remove(self)
        self.consumer.unregisterProducer()

    def _cancel(self, _: object) -> None:
        self._end()

    def pauseProducing(self) -> None:
        self.paused = True

    def resumeProducing(self) -> None:
        self.paused = False

    def stopProducing(self) -> None:
        pass


class _Http:
    """A response whose reader a test stops."""

    def __init__(self) -> None:
        self.got = b""
        self.producer: Any = None

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        self.producer = producer

    def unregisterProducer(self) -> None:
        self.producer = None

    def write(self, data: bytes) -> None:
        self.got += data


class PacedDownloadTests(SynchronousTestCase):
    """Of several readers, of whom some are slow."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.grid: Any = _Grid(self.clock)
        self.turns = DeferredSemaphore(2)
        self.patch(download_turns, "SMALL_BYTES", PIECE)

    def begin(self, start: int = 0, length: int = len(DATA)) -> tuple[_Http, Deferred[None]]:
        """Begin a download."""
        http = _Http()
        download = PacedDownload(self.grid, CAP, http, lambda size: (start, length), self.turns)
        done = Deferred.fromCoroutine(download.run())
        self.addCleanup(self.end, done)
        return http, done

    def end(self, done: Deferred[None]) -> None:
        """Cancel a download that the test has not ended."""
        if not done.called:
            done.addErrback(lambda failure: failure.trap(CancelledError) and None)
            done.cancel()

    def go_on(self, steps: int) -> None:
        """Let pieces come, with half a second between them."""
        for _ in range(steps):
            self.grid.step()
            self.clock.advance(0.5)

    def test_alone(self) -> None:
        """One get is enough, of the range that is asked for."""
        http, done = self.begin(100, 5000)
        self.go_on(20)
        self.successResultOf(done)
        self.assertEqual((http.got, self.grid.started), (DATA[100:5100], [100]))
        self.assertIsNone(http.producer)
        self.assertEqual((self.turns.tokens, self.clock.getDelayedCalls()), (2, []))

    def test_a_reader_that_stops(self) -> None:
        """It holds no get after a while, and goes on where it was when it reads again."""
        http, done = self.begin()
        self.go_on(2)
        http.producer.pauseProducing()
        self.go_on(3)
        self.assertEqual(len(self.grid.running), 1)
        self.go_on(3)
        self.assertEqual((self.grid.running, self.turns.tokens), ([], 2))
        self.clock.advance(1000)
        http.producer.resumeProducing()
        self.clock.advance(0)
        self.go_on(20)
        self.successResultOf(done)
        self.assertEqual((http.got, self.grid.started), (DATA, [0, 2000]))

    def test_turns(self) -> None:
        """Of five readers two fetch at a time; all get on, and each gets its bytes once."""
        readers = [self.begin() for _ in range(5)]
        self.assertEqual(len(self.grid.running), 2)
        for _ in range(100):
            self.go_on(1)
            self.assertLessEqual(len(self.grid.running), 2)
        for http, done in readers:
            self.successResultOf(done)
            self.assertEqual(http.got, DATA)
        self.assertGreater(len(self.grid.started), 5)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_turns_on_a_slow_network(self) -> None:
        """Where the first piece takes longer than a turn, turns become longer until all get on."""
        self.grid.latency = 4 * int(2 * TURN_S)
        readers = [self.begin() for _ in range(3)]
        self.go_on(400)
        for http, done in readers:
            self.successResultOf(done)
            self.assertEqual(http.got, DATA)
        self.assertEqual((self.turns.tokens, self.clock.getDelayedCalls()), (2, []))

    def test_turns_in_which_nothing_arrives(self) -> None:
        """They end, too: a get whose servers send next to nothing delays the others only so long."""
        self.grid.latency = 1 << 30
        stuck = [self.begin() for _ in range(3)]
        for _ in range(2000):
            self.go_on(1)
            oldest_s = min(each.began_s for each in self.grid.running)
            self.assertLessEqual(self.clock.seconds() - oldest_s, LONGEST_TURN_S)
        self.assertLess(len(self.grid.started), 40)
        for _, done in stuck:
            done.cancel()
            self.failureResultOf(done, CancelledError)
        self.assertEqual((self.turns.tokens, self.clock.getDelayedCalls()), (2, []))

    def test_readers_that_have_stopped_delay_no_others(self) -> None:
        """However many there are."""
        stopped = [self.begin() for _ in range(4)]
        for _ in range(8):
            self.go_on(int(2 * TURN_S))
            for http, _ in stopped:
                if http.producer is not None:
                    http.producer.pauseProducing()
        http, done = self.begin()
        self.go_on(40)
        self.successResultOf(done)
        self.assertEqual(http.got, DATA)
        for _, waiting in stopped:
            waiting.addErrback(lambda failure: failure.trap(CancelledError))
            waiting.cancel()
        self.assertEqual((self.turns.tokens, self.clock.getDelayedCalls()), (2, []))

    def test_small_ones_take_no_turn(self) -> None:
        """They do not wait for large ones."""
        large = [self.begin() for _ in range(2)]
        http, done = self.begin(5, PIECE)
        self.go_on(1)
        self.successResultOf(done)
        self.assertEqual(http.got, DATA[5 : 5 + PIECE])
        for _, waiting in large:
            self.assertNoResult(waiting)

    def test_small_ones_that_take_long(self) -> None:
        """They have no turn that could be over while others wait."""
        for _ in range(3):
            self.begin()
        self.grid.latency = 2 * int(2 * TURN_S)
        http, done = self.begin(5, PIECE)
        self.go_on(self.grid.latency + 1)
        self.successResultOf(done)
        self.assertEqual(http.got, DATA[5 : 5 + PIECE])

    def test_a_file_that_changes(self) -> None:
        """A reader that has a part of one version gets no part of another."""
        for paused_after, wrong in ((0, False), (2, True)):
            http, done = self.begin()
            self.go_on(paused_after)
            http.producer.pauseProducing()
            self.go_on(8)
            self.assertEqual(self.grid.running, [])
            self.grid.version += 1
            http.producer.resumeProducing()
            self.clock.advance(0)
            self.go_on(20)
            if wrong:
                self.assertIn("overwritten", str(self.failureResultOf(done, WebError).value))
            else:
                self.successResultOf(done)
                self.assertEqual(http.got, DATA)
            self.assertEqual((self.turns.tokens, self.clock.getDelayedCalls()), (2, []))

    def test_who_goes_away(self) -> None:
        """While it fetches, while it waits for a turn, and while it has stopped reading."""
        readers = [self.begin() for _ in range(3)]
        self.go_on(1)
        for _, done in reversed(readers):
            done.cancel()
            self.failureResultOf(done, CancelledError)
        self.assertEqual((self.grid.running, self.turns.tokens), ([], 2))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_get_that_fails(self) -> None:
        """It is told, and its turn is over."""
        _, done = self.begin()
        self.grid.running[0].done.errback(NotEnoughSharesError("too few", 0, 3))
        self.failureResultOf(done, NotEnoughSharesError)
        self.assertEqual(self.turns.tokens, 2)
