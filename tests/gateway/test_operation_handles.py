"""Operations that are kept by their handles: how long, how many, how much, and for whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import DirectoryCap, LitCap
from pipegrid.errors import DirectoryError, UsageError
from pipegrid.gateway.http_response import WebError
from pipegrid.gateway.web_api.deep_operations import DeepOperation
from pipegrid.gateway.web_api.operation_handles import (
    DAY_S,
    HandleLimits,
    OperationHandles,
    OperationRefused,
)
from pipegrid.transfer.upkeep import UpkeepRequest

ROOT = DirectoryCap(LitCap(b""))
LONG = "l" * 26


class Waiting(DeepOperation):
    """An operation that ends when the test wants."""

    def __init__(self) -> None:
        super().__init__(ROOT, UpkeepRequest())
        self.done: Deferred[None] = Deferred()
        self.cancelled = False

    async def run(self, grid: Any, hold: Callable[[int], None]) -> None:
        self.hold = hold
        try:
            await self.done
        except CancelledError:
            self.cancelled = True
            raise

    def end(self) -> None:
        self.done.callback(None)


class HandleTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.handles = self.make()

    def make(self, **limits: int) -> OperationHandles:
        grid: Any = None
        return OperationHandles(grid, self.clock, HandleLimits(**limits))

    def start(self, handle: str = "h", retain_s: float | None = None) -> Waiting:
        operation = Waiting()
        self.handles.start(handle, operation, retain_s)
        return operation

    def is_kept(self, handle: str = "h") -> bool:
        try:
            self.handles.find(handle)
        except WebError as error:
            self.assertEqual(error.status, 404)
            return False
        return True

    def test_running_is_kept(self) -> None:
        operation = self.start()
        self.clock.advance(100 * DAY_S)
        self.assertIs(self.handles.find("h"), operation)
        self.assertFalse(operation.finished)
        operation.end()
        self.assertTrue(operation.finished)

    def test_finished_and_never_asked_for(self) -> None:
        """Four days, or as long as it ran."""
        for ran_s, kept_s in ((60.0, 4 * DAY_S), (9 * DAY_S, 9 * DAY_S)):
            operation = self.start()
            self.clock.advance(ran_s)
            operation.end()
            self.clock.advance(kept_s - 1)
            self.assertTrue(self.is_kept())
            self.clock.advance(1)
            self.assertFalse(self.is_kept())

    def test_asked_for_after_the_end(self) -> None:
        """A day from then; answers before the end do not count."""
        operation = self.start()
        self.handles.answered("h")
        operation.end()
        self.handles.answered("h")
        self.clock.advance(DAY_S - 1)
        self.assertTrue(self.is_kept())
        self.clock.advance(1)
        self.assertFalse(self.is_kept())

    def test_retain_for(self) -> None:
        """It replaces both, may be zero, and has an end."""
        operation = self.start(retain_s=10)
        self.clock.advance(100)
        operation.end()
        self.clock.advance(9)
        self.handles.answered("h", retain_s=20)
        self.clock.advance(19)
        self.assertTrue(self.is_kept())
        self.clock.advance(1)
        self.assertFalse(self.is_kept())
        self.start(retain_s=1e12).end()
        self.clock.advance(30 * DAY_S)
        self.assertFalse(self.is_kept())
        self.start(retain_s=0).end()
        self.clock.advance(0)
        self.assertFalse(self.is_kept())

    def test_release_after_complete(self) -> None:
        """The first answer after the end is the last; one before it is not."""
        operation = self.start()
        self.handles.answered("h", release=True)
        self.assertTrue(self.is_kept())
        operation.end()
        self.handles.answered("h", release=True)
        self.assertFalse(self.is_kept())
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_cancel(self) -> None:
        """It stops, and is forgotten."""
        operation = self.start()
        self.handles.cancel("h")
        self.clock.advance(1)
        self.assertTrue(operation.cancelled)
        self.assertFalse(self.is_kept())

    def test_same_handle(self) -> None:
        """The second operation replaces the first, which stops."""
        first, second = self.start(), self.start()
        self.clock.advance(1)
        self.assertTrue(first.cancelled)
        self.assertIs(self.handles.find("h"), second)
        second.end()
        self.assertIs(self.handles.find("h"), second)

    def test_failed(self) -> None:
        """Its error is kept as a result is."""
        operation = self.start()
        operation.done.errback(DirectoryError("damaged"))
        found = self.handles.find("h")
        self.assertTrue(found.finished)
        self.assertEqual(str(found.error), "damaged")

    def test_number(self) -> None:
        """The oldest that has ended gives way; if all run, the new one is refused."""
        self.handles = self.make(handles=2, running=2)
        first, _ = self.start("1"), self.start("2")
        with self.assertRaises(OperationRefused) as raised:
            self.start("3")
        self.assertEqual(raised.exception.status, 503)
        first.end()
        self.start("3")
        self.assertFalse(self.is_kept("1"))
        self.assertTrue(self.is_kept("2"))

    def test_memory(self) -> None:
        """Results that have ended give way; what holds too much by itself fails, and holds nothing."""
        self.handles = self.make(memory_bytes=100)
        first, second = self.start("1"), self.start("2")
        first.hold(60)
        first.end()
        second.hold(60)
        self.assertFalse(self.is_kept("1"))
        with self.assertRaises(OperationRefused) as raised:
            second.hold(60)
        second.done.errback(raised.exception)
        self.assertIs(self.handles.find("2").error, raised.exception)
        third = self.start("3")
        third.hold(100)

    def test_guesses(self) -> None:
        """After many wrong handles short ones are not answered for a while, right or wrong; long ones are."""
        self.handles = self.make(wrong_per_minute=60)
        self.start("short")
        self.start(LONG)
        for number in range(60):
            self.assertFalse(self.is_kept(f"wrong {number}"))
        for handle in ("short", "wrong again"):
            with self.assertRaises(WebError) as raised:
                self.handles.find(handle)
            self.assertEqual(raised.exception.status, 429)
        self.handles.find(LONG)
        self.clock.advance(2)
        self.handles.find("short")

    def test_no_handle(self) -> None:
        for handle in ("", "a/b", "x" * 1001):
            with self.assertRaises(UsageError):
                self.start(handle)

    def test_close(self) -> None:
        """Nothing is left."""
        operation = self.start()
        self.start("ended").end()
        self.handles.close()
        self.clock.advance(1)
        self.assertTrue(operation.cancelled)
        self.assertEqual((len(self.handles), self.clock.getDelayedCalls()), (0, []))
