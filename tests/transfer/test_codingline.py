"""Segments come out of the line coded and in order, whatever threads do; and nothing waits for ever."""

from __future__ import annotations

import threading
import time

from twisted.internet import reactor
from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase

from pipegrid.core.encoder import Encoder
from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import SourceError
from pipegrid.reactor import workers
from pipegrid.reactor.workers import Workers
from pipegrid.testing.grid import InlineWorkers
from pipegrid.transfer.put.encode_ahead import EncodeAhead, _Turns
from pipegrid.transfer.put.source import BytesSource
from tests.transfer.world import content

PARAMS = Params(3, 10, 3000)
SIZE = 100_001
KEY = b"k" * 16


class Slow(BytesSource):
    """Lets earlier segments come later, and breaks at one."""

    broken = -1

    def read_at(self, offset: int, length: int) -> memoryview:
        index = offset // PARAMS.max_segment_bytes
        time.sleep(0.0005 * (3 - index % 4))
        if index == self.broken:
            raise SourceError("it broke")
        return super().read_at(offset, length)


class TurnsTests(SynchronousTestCase):
    """Threads pass in the order of their numbers."""

    def setUp(self) -> None:
        self.turns = _Turns()
        self.passed: list[int] = []
        self.refused: list[int] = []
        self.threads: list[threading.Thread] = []

    def start(self, number: int) -> None:
        def run() -> None:
            try:
                with self.turns.turn(number):
                    self.passed.append(number)
            except CancelledError:
                self.refused.append(number)

        thread = threading.Thread(target=run)
        thread.start()
        self.threads.append(thread)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(60)
            self.assertFalse(thread.is_alive())

    def test_in_order(self) -> None:
        """However late a number comes, higher ones wait for it."""
        for number in (3, 2, 1, 0):
            self.assertEqual(self.passed, [])
            self.start(number)
        self.join()
        self.assertEqual(self.passed, [0, 1, 2, 3])

    def test_closed(self) -> None:
        """All who wait are sent away, and whoever comes later."""
        self.start(1)
        self.turns.close()
        self.start(0)
        self.join()
        self.assertEqual((self.passed, sorted(self.refused)), ([], [0, 1]))

    def test_closed_from_a_number_on(self) -> None:
        """Lower ones have their turns still, whenever they come."""
        for number in (3, 2, 1):
            self.start(number)
        self.turns.close(2)
        self.turns.close(5)
        self.start(0)
        self.join()
        self.assertEqual((self.passed, sorted(self.refused)), ([0, 1], [2, 3]))
        self.assertEqual([self.turns.is_closed_to(n) for n in (1, 2)], [False, True])


class CodingLineTests(TestCase):
    """In real threads."""

    def setUp(self) -> None:
        self.patch(workers, "WORTH_A_THREAD_BYTES", 0)
        self.workers = Workers(reactor, 4)  # type: ignore[arg-type]
        self.addCleanup(self.workers.stop)
        self.data = content(SIZE)
        self.encoder = Encoder(PARAMS.geometry(SIZE), KEY)
        self.source = Slow(self.data)
        self.line = EncodeAhead(self.encoder, self.source, self.workers, depth=6)

    def test_in_order(self) -> Deferred[None]:
        """The shares are those that come of one thread."""

        async def run() -> None:
            expected = Encoder(PARAMS.geometry(SIZE), KEY)
            plain = EncodeAhead(expected, BytesSource(self.data), InlineWorkers())
            for index in range(self.encoder.geometry.num_segments):
                coded = await self.line.take()
                self.assertEqual(coded.number, index)
                self.encoder.add(coded)
                expected.add(await plain.take())
            self.encoder.finish()
            expected.finish()
            self.assertEqual(self.encoder.cap, expected.cap)

        return Deferred.fromCoroutine(run())

    def test_a_source_that_breaks(self) -> Deferred[None]:
        """What comes before is taken, then its error; threads that waited behind it end."""
        self.source.broken = 5

        async def run() -> None:
            for _ in range(5):
                await self.line.take()
            with self.assertRaises(SourceError):
                await self.line.take()
            self.line.close()
            await self.workers.stop()

        return Deferred.fromCoroutine(run())

    def test_stopped(self) -> Deferred[None]:
        """Whoever takes is told, and all threads end, those that wait for their turns as well."""
        taken: list[object] = []
        Deferred.fromCoroutine(self.line.take()).addBoth(taken.append)
        self.line.close()
        assert isinstance(taken[0], Failure)
        self.assertIsInstance(taken[0].value, CancelledError)
        return self.workers.stop()
