"""Readers of files on the grid, when the grid returns something else than was expected."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.tree.read_ahead import WHOLE_BYTES, FileReader, ReadSpace
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
