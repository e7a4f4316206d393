"""
Runs calls that may wait for another program for ever, such as reading a pipe, each in its own thread, and
cancels them.
"""

from __future__ import annotations

import errno
import os
import select
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread
from typing import Any, Concatenate, ParamSpec, TypeVar

from twisted.internet import defer
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFromThreads
from twisted.python.failure import Failure

P = ParamSpec("P")
T = TypeVar("T")

NO_THREAD = "it takes a thread, and the system gives no more; see 'ulimit -u'"

LIMIT = 256
"""Limit of calls at a time; each takes a thread and up to four descriptors."""


class BlockingCall:
    """Used by a call in its thread to wait, and by the reactor to cancel it."""

    def __init__(self) -> None:
        self._woken, self._wake = os.pipe()
        self._lock = Lock()
        self._given_up = False
        self._undo: list[Callable[[], object]] = []

    def check(self) -> None:
        """Raise CancelledError if the call was cancelled."""
        if self._given_up:
            raise defer.CancelledError

    def wait_readable(self, fd: int) -> None:
        """Wait until a descriptor can be read, or is at its end; raises CancelledError."""
        self._wait(fd, select.POLLIN)

    def wait_writable(self, fd: int) -> None:
        """Wait until a descriptor can be written, or has failed; raises CancelledError."""
        self._wait(fd, select.POLLOUT)

    def sleep(self, seconds: float) -> None:
        """Wait for a time; raises CancelledError."""
        self._wait(None, 0, seconds)

    def undo(self, action: Callable[[], object]) -> None:
        """
        Register a function that runs in either thread if the call is cancelled; raises CancelledError if it
        was.
        """
        with self._lock:
            if not self._given_up:
                self._undo.append(action)
                return
        action()
        raise defer.CancelledError

    def _wait(self, fd: int | None, event: int, seconds: float | None = None) -> None:
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        if fd is not None:
            poll.register(fd, event)
        poll.poll(None if seconds is None else 1000 * seconds)
        self.check()

    # For the reactor, and for the end of the thread.

    def give_up(self) -> None:
        """Cancel the call; to be called once."""
        with self._lock:
            self._given_up = True
            actions, self._undo = self._undo, []
            os.close(self._wake)
        for action in actions:
            with suppress(Exception):  # it was to release something, and nothing more can be done
                action()

    def ended(self) -> None:
        """Release the descriptors after the thread has ended; in the reactor's thread, once."""
        os.close(self._woken)
        if not self._given_up:
            os.close(self._wake)


class _Entry:
    """One call, and the Deferred for its result."""

    def __init__(
        self, work: Callable[[BlockingCall], Any], cancel: Callable[[_Entry], None]
    ) -> None:
        self.work = work
        self.call: BlockingCall | None = None
        self.deferred: Deferred[Any] = Deferred(lambda _: cancel(self))


class BlockingCalls:
    """
    Runs functions that may wait for ever; called only from the reactor's thread.

    When the Deferred of a call is cancelled, or all calls are stopped, the Deferred fails at once, and the
    functions that the call has registered with ``undo`` run. The thread ends as soon as the call uses its
    ``BlockingCall``; waiting for a descriptor is interrupted. A thread that waits inside another object's
    ``read`` or ``write`` cannot be interrupted; it ends when that returns, and its result is dropped.
    Threads are daemons, which do not keep the process alive.

    At most ``LIMIT`` threads run, including those of cancelled calls; further calls wait in order.
    """

    def __init__(self, reactor: IReactorFromThreads) -> None:
        self._reactor = reactor
        self._threads: set[_Entry] = set()
        self._waiting: deque[_Entry] = deque()

    def __repr__(self) -> str:
        return f"<BlockingCalls: {len(self._threads)} running, {len(self._waiting)} waiting>"

    def run(
        self,
        function: Callable[Concatenate[BlockingCall, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Deferred[T]:
        """Fire with the function's result; its first argument is its ``BlockingCall``."""
        entry = _Entry(lambda call: function(call, *args, **kwargs), self._cancel)
        self._waiting.append(entry)
        self._start_next()
        return entry.deferred

    def stop(self) -> None:
        """Cancel all calls: their Deferreds fail with CancelledError."""
        for entry in [*self._waiting, *self._threads]:
            entry.deferred.cancel()

    def _start_next(self) -> None:
        while self._waiting and len(self._threads) < LIMIT:
            entry = self._waiting.popleft()
            try:
                self._start(entry)
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread
                if isinstance(error, RuntimeError):
                    error = OSError(errno.EAGAIN, NO_THREAD)
                entry.deferred.errback(Failure(error))

    def _start(self, entry: _Entry) -> None:
        call = BlockingCall()
        thread = Thread(
            target=self._serve, args=(entry, call), name="pipegrid-blocking", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            call.ended()
            raise
        entry.call = call
        self._threads.add(entry)

    def _serve(self, entry: _Entry, call: BlockingCall) -> None:
        """In a thread: make the call, and pass its result to the reactor."""
        try:
            result = entry.work(call)
        except BaseException:
            result = Failure()
        self._reactor.callFromThread(self._ended, entry, call, result)

    def _ended(self, entry: _Entry, call: BlockingCall, result: object) -> None:
        self._threads.discard(entry)
        call.ended()
        if not entry.deferred.called:
            entry.deferred.callback(result)  # a Failure calls the errbacks
        self._start_next()

    def _cancel(self, entry: _Entry) -> None:
        # The Deferred fails with CancelledError as soon as this returns.
        if entry.call is not None:
            entry.call.give_up()
        elif entry in self._waiting:
            self._waiting.remove(entry)
