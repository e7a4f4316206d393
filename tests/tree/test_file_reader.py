"""Readers of files on the grid, when the grid returns something else than was expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.interfaces import IPushProducer
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from pipegrid.tree.read_ahead import PROGRESS_BYTES, WHOLE_BYTES, FileReader, ReadSpace
from tests.transfer.world import content
from tests.tree.support import changing_cap

SIZE = 4 * WHOLE_BYTES
SHORTER = SIZE - WHOLE_BYTES


class ShorterFileTests(SynchronousTestCase):
    """A mutable file that another client made shorter after it was opened."""

    def test_read_in_sequence(self) -> None:
        """A read past its present end is short, whether it was waiting or comes later."""
        data = content(SHORTER)
        running: Deferred[None] = Deferred()
        sinks: list[Any] = []

        class ShorterGrid:
            clock = Clock()

            def get(self, _cap: object, sink: Any, start: int = 0) -> Deferred[None]:
                sinks.append(sink)
                sink.write(data[start : SHORTER - 1000])
                return running

            def read(self, _cap: object, start: int, length: int) -> Deferred[bytes]:
                return succeed(data[start : start + length])

        grid: Any = ShorterGrid()
        reader = FileReader(grid, changing_cap(1).file.readonly(), SIZE, ReadSpace())
        self.addCleanup(reader.close)

        def read(offset: int, length: int) -> Deferred[bytes]:
            return Deferred.fromCoroutine(reader.read(offset, length))

        self.assertEqual(self.successResultOf(read(0, 1000)), data[:1000])
        waiting = read(SHORTER - 2000, 5000)
        self.assertNoResult(waiting)
        sinks[0].write(data[-1000:])
        self.assertNoResult(waiting)
        running.callback(None)
        self.assertEqual(self.successResultOf(waiting), data[-2000:])
        self.assertEqual(self.successResultOf(read(SHORTER - 10, 5000)), data[-10:])
        self.assertEqual(self.successResultOf(read(SHORTER, 5000)), b"")


@implementer(IPushProducer)
class Producer:
    """A producer that notes whether it is paused."""

    def __init__(self) -> None:
        self.paused = False

    def pauseProducing(self) -> None:
        self.paused = True

    def resumeProducing(self) -> None:
        self.paused = False

    def stopProducing(self) -> None:
        pass


class RunningDownloadTestCase(SynchronousTestCase):
    """A reader whose download goes on as the test says."""

    size = 8 * PROGRESS_BYTES
    held_bytes = 4 * PROGRESS_BYTES
    behind_bytes = 100_000

    def setUp(self) -> None:
        self.data = content(self.size)
        self.sinks: list[Any] = []
        self.later: list[Callable[[], object]] = []
        self.producer = Producer()
        test = self

        class HeldGrid:
            clock = Clock()

            def get(self, _cap: object, sink: Any, start: int = 0) -> Deferred[None]:
                test.sinks.append(sink)
                sink.registerProducer(test.producer, True)
                return Deferred(lambda _: None)

        grid: Any = HeldGrid()
        space = ReadSpace(2 * PROGRESS_BYTES, 8 * PROGRESS_BYTES, self.behind_bytes)
        self.reader = FileReader(grid, changing_cap(1).file.readonly(), self.size, space)
        self.addCleanup(self.reader.close)

    def held(self, offset: int, length: int) -> bytes | None:
        return self.reader.read_held(offset, length, self.later.append)

    def begin(self) -> None:
        """Read the first bytes, so that a download begins, which holds half of the file then."""
        first = Deferred.fromCoroutine(self.reader.read(0, 10))
        for at in range(0, self.held_bytes, 1 << 16):
            self.sinks[0].write(memoryview(self.data)[at : at + (1 << 16)])
        self.assertEqual(self.successResultOf(first), self.data[:10])


class HeldTests(RunningDownloadTestCase):
    """What threads take of a running download, without the reactor's thread."""

    def test_ranges(self) -> None:
        """A range is returned if all of it is held, otherwise nothing."""
        self.assertIsNone(self.held(0, 10))
        self.begin()
        end = self.held_bytes
        for offset, length in ((0, end), (65_535, 2), (1 << 16, 1 << 16), (end - 1, 1), (5, 12345)):
            self.assertEqual(self.held(offset, length), self.data[offset : offset + length])
        for offset, length in ((end - 1, 2), (end, 1), (end + 5, 10)):
            self.assertIsNone(self.held(offset, length))
        self.reader.close()
        self.assertIsNone(self.held(0, 10))

    def test_the_download_goes_on(self) -> None:
        """The reactor's thread is told after each MiB; what was taken is freed, and the producer resumes."""
        self.begin()
        told = 0
        for at in range(0, self.held_bytes, 1 << 16):
            self.assertIsNotNone(self.held(at, 1 << 16))
            taken = at + (1 << 16)
            for call in self.later:
                told += 1
                call()
                self.assertIsNone(self.held(taken - self.behind_bytes - (1 << 17), 10))
                self.assertIsNotNone(self.held(taken - self.behind_bytes, 10))
                self.assertEqual(
                    self.producer.paused, self.held_bytes - taken >= 2 * PROGRESS_BYTES
                )
            self.later.clear()
        self.assertEqual(told, self.held_bytes // PROGRESS_BYTES)

    def test_progress_after_the_end(self) -> None:
        """It does nothing."""
        self.begin()
        self.held(0, self.held_bytes)
        self.reader.close()
        self.assertEqual(len(self.later), 1)
        self.later[0]()
        self.assertTrue(self.producer.paused)


class AnswersTests(RunningDownloadTestCase):
    """What a reader does as soon as it has its bytes, while another one is about to get others."""

    def setUp(self) -> None:
        super().setUp()
        self.begin()
        self.end = self.held_bytes
        self.first, self.second = (
            Deferred.fromCoroutine(self.reader.read(at, 10)) for at in (self.end, self.end + 10)
        )

    def arrive(self) -> None:
        """Let the bytes arrive that both wait for."""
        self.sinks[0].write(self.data[self.end : self.end + 100])

    def expected(self, waiting: Deferred[bytes], start: int) -> None:
        self.assertEqual(self.successResultOf(waiting), self.data[start : start + 10])

    def test_a_read(self) -> None:
        """It asks for bytes far ahead, so that those before them are freed; the other gets its own."""

        def read_ahead(data: bytes) -> bytes:
            third = Deferred.fromCoroutine(self.reader.read(self.end + 4 * self.behind_bytes, 10))
            third.addErrback(lambda failure: failure.trap(CancelledError))
            return data

        self.first.addCallback(read_ahead)
        self.arrive()
        self.expected(self.first, self.end)
        self.expected(self.second, self.end + 10)

    def test_a_close(self) -> None:
        """The other does not get fewer bytes, as at the end of a file."""
        self.first.addCallback(lambda _: self.reader.close())
        self.arrive()
        self.expected(self.second, self.end + 10)

    def test_a_cancellation(self) -> None:
        """The other is not called again, and the download goes on."""
        self.first.addCallback(lambda _: self.second.cancel())
        self.arrive()
        self.failureResultOf(self.second).trap(CancelledError)
