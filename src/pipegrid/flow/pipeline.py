"""Pipeline: many calls to one peer in flight, within a window, with every failure reported."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from typing import Any, Concatenate, ParamSpec

from twisted.internet import defer
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python import reflect
from twisted.python.failure import Failure

from pipegrid.argument_checks import check_has, check_whole, shown
from pipegrid.errors import PipelineStopped, RemoteCallError, UsageError
from pipegrid.flow.window import FixedWindow, Sent, Window, left_for_message

P = ParamSpec("P")

DEFAULT_LIMIT_BYTES = 50_000
"""Default window: 500 kB/s at a 100 ms round trip. Pass a larger one or an ``AutoWindow`` for a fast link."""

UNDELIVERED = object()
"""The result for a call that was not acknowledged, but whose failure should not stop the pipeline."""

KEPT_FAILURES = 8
"""How many failures are kept; a lost connection fails every call in flight for the same reason."""


_MAX_REASON_CHARACTERS = 200
"""Maximum characters of a failure's text, which the peer may have sent, that messages quote."""


class RemoteCallFailure(Failure):
    """
    A failure that arrived without an exception, together with an exception that can be raised.

    ``check`` and ``trap`` also accept the remote names of the failure's class and that class's parents.

    Attributes:
        remote: the failure as it arrived.
    """

    def __init__(self, error: BaseException, remote: Failure) -> None:
        super().__init__(error)
        self.remote = remote

    def check(self, *errorTypes: Any) -> Any:
        """
        Return the first of these types, or names of types, that matches the error, either locally or at the
        peer.
        """
        return super().check(*errorTypes) or self.remote.check(*errorTypes)


class Pipeline:
    """
    Starts calls to one peer, as many as the window allows, and reports their failures.

    Any function that returns a Deferred can be pipelined. docs/explanation-flow-control.md gives the reasons
    for these guarantees:

    * ``add`` always starts its call at once, unless the pipeline has stopped. The caller waits instead: its
      Deferred fires when another message fits the window. So a caller that waits never has more in flight
      than the window and one message. Several callers are resumed in order, one at a time, each only when its
      message fits.
    * The first failure of a call stops the pipeline: no further call is started. The failure is reported
      once, to the oldest waiting ``add``, else to the next ``add``, ``when_space`` or ``flush``. All later
      ones fail with ``PipelineStopped``, whose cause is the first failure.
    * All failures are counted in ``failure_count``; the first few stay in ``failures``. A first
      failure that was never reported is logged when the pipeline is garbage, as an unhandled error.
    * A reported failure holds an exception, so that a coroutine can raise it. If the protocol of a call
      passes failures on as text, the report is a ``RemoteCallFailure``, whose exception is what the protocol
      itself raises in coroutines (``RemoteError`` in Perspective Broker), else a ``RemoteCallError``.
    * A stopped pipeline stays stopped. A call whose failure should not stop it must handle the failure
      itself, with an errback that returns ``UNDELIVERED``, so that the window does not mistake the failure
      for a fast acknowledgement.
    * A call that was added by ``add_letting_go`` may report that the network has its bytes;
      ``held_limit_bytes`` limits the bytes of which that was not reported.
    """

    def __init__(
        self,
        window: int | Window = DEFAULT_LIMIT_BYTES,
        clock: IReactorTime | None = None,
        held_limit_bytes: int | None = None,
    ) -> None:
        """
        Args:
            window: how many bytes may be unacknowledged: a number of at least 1, or a window. An
                ``AutoWindow`` may be reused, by one pipeline at a time, and then remembers the link.
            clock: the reactor; required by windows that measure.
            held_limit_bytes: how many of the bytes in flight may still be in memory; None: all.

        Raises:
            UsageError: the number is less than 1, or the window measures and there is no clock.
        """
        if isinstance(window, int):
            window = FixedWindow(window)
        check_has(window, ("limit_bytes", "sent"), "a window", "a number of bytes or a window")
        if clock is not None:
            check_has(clock, ("seconds",), "a clock", "the reactor")
        elif not isinstance(window, FixedWindow):
            raise UsageError("a window that measures needs a clock; pass the reactor")
        self._window: Window = window
        self._now: Callable[[], float] = (lambda: 0.0) if clock is None else clock.seconds

        self._calls: dict[Sent, Deferred[object] | None] = {}  # None: the call has not returned yet
        self._bytes_in_flight = 0
        self._held_limit_bytes = held_limit_bytes
        self._bytes_held = 0
        self._space_waits: deque[Deferred[None]] = deque()
        self._flush_waits: deque[Deferred[None]] = deque()
        self._firing = False

        self._stopped = False
        self._aborted = False
        # The first failure, held in a Deferred, so that Twisted logs it if it is never reported.
        self._unreported: Deferred[None] | None = None
        self._failures: list[Failure] = []
        self._failure_count = 0

    def __repr__(self) -> str:
        state = "aborted" if self._aborted else "failed" if self._stopped else "open"
        return (
            f"<Pipeline {state}: {self._bytes_in_flight} of {self.limit_bytes} B in flight, "
            f"{self._bytes_held} held, {len(self._calls)} calls, "
            f"{len(self._space_waits) + len(self._flush_waits)} waiting, "
            f"{self._failure_count} failed>"
        )

    @property
    def window(self) -> Window:
        """The window that was given, or the fixed window for the number that was given."""
        return self._window

    @property
    def limit_bytes(self) -> int:
        """How many bytes the window allows now."""
        return self._window.limit_bytes

    @property
    def bytes_in_flight(self) -> int:
        """The sum of the sizes of all calls that have started and not ended."""
        return self._bytes_in_flight

    @property
    def bytes_held(self) -> int:
        """How many of the bytes in flight are still in memory, since their calls have not released them."""
        return self._bytes_held

    @property
    def message_bytes(self) -> int:
        """
        The best size of the next message: what the window recommends, but no more than keeps the bytes in
        memory within 9/8 of their limit.
        """
        recommended = self._window.message_bytes
        if self._held_limit_bytes is None:
            return recommended
        return min(recommended, left_for_message(self._held_limit_bytes, self._bytes_held))

    @property
    def gathers(self) -> bool:
        """Whether a sender should prepare the next message before it fits the window."""
        return self._window.gathers

    @property
    def calls_in_flight(self) -> int:
        """How many calls have started and not ended."""
        return len(self._calls)

    @property
    def space(self) -> int:
        """
        How many bytes can be added until a limit is reached; 0 if one is reached already or the pipeline has
        stopped.
        """
        if self._stopped:
            return 0
        space = self.limit_bytes - self._bytes_in_flight
        if self._held_limit_bytes is not None:
            space = min(space, self._held_limit_bytes - self._bytes_held)
        return max(0, space)

    @property
    def has_space(self) -> bool:
        """Whether the pipeline is open and below its limits; one further call may exceed them."""
        return (
            not self._stopped
            and self._bytes_in_flight < self._window.limit_bytes
            and (self._held_limit_bytes is None or self._bytes_held < self._held_limit_bytes)
        )

    @property
    def stopped(self) -> bool:
        """Whether a call has failed or ``abort`` was called, so that no further call is started."""
        return self._stopped

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The first failures, oldest first, at most ``KEPT_FAILURES``, whether or not they were reported."""
        return tuple(self._failures)

    @property
    def failure_count(self) -> int:
        """How many calls have failed, except those that ``abort`` cancelled."""
        return self._failure_count

    def add(
        self, size: int, call: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs
    ) -> Deferred[None]:
        """
        Start ``call(*args, **kwargs)`` now; the end of its Deferred (or coroutine, or return) acknowledges
        it.

        Args:
            size: how many bytes the call keeps in flight. 0 counts as 1, so that calls without a body are
                limited too.

        Returns:
            A Deferred that fires as soon as the window is not full, perhaps at once. It does not wait for
                this call. Cancelling it stops only the waiting.

            It fails with the first failure of any call of this pipeline if that was not reported yet, else
                with ``PipelineStopped``. If the pipeline had stopped before, ``call`` was not called.

        Raises:
            UsageError: ``size`` is negative, or ``call`` cannot be called.
        """
        token = self._begin(size, call)
        if token is not None:
            self._start(token, call, *args, **kwargs)
        return self.when_space()

    def add_letting_go(
        self,
        size: int,
        call: Callable[Concatenate[Callable[[], None], P], object],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Deferred[None]:
        """
        Do the same as ``add``, for a call whose bytes can be released before it is acknowledged.

        The first argument that ``call`` gets is a function to be called when the network has the bytes.
        """
        token = self._begin(size, call)
        if token is not None:
            self._start(token, call, partial(self._release, token), *args, **kwargs)
        return self.when_space()

    def when_space(self) -> Deferred[None]:
        """
        Return a Deferred that fires when the window is not full, or fails, as for ``add`` without a call.
        """
        if self._stopped:
            return defer.fail(self._take_failure())
        if self.has_space:
            return defer.succeed(None)
        return self._wait_in(self._space_waits)

    def flush(self) -> Deferred[None]:
        """
        Return a Deferred that fires when nothing is in flight.

        Success means that every call that was ever added has succeeded. Otherwise the Deferred fails, once
        all calls have ended, with the first failure if that was not reported yet, else with
        ``PipelineStopped``. Cancelling stops only the waiting.
        """
        if self._calls:
            return self._wait_in(self._flush_waits)
        return self._outcome()

    def abort(self) -> Deferred[None]:
        """
        Cancel every call in flight, and start no further call.

        Deferreds of ``add`` that wait fail at once, those of ``flush`` when all calls have ended: with the
        failure of a call if one was not reported yet, else with ``PipelineStopped``.

        Returns:
            A Deferred that fires when all calls have ended. It never fails, since the caller knows the reason
                already. Other errors are in ``failures``. Aborting again has no effect. A call that raises
                while it is cancelled has failed and ended.
        """
        self._stopped = self._aborted = True
        for token, running in list(self._calls.items()):
            self._cancel(token, running)
        self._fire_waits()
        done: Deferred[None] = self.flush()
        # The caller gave the pipeline up, so a failure is not logged as unhandled.
        done.addErrback(lambda _: None)
        return done

    def _begin(self, size: int, call: object) -> Sent | None:
        """Count a call that is about to start, and return its token; None if the pipeline has stopped."""
        if type(size) is not int:
            check_whole(size, "the size of a call")
        if not callable(call):
            raise UsageError(f"a pipeline calls functions, not {shown(call)}")
        if size < 0:
            raise UsageError(f"a call cannot keep {size} bytes in flight; give 0 or more")
        if self._stopped:
            return None
        size = max(1, size)
        token = self._window.sent(self._now(), size)
        # The call is counted before it starts, since it may use this pipeline while it runs.
        self._calls[token] = None
        self._bytes_in_flight += size
        self._bytes_held += size
        return token

    def _start(
        self, token: Sent, call: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        running: Deferred[object] = defer.maybeDeferred(call, *args, **kwargs)
        self._calls[token] = running
        running.addCallbacks(
            self._acknowledged, self._failed, callbackArgs=(token,), errbackArgs=(token,)
        )
        if self._aborted:
            self._cancel(token, running)

    def _cancel(self, token: Sent, running: Deferred[object] | None) -> None:
        if running is None or token not in self._calls:
            return  # the call has not returned yet, or ended while another call was cancelled
        try:
            running.cancel()
        except Exception:
            self._failed(Failure(), token)

    def _acknowledged(self, result: object, token: Sent) -> None:
        if token not in self._calls:
            return  # the call ended when it was cancelled
        self._ended(token)
        if result is UNDELIVERED:
            self._window.abandoned(token)
        else:
            self._window.acknowledged(self._now(), token)
        self._fire_waits()

    def _failed(self, failure: Failure, token: Sent) -> None:
        if token not in self._calls:
            return
        self._ended(token)
        if not (self._aborted and isinstance(failure.value, defer.CancelledError)):
            self._note_failure(failure)
        self._window.abandoned(token)
        self._fire_waits()

    def _ended(self, token: Sent) -> None:
        del self._calls[token]
        self._bytes_in_flight -= token.size
        self._no_longer_held(token)

    def _release(self, token: Sent) -> None:
        self._no_longer_held(token)
        self._fire_waits()

    def _no_longer_held(self, token: Sent) -> None:
        if token.held:
            token.held = False
            self._bytes_held -= token.size

    def _note_failure(self, failure: Failure) -> None:
        """Record a failure. It is counted first, since converting failures of other protocols may raise."""
        self._stopped = True
        self._failure_count += 1
        if self._failure_count > KEPT_FAILURES:
            return
        failure = _as_raisable(failure)
        self._failures.append(failure)
        if self._failure_count == 1:
            self._unreported = defer.fail(failure)

    def _take_failure(self) -> Failure:
        """Return the first failure if it was not reported yet, else a ``PipelineStopped``."""
        if self._unreported is not None:
            self._unreported.addErrback(lambda _: None)
            self._unreported = None
            return self._failures[0]
        if self._failures:
            stopped = PipelineStopped(
                "a call on this pipeline failed before, so nothing more is sent on it "
                f"({_excerpt(self._failures[0])}); start over with a new one"
            )
            stopped.__cause__ = self._failures[0].value
        else:
            stopped = PipelineStopped("this pipeline was aborted; start over with a new one")
        return Failure(stopped)

    def _outcome(self) -> Deferred[None]:
        return defer.fail(self._take_failure()) if self._stopped else defer.succeed(None)

    def _wait_in(self, waits: deque[Deferred[None]]) -> Deferred[None]:
        waiting: Deferred[None] = Deferred(waits.remove)
        waits.append(waiting)
        return waiting

    def _fire_waits(self) -> None:
        """
        Fire every wait that is due, in order, including waits that become due meanwhile.

        A callback may add calls that end at once and call this method again; then the outermost loop goes on,
        so that the stack does not grow.
        """
        if self._firing:
            return
        self._firing = True
        try:
            while True:
                if self._space_waits and (self._stopped or self.has_space):
                    waiting = self._space_waits.popleft()
                elif self._flush_waits and not self._calls:
                    waiting = self._flush_waits.popleft()
                else:
                    break
                if self._stopped:
                    waiting.errback(self._take_failure())
                else:
                    waiting.callback(None)
        finally:
            self._firing = False

    def _check_invariants(self) -> None:
        assert self._bytes_in_flight == sum(token.size for token in self._calls)
        assert self._bytes_held == sum(token.size for token in self._calls if token.held)
        assert all(token.size >= 1 for token in self._calls)
        assert self._stopped == (self._aborted or self._failure_count > 0)
        assert len(self._failures) == min(self._failure_count, KEPT_FAILURES)
        assert self._unreported is None or self._failure_count > 0
        if not self._firing:
            assert not self._space_waits or not (self.has_space or self._stopped)
            assert not self._flush_waits or self._calls


def _as_raisable(failure: Failure) -> Failure:
    """Return this failure, or one that replaces it: its value is an exception, and it holds no frames."""
    if isinstance(failure.value, BaseException):
        # Frames would keep the message's bytes in memory. Subclasses of Failure may raise in this call.
        with suppress(Exception):
            failure.cleanFailure()
        return failure
    return RemoteCallFailure(_awaited(failure) or _remote_error(failure), failure)


def _awaited(failure: Failure) -> BaseException | None:
    """Return the exception that a coroutine gets when it awaits this failure, or None if it gets none."""

    def awaiting() -> Generator[None, None, BaseException]:
        try:
            yield
        except BaseException as error:
            return error.with_traceback(None)
        raise AssertionError("nothing was raised")

    generator = awaiting()
    next(generator)
    try:
        failure.throwExceptionIntoGenerator(generator)
    except StopIteration as stop:
        found: BaseException | None = stop.value
    except Exception:  # no exception can be raised for this failure
        found = None
    finally:
        generator.close()
    return found


def _remote_error(failure: Failure) -> RemoteCallError:
    kind = next(iter(failure.parents), type(failure.value))
    name = kind if isinstance(kind, str) else reflect.qual(kind)
    return RemoteCallError(f"{failure.getErrorMessage()} ({name})", name, failure.getTraceback())


def _excerpt(failure: Failure) -> str:
    text = failure.getErrorMessage()
    return text if len(text) <= _MAX_REASON_CHARACTERS else f"{text[:_MAX_REASON_CHARACTERS]}..."
