"""Waiting for several things at once."""

from __future__ import annotations

import gc
import weakref

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.reactor.deferreds import RequestSet, Waiters, gather, start_cancellable


class TogetherTests(SynchronousTestCase):
    """All or nothing."""

    def setUp(self) -> None:
        self.cancelled: list[int] = []
        self.parts: list[Deferred[int]] = [
            Deferred(lambda _, number=number: self.cancelled.append(number))  # type: ignore[misc]
            for number in range(3)
        ]
        self.all = Deferred.fromCoroutine(gather(self.parts))

    def test_all_succeed(self) -> None:
        """Results are in the order of asking."""
        for number in (2, 0, 1):
            self.assertNoResult(self.all)
            self.parts[number].callback(number)
        self.assertEqual(self.successResultOf(self.all), [0, 1, 2])
        self.assertEqual(self.cancelled, [])

    def test_one_fails(self) -> None:
        """Its own error comes out at once, and the others are cancelled."""
        self.parts[0].callback(0)
        self.parts[1].errback(ValueError("no"))
        self.failureResultOf(self.all, ValueError)
        self.assertEqual(self.cancelled, [2])

    def test_cancelling(self) -> None:
        """All are cancelled, and it ends as cancelled."""
        self.all.cancel()
        self.failureResultOf(self.all, CancelledError)
        self.assertEqual(sorted(self.cancelled), [0, 1, 2])

    def test_nothing(self) -> None:
        """There is nothing to wait for."""
        self.assertEqual(self.successResultOf(Deferred.fromCoroutine(gather([]))), [])


class WaitersTests(SynchronousTestCase):
    """All who wait for one event are told, but for those who do not wait any more."""

    def test_giving_up(self) -> None:
        """Before the event, and while others are being told."""
        waiters, waiting = self.begin()
        waiters.fire(1)
        self.assertEqual(self.successResultOf(waiting), 1)
        waiters, waiting = self.begin()
        waiters.fail(ValueError())
        self.failureResultOf(waiting, ValueError)

    def begin(self) -> tuple[Waiters[int], Deferred[int]]:
        """Return several, and one that is told; of the others each gives up when the one before is told."""
        waiters: Waiters[int] = Waiters()
        early, first, second, last = (waiters.wait() for _ in range(4))
        early.cancel()
        self.failureResultOf(early, CancelledError)
        first.addBoth(lambda _: second.cancel())
        second.addErrback(lambda failure: failure.trap(CancelledError))
        return waiters, last


class BegunTests(SynchronousTestCase):
    """Cancelling what runs at this moment."""

    def test_from_within(self) -> None:
        """A coroutine that has itself cancelled, by what it calls, is cancelled where it waits next."""
        clock = Clock()
        first, second = Deferred[None](), Deferred[None]()

        async def work() -> None:
            await first
            running.cancel()
            await second

        running = start_cancellable(work(), clock)
        first.callback(None)
        self.assertNoResult(running)
        clock.advance(0)
        self.failureResultOf(running, CancelledError)
        self.assertTrue(second.called)

    def test_from_outside(self) -> None:
        """Otherwise it is cancelled at once."""
        clock = Clock()
        waiting = Deferred[None]()

        async def work() -> None:
            await waiting

        running = start_cancellable(work(), clock)
        running.cancel()
        self.failureResultOf(running, CancelledError)

    def test_with_nothing_left_to_wait_for(self) -> None:
        """Who gives up at the very end has given up; what failed says why. Nothing is left behind."""
        for error in (None, ValueError):
            self.failureResultOf(self.cancelled_at_the_end(error), error or CancelledError)

    def cancelled_at_the_end(self, error: type[Exception] | None) -> Deferred[int]:
        """Return what is cancelled in its last step, and then ends."""
        clock = Clock()
        ready = Deferred[None]()

        async def ends() -> int:
            await ready
            done.cancel()
            done.cancel()
            if error is not None:
                raise error
            return 1

        done = start_cancellable(ends(), clock)
        ready.callback(None)
        self.assertEqual(clock.getDelayedCalls(), [])
        return done

    def test_what_is_cancelled_gives_its_memory_back(self) -> None:
        """At once, without the collector: local variables of all its coroutines."""

        class _Segment:
            pass

        segments: list[weakref.ref[_Segment]] = []

        async def inner() -> None:
            segment = _Segment()
            segments.append(weakref.ref(segment))
            await Deferred()

        async def work() -> None:
            await start_cancellable(inner(), Clock())

        collecting = gc.isenabled()
        gc.disable()
        try:
            running = start_cancellable(work(), Clock())
            running.addErrback(lambda failure: failure.trap(CancelledError) and None)
            running.cancel()
            self.assertIsNone(self.successResultOf(running))
            del running
            self.assertIsNone(segments[0]())
        finally:
            if collecting:
                gc.enable()

    def test_who_caught_the_same_error_goes_on(self) -> None:
        """Also if its frame is in the traceback of the error with which another one ends."""
        first, second, third = Deferred[None](), Deferred[None](), Deferred[None]()
        caught: list[CancelledError] = []

        async def catches() -> int:
            try:
                await first
            except CancelledError as error:
                caught.append(error)
            await third
            return 1

        async def fails() -> None:
            await second

        async def ends() -> None:
            await start_cancellable(fails(), Clock())

        going_on = start_cancellable(catches(), Clock())
        requests: RequestSet[None] = RequestSet(Clock())
        requests.start(ends(), None)
        first.cancel()
        second.errback(caught[0])
        self.assertEqual(requests.running, {})
        third.callback(None)
        self.assertEqual(self.successResultOf(going_on), 1)

    def test_nothing_is_left_to_the_collector(self) -> None:
        """A hundred thousand small files are as many Deferreds, which the collector is kept from."""

        async def work() -> int:
            return 1

        collecting = gc.isenabled()
        gc.disable()
        try:
            running = start_cancellable(work(), Clock())
            self.assertEqual(self.successResultOf(running), 1)
            gone = weakref.ref(running)
            del running
            self.assertIsNone(gone())
        finally:
            if collecting:
                gc.enable()
