"""
Calls that may wait for another program, perhaps for ever: each has a thread of its own, and can be given up.

Reading a pipe, opening a named one, writing to a terminal: none of it may keep the reactor, nor one of the
few threads that do work for the processor (``workers``).

**Giving up.** When the Deferred of a call is cancelled, or all calls are stopped, the Deferred fails at once,
and what the call has registered with ``undo`` is undone. The thread ends as soon as the call asks its
``BlockingCall``, which wakes a call that waits for a descriptor. A thread that waits inside some object's
own ``read`` or ``write`` cannot be woken; it ends when that returns, and its result is dropped. Threads are
daemons: none keeps the process from ending.

**Bounds.** At most ``limit`` threads, abandoned ones included; further calls wait for one, in order.
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

LIMIT = 256
"""Calls at a time; each takes a thread and up to four descriptors."""


class BlockingCall:
    """What a call asks while it runs in its thread, and the reactor tells when nobody waits any more."""

    def __init__(self) -> None:
        self._woken, self._wake = os.pipe()
        self._lock = Lock()
        self._given_up = False
        self._undo: list[Callable[[], object]] = []

    def check(self) -> None:
        """Raise CancelledError if nobody waits for the result any more."""
        if self._given_up:
            raise defer.CancelledError

    def wait_readable(self, fd: int) -> None:
        """Wait until a descriptor can be read, or is at its end; CancelledError: given up."""
        self._wait(fd, select.POLLIN)

    def wait_writable(self, fd: int) -> None:
        """Wait until a descriptor takes more, or has failed; CancelledError: given up."""
        self._wait(fd, select.POLLOUT)

    def sleep(self, seconds: float) -> None:
        """Wait so long; CancelledError: given up."""
        self._wait(None, 0, seconds)

    def undo(self, action: Callable[[], object]) -> None:
        """Have something done, by whichever thread, if the call is given up; CancelledError: it was."""
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

    # For the reactor, and for the thread's end.

    def give_up(self) -> None:
        """Nobody waits for the result any more; once."""
        with self._lock:
            self._given_up = True
            actions, self._undo = self._undo, []
            os.close(self._wake)
        for action in actions:
            with suppress(Exception):  # it was to give something back, and nothing more can be done
                action()

    def ended(self) -> None:
        """The thread has ended; in the reactor, once."""
        os.close(self._woken)
        if not self._given_up:
            os.close(self._wake)


class _Entry:
    """One call, and the Deferred that waits for it."""

    def __init__(
        self, work: Callable[[BlockingCall], Any], cancel: Callable[[_Entry], None]
    ) -> None:
        self.work = work
        self.call: BlockingCall | None = None
        self.deferred: Deferred[Any] = Deferred(lambda _: cancel(self))


class BlockingCalls:
    """Runs functions that may wait for ever. To be called from the reactor only."""

    def __init__(self, reactor: IReactorFromThreads, limit: int = LIMIT) -> None:
        self._reactor = reactor
        self._limit = limit
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
        """Fire with what the function returns; its first argument is the ``BlockingCall`` that it asks."""
        entry = _Entry(lambda call: function(call, *args, **kwargs), self._cancel)
        self._waiting.append(entry)
        self._start_next()
        return entry.deferred

    def stop(self) -> None:
        """Give up all calls: their Deferreds fail with CancelledError."""
        for entry in [*self._waiting, *self._threads]:
            entry.deferred.cancel()

    def _start_next(self) -> None:
        while self._waiting and len(self._threads) < self._limit:
            entry = self._waiting.popleft()
            try:
                self._start(entry)
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread
                if isinstance(error, RuntimeError):
                    error = OSError(errno.EAGAIN, f"it takes a thread, and {error}")
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
        """In a thread: make the call, and hand its result to the reactor."""
        try:
            result = entry.work(call)
        except BaseException:
            result = Failure()
        self._reactor.callFromThread(self._ended, entry, call, result)

    def _ended(self, entry: _Entry, call: BlockingCall, result: object) -> None:
        self._threads.discard(entry)
        call.ended()
        if not entry.deferred.called:
            entry.deferred.callback(result)  # a Failure goes the errbacks' way
        self._start_next()

    def _cancel(self, entry: _Entry) -> None:
        # The Deferred fails with CancelledError as soon as this returns.
        if entry.call is not None:
            entry.call.give_up()
        elif entry in self._waiting:
            self._waiting.remove(entry)
