"""What pipegrid.flow.pipeline promises about order, bounds, failures and cancellation."""

from __future__ import annotations

import gc
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet import defer
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import PipelineStopped, UsageError
from pipegrid.flow.pipeline import KEPT_FAILURES, UNDELIVERED, Pipeline
from pipegrid.flow.window import AutoWindow, FixedWindow, Sent


class Broken(Exception):
    """What the fake peer answers when it fails."""


class Peer:
    """Keeps every call until the test answers it."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, Deferred[None]]] = []

    def call(self, name: object = None) -> Deferred[None]:
        answer: Deferred[None] = Deferred()
        self.calls.append((name, answer))
        return answer

    def names(self) -> list[object]:
        return [name for name, _ in self.calls]

    def acknowledge(self, index: int = 0) -> None:
        self.calls.pop(index)[1].callback(None)

    def fail(self, index: int = 0, error: Exception | None = None) -> None:
        self.calls.pop(index)[1].errback(error or Broken("disk on fire"))


class FlowTests(SynchronousTestCase):
    """Calls start at once; callers wait for room."""

    def setUp(self) -> None:
        self.peer = Peer()
        self.pipeline = Pipeline(100)

    def test_calls_start_at_once_with_their_arguments(self) -> None:
        """The call runs inside add, and gets what was given for it."""
        seen = []

        def call(*args: object, **kwargs: object) -> None:
            seen.append((args, kwargs))

        self.pipeline.add(10, call, 1, "two", size=3, call=4)
        self.assertEqual(seen, [((1, "two"), {"size": 3, "call": 4})])

    def test_answers_at_once_while_there_is_room(self) -> None:
        """Below the limit nobody waits, and reaching it exactly fills the window."""
        self.successResultOf(self.pipeline.add(99, self.peer.call))
        self.assertTrue(self.pipeline.has_space)
        self.assertEqual(self.pipeline.space, 1)
        waiting = self.pipeline.add(1, self.peer.call)
        self.assertNoResult(waiting)
        self.assertFalse(self.pipeline.has_space)
        self.assertEqual((self.pipeline.bytes_in_flight, self.pipeline.space), (100, 0))
        self.peer.acknowledge(1)
        self.successResultOf(waiting)

    def test_a_full_window_still_starts_the_call(self) -> None:
        """The caller that does not wait gets its way: only answers are held back."""
        self.pipeline.add(500, self.peer.call, "a")
        self.pipeline.add(500, self.peer.call, "b")
        self.assertEqual(self.peer.names(), ["a", "b"])

    def test_waiting_callers_are_woken_in_order_and_one_by_one(self) -> None:
        """Room for one message wakes one caller, so that the others do not rush in with it."""
        woken: list[str] = []

        def refill(_: object, name: str) -> None:
            woken.append(name)
            self.pipeline.add(100, self.peer.call, name + name)

        for name in "abc":
            waiting = self.pipeline.add(50, self.peer.call, name)
            if name != "a":
                waiting.addCallback(refill, name)
        self.peer.acknowledge()
        self.assertEqual(woken, [])
        self.peer.acknowledge()
        self.assertEqual(woken, ["b"])
        self.peer.acknowledge()
        self.assertEqual(woken, ["b"])
        self.peer.acknowledge()
        self.assertEqual(woken, ["b", "c"])

    def test_coroutines_and_plain_results_acknowledge(self) -> None:
        """A call may be a coroutine function, or need no time at all."""

        async def call() -> None:
            await self.peer.call()

        self.pipeline.add(30, call)
        self.assertEqual(self.pipeline.bytes_in_flight, 30)
        self.peer.acknowledge()
        self.assertEqual(self.pipeline.bytes_in_flight, 0)
        self.pipeline.add(30, int)
        self.assertEqual(self.pipeline.bytes_in_flight, 0)

    def test_calls_without_a_body_are_bounded_too(self) -> None:
        """Size 0 counts as one byte; less than nothing is refused before anything happens."""
        self.pipeline.add(0, self.peer.call)
        self.assertEqual(self.pipeline.bytes_in_flight, 1)
        with self.assertRaises(UsageError):
            self.pipeline.add(-1, self.peer.call)
        self.assertEqual(len(self.peer.calls), 1)

    def test_a_limit_of_one_byte_is_one_at_a_time(self) -> None:
        """The smallest window makes every call wait for the one before."""
        pipeline = Pipeline(1)
        self.assertNoResult(pipeline.add(10, self.peer.call))
        with self.assertRaises(UsageError):
            Pipeline(0)

    def test_flush_waits_for_everything(self) -> None:
        """Every flush fires with the last acknowledgement; with nothing in flight, at once."""
        self.successResultOf(self.pipeline.flush())
        self.pipeline.add(10, self.peer.call)
        self.pipeline.add(10, self.peer.call)
        flushes = [self.pipeline.flush(), self.pipeline.flush()]
        self.peer.acknowledge(1)
        self.assertNoResult(flushes[0])
        self.peer.acknowledge()
        for flushed in flushes:
            self.successResultOf(flushed)

    def test_flush_waits_for_what_is_added_meanwhile(self) -> None:
        """A caller woken by the last acknowledgement comes before the flush."""
        self.pipeline.add(100, self.peer.call).addCallback(
            lambda _: self.pipeline.add(10, self.peer.call)
        )
        flushed = self.pipeline.flush()
        self.peer.acknowledge()
        self.assertNoResult(flushed)
        self.peer.acknowledge()
        self.successResultOf(flushed)

    def test_a_measuring_window_needs_a_clock_and_gets_the_times(self) -> None:
        """The window sees when each message left and was acknowledged."""
        with self.assertRaises(UsageError):
            Pipeline(AutoWindow())
        clock, window = Clock(), AutoWindow()
        pipeline = Pipeline(window, clock)
        pipeline.add(1000, self.peer.call)
        clock.advance(0.25)
        self.peer.acknowledge()
        self.assertAlmostEqual(window.rate, 4000)
        self.assertIs(pipeline.window, window)

    def test_repr_shows_the_state(self) -> None:
        """A pipeline in a log or debugger says where it stands."""
        self.pipeline.add(70, self.peer.call)
        self.pipeline.add(70, self.peer.call)
        self.assertEqual(
            repr(self.pipeline),
            "<Pipeline open: 140 of 100 B in flight, 140 held, 2 calls, 1 waiting, 0 failed>",
        )


class FailureTests(SynchronousTestCase):
    """The first failure is told once, and nothing is swallowed."""

    def setUp(self) -> None:
        self.peer = Peer()
        self.pipeline = Pipeline(100)

    def test_next_add_reports_it_and_starts_nothing(self) -> None:
        """After a failure, add hands it out instead of calling; the next one says it is over."""
        self.pipeline.add(10, self.peer.call)
        self.peer.fail()
        self.assertTrue(self.pipeline.stopped)
        failure = self.failureResultOf(self.pipeline.add(10, self.peer.call), Broken)
        self.assertEqual(self.peer.calls, [])
        again = self.failureResultOf(self.pipeline.add(10, self.peer.call), PipelineStopped)
        self.assertIs(again.value.__cause__, failure.value)
        self.assertIn("disk on fire", str(again.value))
        self.failureResultOf(self.pipeline.flush(), PipelineStopped)

    def test_flush_reports_it_when_everything_has_ended(self) -> None:
        """Flush keeps the failure until the other calls have ended too."""
        self.pipeline.add(10, self.peer.call)
        self.pipeline.add(10, self.peer.call)
        flushed = self.pipeline.flush()
        self.peer.fail()
        self.assertNoResult(flushed)
        self.peer.acknowledge()
        self.failureResultOf(flushed, Broken)
        self.failureResultOf(self.pipeline.flush(), PipelineStopped)

    def test_a_waiting_add_hears_of_it_at_once(self) -> None:
        """The oldest waiting caller gets the failure, the others learn that it is over."""
        waits = [self.pipeline.add(100, self.peer.call) for _ in range(3)]
        flushed = self.pipeline.flush()
        self.peer.fail(2)
        self.failureResultOf(waits[0], Broken)
        self.failureResultOf(waits[1], PipelineStopped)
        self.failureResultOf(waits[2], PipelineStopped)
        self.assertNoResult(flushed)
        self.peer.acknowledge()
        self.peer.acknowledge()
        self.failureResultOf(flushed, PipelineStopped)

    def test_raising_at_once_counts(self) -> None:
        """A call that raises instead of answering is a failed call, reported by its own add."""

        def call() -> None:
            raise Broken

        self.failureResultOf(self.pipeline.add(10, call), Broken)
        self.assertEqual(self.pipeline.bytes_in_flight, 0)

    def test_later_failures_are_counted_and_the_first_few_kept(self) -> None:
        """A lost connection fails all calls; memory stays bounded, the count is exact."""
        pipeline = Pipeline(10_000)
        for _ in range(50):
            pipeline.add(1, self.peer.call)
        for number in range(50):
            self.peer.fail(error=Broken(number))
        self.assertEqual(pipeline.failure_count, 50)
        self.assertEqual(
            [failure.getErrorMessage() for failure in pipeline.failures],
            [str(number) for number in range(KEPT_FAILURES)],
        )
        self.failureResultOf(pipeline.flush(), Broken)

    def test_a_long_text_is_not_repeated_whole(self) -> None:
        """It may be the peer's; the failure itself has all of it."""
        self.pipeline.add(10, self.peer.call)
        self.peer.fail(error=Broken("x" * 100_000))
        self.assertEqual(
            len(str(self.failureResultOf(self.pipeline.flush(), Broken).value)), 100_000
        )
        later = self.failureResultOf(self.pipeline.flush(), PipelineStopped)
        self.assertLess(len(str(later.value)), 500)

    def test_a_failure_nobody_asked_for_is_logged(self) -> None:
        """Dropping a failed pipeline without flush leaves a trace in the log."""
        self.pipeline.add(10, self.peer.call)
        self.peer.fail()
        del self.pipeline
        gc.collect()
        self.assertEqual(len(self.flushLoggedErrors(Broken)), 1)

    def test_nothing_is_logged_once_it_was_reported(self) -> None:
        """What a caller was told is not told again."""
        self.pipeline.add(10, self.peer.call)
        self.peer.fail()
        self.failureResultOf(self.pipeline.flush(), Broken)
        del self.pipeline
        gc.collect()
        self.assertEqual(self.flushLoggedErrors(), [])


class CancellationTests(SynchronousTestCase):
    """Waiting can be given up, and so can everything."""

    def setUp(self) -> None:
        self.peer = Peer()
        self.pipeline = Pipeline(100)

    def test_cancelling_add_stops_the_wait_only(self) -> None:
        """The call goes on, and the pipeline with it."""
        waiting = self.pipeline.add(100, self.peer.call)
        second = self.pipeline.add(100, self.peer.call)
        waiting.cancel()
        self.failureResultOf(waiting, defer.CancelledError)
        self.pipeline._check_invariants()
        self.peer.acknowledge()
        self.peer.acknowledge()
        self.successResultOf(second)
        self.successResultOf(self.pipeline.flush())

    def test_cancelling_flush_stops_the_wait_only(self) -> None:
        """Another flush still fires."""
        self.pipeline.add(10, self.peer.call)
        first, second = self.pipeline.flush(), self.pipeline.flush()
        first.cancel()
        self.failureResultOf(first, defer.CancelledError)
        self.peer.acknowledge()
        self.successResultOf(second)

    def test_abort_cancels_every_call(self) -> None:
        """Calls are cancelled, waits fail, nothing new starts, and abort never fails."""
        waiting = [self.pipeline.add(100, self.peer.call) for _ in range(2)]
        flushed = self.pipeline.flush()
        self.successResultOf(self.pipeline.abort())
        for wait in [*waiting, flushed, self.pipeline.add(1, self.peer.call)]:
            self.failureResultOf(wait, PipelineStopped)
        self.assertEqual(len(self.peer.calls), 2)
        self.assertEqual(self.pipeline.failure_count, 0)
        self.successResultOf(self.pipeline.abort())

    def test_abort_waits_for_calls_that_take_their_time(self) -> None:
        """A call that ends only later keeps abort waiting, and its bytes counted."""
        cleaned_up: Deferred[None] = Deferred()

        async def call() -> None:
            try:
                await self.peer.call()
            finally:
                await cleaned_up

        self.pipeline.add(10, call)
        done = self.pipeline.abort()
        self.assertNoResult(done)
        self.assertEqual(self.pipeline.bytes_in_flight, 10)
        cleaned_up.callback(None)
        self.successResultOf(done)

    def test_abort_takes_a_failure_nobody_was_told_of(self) -> None:
        """It stays readable, and is not complained about in the log."""
        self.pipeline.add(10, self.peer.call)
        self.pipeline.add(10, self.peer.call)
        self.peer.fail()
        self.successResultOf(self.pipeline.abort())
        self.assertEqual([f.type for f in self.pipeline.failures], [Broken])
        del self.pipeline
        gc.collect()
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_a_call_that_raises_when_it_is_cancelled(self) -> None:
        """It has failed and ended; the others are cancelled, all waits fail; a late answer is nothing."""

        def cancel(_: object) -> None:
            raise Broken("not now")

        stubborn: Deferred[None] = Deferred(cancel)
        waiting = [self.pipeline.add(100, lambda: stubborn), self.pipeline.add(100, self.peer.call)]
        flushed = self.pipeline.flush()
        self.successResultOf(self.pipeline.abort())
        self.failureResultOf(waiting[0], Broken)
        self.failureResultOf(waiting[1], PipelineStopped)
        self.failureResultOf(flushed, PipelineStopped)
        self.assertEqual((self.pipeline.failure_count, self.pipeline.calls_in_flight), (1, 0))
        self.pipeline._check_invariants()
        stubborn.callback(None)
        self.assertEqual((self.pipeline.failure_count, self.pipeline.bytes_in_flight), (1, 0))

    def test_abort_from_within_a_call_cancels_that_call(self) -> None:
        """A call that aborts its own pipeline while it starts is cancelled like the others."""

        def call() -> Deferred[None]:
            self.pipeline.abort()
            return self.peer.call()

        self.failureResultOf(self.pipeline.add(10, call), PipelineStopped)
        self.assertEqual(self.pipeline.calls_in_flight, 0)


class ReentrancyTests(SynchronousTestCase):
    """However the acknowledgements come, the stack does not grow."""

    COUNT = 100_000

    def test_many_calls_acknowledged_inside_add(self) -> None:
        """A coroutine may add any number of calls that answer at once."""
        pipeline = Pipeline(1)

        async def fill() -> None:
            for _ in range(self.COUNT):
                await pipeline.add(10, int)
            await pipeline.flush()

        self.successResultOf(Deferred.fromCoroutine(fill()))

    def test_many_callers_woken_by_one_acknowledgement(self) -> None:
        """Callers that add again when woken, with calls that answer at once, do not nest."""
        pipeline, peer = Pipeline(1), Peer()
        pipeline.add(1, peer.call)
        for _ in range(self.COUNT):
            pipeline.when_space().addCallback(lambda _: pipeline.add(1, int))
        flushed = pipeline.flush()
        peer.acknowledge()
        self.successResultOf(flushed)

    def test_a_call_may_add_calls(self) -> None:
        """Its own bytes are counted before it starts."""
        pipeline, seen = Pipeline(100), []

        def inner() -> None:
            seen.append(pipeline.bytes_in_flight)

        pipeline.add(30, lambda: pipeline.add(40, inner))
        self.assertEqual(seen, [70])
        self.successResultOf(pipeline.flush())


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 300)),
        st.tuples(st.just("sync"), st.integers(0, 300)),
        st.tuples(st.just("acknowledge"), st.integers(0, 1000)),
        st.tuples(st.just("fail"), st.integers(0, 1000)),
        st.tuples(st.just("flush"), st.just(0)),
        st.tuples(st.just("cancel"), st.integers(0, 1000)),
    ),
    max_size=60,
)


class PropertyTests(SynchronousTestCase):
    """Whatever the order of calls, acknowledgements and failures."""

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(limit=st.integers(1, 400), writers=st.integers(1, 3), steps=STEPS)
    def test_any_order(self, limit: int, writers: int, steps: list[tuple[str, int]]) -> None:
        """
        Callers that wait exceed the window by one message each at most (by one, if alone), the first
        failure is told exactly once, and flush fires exactly when nothing is in flight.
        """
        pipeline, peer = Pipeline(limit), Peer()
        told: list[Failure] = []
        flushes: list[Deferred[None]] = []
        # Each writer is waiting (its Deferred has not fired) or ready.
        waits: list[Deferred[None] | None] = [None] * writers
        failed = 0
        largest = 0

        def writer_ready(number: int) -> Callable[[object], None]:
            def ready(result: object) -> None:
                waits[number] = None
                if isinstance(result, Failure) and not result.check(defer.CancelledError):
                    told.append(result)

            return ready

        def flushed(result: object) -> None:
            self.assertEqual(pipeline.calls_in_flight, 0)
            if isinstance(result, Failure):
                told.append(result)

        for step, number in steps:
            ready = [n for n in range(writers) if waits[n] is None]
            if step in ("add", "sync") and ready:
                largest = max(largest, number, 1)
                calls_before = len(peer.calls)
                stopped = pipeline.stopped
                if step == "add":
                    waits[ready[0]] = wait = pipeline.add(number, peer.call)
                    self.assertEqual(len(peer.calls), calls_before + (not stopped))
                else:
                    waits[ready[0]] = wait = pipeline.add(number, int)
                wait.addBoth(writer_ready(ready[0]))
            elif step == "acknowledge" and peer.calls:
                peer.acknowledge(number % len(peer.calls))
            elif step == "fail" and peer.calls:
                failed += 1
                peer.fail(number % len(peer.calls), Broken(failed))
            elif step == "flush":
                flush = pipeline.flush()
                flush.addBoth(flushed)
                flushes.append(flush)
            elif step == "cancel":
                wait_or_none = waits[number % writers]
                if wait_or_none is not None:
                    wait_or_none.cancel()
            pipeline._check_invariants()
            self.assertTrue(peer.calls or all(flush.called for flush in flushes))
            # A writer that gave up waiting is free to send once more than the window allows.
            cancels = sum(step == "cancel" for step, _ in steps)
            self.assertLess(pipeline.bytes_in_flight, limit + (writers + cancels) * largest)

        while peer.calls:
            peer.acknowledge()
        final = pipeline.flush()
        final.addBoth(flushed)
        pipeline._check_invariants()
        self.assertTrue(all(flush.called for flush in flushes))
        self.assertEqual([wait for wait in waits if wait is not None], [])
        firsts = [failure.getErrorMessage() for failure in told if failure.check(Broken)]
        self.assertEqual(firsts, ["1"] if failed else [])
        self.assertTrue(all(f.check(Broken, PipelineStopped) for f in told))
        self.assertEqual(pipeline.failure_count, failed)
        self.assertEqual(bool(told), bool(failed))


class LettingGoTests(SynchronousTestCase):
    """Bytes in flight that are not held here any more."""

    def setUp(self) -> None:
        self.pipeline = Pipeline(100, held_limit_bytes=40)
        self.calls: list[tuple[Callable[[], None], Deferred[object]]] = []

    def call(
        self, release: Callable[[], None], /, *args: object, **kwargs: object
    ) -> Deferred[object]:
        self.arguments = args, kwargs
        answer: Deferred[object] = Deferred()
        self.calls.append((release, answer))
        return answer

    def tearDown(self) -> None:
        self.pipeline._check_invariants()

    def test_what_is_held_is_bounded(self) -> None:
        """A full memory makes callers wait until something is let go of, before anything is acknowledged."""
        self.successResultOf(self.pipeline.add_letting_go(30, self.call, 1, two=2))
        self.assertEqual(self.arguments, ((1,), {"two": 2}))
        self.assertEqual((self.pipeline.space, self.pipeline.bytes_held), (10, 30))
        full = self.pipeline.add_letting_go(30, self.call)
        self.assertNoResult(full)
        self.assertEqual((self.pipeline.space, self.pipeline.has_space), (0, False))
        self.calls[0][0]()
        self.successResultOf(full)
        self.assertEqual((self.pipeline.bytes_held, self.pipeline.bytes_in_flight), (30, 60))
        self.assertEqual(self.pipeline.space, 10)

    def test_the_window_counts_all(self) -> None:
        """What was let go of is still unacknowledged."""
        for _ in range(4):
            full = self.pipeline.add_letting_go(30, self.call)
            self.calls[-1][0]()
        self.assertEqual(self.pipeline.bytes_held, 0)
        self.assertNoResult(full)
        self.calls[0][1].callback(None)
        self.successResultOf(full)
        self.assertEqual((self.pipeline.bytes_held, self.pipeline.bytes_in_flight), (0, 90))

    def test_acknowledged_or_failed_without(self) -> None:
        """A call that ends is held no more, and letting go later, or twice, means nothing."""
        self.pipeline.add_letting_go(10, self.call)
        self.pipeline.add_letting_go(10, self.call)
        self.pipeline.add_letting_go(10, self.call)
        self.calls[0][1].callback(None)
        self.calls[1][0]()
        self.calls[1][0]()
        self.calls[0][0]()
        self.assertEqual(self.pipeline.bytes_held, 10)
        self.calls[2][1].errback(Broken())
        self.calls[2][0]()
        self.assertEqual((self.pipeline.bytes_held, self.pipeline.bytes_in_flight), (0, 10))
        self.failureResultOf(self.pipeline.when_space(), Broken)
        self.failureResultOf(self.pipeline.add_letting_go(1, self.call), PipelineStopped)
        self.assertEqual(len(self.calls), 3)
        self.calls[1][1].callback(None)

    def test_ordinary_calls_are_held(self) -> None:
        """Until they are acknowledged."""
        answer: Deferred[None] = Deferred()
        full = self.pipeline.add(50, lambda: answer)
        self.assertNoResult(full)
        answer.callback(None)
        self.successResultOf(full)

    def test_messages_fit_into_the_memory(self) -> None:
        """What is held and one more message are never more than nine eighths of it."""
        self.assertEqual(self.pipeline.message_bytes, 45)
        self.pipeline.add_letting_go(30, self.call)
        self.assertEqual(self.pipeline.message_bytes, 15)
        self.calls[0][0]()
        self.assertEqual(self.pipeline.message_bytes, 45)
        self.assertEqual(Pipeline(60).message_bytes, 30)

    def test_a_negative_size(self) -> None:
        """It is refused, as by ``add``."""
        with self.assertRaises(UsageError):
            self.pipeline.add_letting_go(-1, self.call)

    def test_undelivered(self) -> None:
        """A call that fails in its own way teaches the window nothing, and does not stop the pipeline."""
        clock = Clock()
        window = Recorder(1000)
        pipeline = Pipeline(window, clock)
        pipeline.add(10, lambda: UNDELIVERED)
        pipeline.add(20, lambda: None)
        self.assertEqual((window.lost, window.arrived), ([10], [20]))
        self.assertFalse(pipeline.stopped)


class Recorder(FixedWindow):
    """Knows what it was told."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self.lost: list[int] = []
        self.arrived: list[int] = []

    def acknowledged(self, _now: float, token: Sent) -> None:
        self.arrived.append(token.size)

    def abandoned(self, token: Sent) -> None:
        self.lost.append(token.size)


class FixedWindowTests(SynchronousTestCase):
    """The window that is a number."""

    def test_stays_as_it_is(self) -> None:
        """Nothing that happens changes it."""
        window = FixedWindow(50)
        token = window.sent(0.0, 40)
        window.acknowledged(1.0, token)
        window.abandoned(window.sent(1.0, 40))
        self.assertEqual(window.limit_bytes, 50)
