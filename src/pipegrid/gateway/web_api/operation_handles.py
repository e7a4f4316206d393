"""Operations that continue after the request that started them; clients name each by a handle."""

from __future__ import annotations

from functools import partial

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from pipegrid.errors import PipegridError, UsageError
from pipegrid.gateway.http_response import WebError
from pipegrid.gateway.web_api.deep_operations import DeepOperation
from pipegrid.reactor.deferreds import start_cancellable
from pipegrid.tree.tree_grid import Grid

# **How long.** A running operation is kept. A result that was never fetched is kept for four days or, if that
# is longer, as long as the operation ran; after a fetch, for one day from then. The argument ``retain-for``
# replaces these times.
#
# **How much.** The number of operations, of running operations, and the memory of all results are limited. To
# make space, the oldest results are dropped. Running operations are never dropped; if there are too many, a
# new one is refused. An operation fails if its result has no space although all others were dropped.
#
# **Who.** A client that knows a handle can read the manifest, and so every cap in it. A long handle cannot be
# guessed, but a short one can. So after ``wrong_per_minute`` unknown handles in a minute, requests with short
# handles are refused.

DAY_S = 86_400.0
MAX_RETAIN_S = 30 * DAY_S
MAX_HANDLE_LENGTH = 1000
LONG_HANDLE = 20
"""Number of characters from which a handle cannot be guessed; ``tahoe`` chooses 26 from an alphabet of 32."""

log = Logger()


class OperationRefused(WebError):
    """Too many operations are running, or their results need too much memory."""


@attrs.frozen
class HandleLimits:
    """
    Limits of operations.

    Attributes:
        handles: maximum number of operations that are kept, including running ones.
        running: maximum number of running operations.
        memory_bytes: maximum memory of all results together.
        wrong_per_minute: number of unknown handles per minute after which short handles are refused.
    """

    handles: int = 1000
    running: int = 32
    memory_bytes: int = 64 << 20
    wrong_per_minute: int = 60


@attrs.define(eq=False)
class HeldOperation:
    """
    An operation that is kept, under its handle.

    Attributes:
        started_s: time of the start, by the clock.
        retain_s: how long the client wants the result kept; None: the default.
        asked: whether the result was fetched at least once.
    """

    handle: str
    operation: DeepOperation
    started_s: float
    retain_s: float | None = None
    asked: bool = False
    running: Deferred[None] | None = None
    forgetting: IDelayedCall | None = None


class OperationHandles:
    """The operations of a gateway, by handle."""

    def __init__(self, grid: Grid, clock: IReactorTime, limits: HandleLimits | None = None) -> None:
        self._grid = grid
        self._clock = clock
        self._limits = limits or HandleLimits()
        self._held: dict[str, HeldOperation] = {}  # the oldest first
        self._memory_bytes = 0
        self._wrong = 0.0
        self._wrong_s = clock.seconds()

    @property
    def running(self) -> int:
        """The number of operations that are running."""
        return sum(one.running is not None for one in self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    def start(self, handle: str, operation: DeepOperation, retain_s: float | None = None) -> None:
        """
        Start an operation; an existing one with the same handle is cancelled and dropped.

        Raises:
            UsageError: the handle is not valid.
            OperationRefused: too many operations are running.
        """
        check_handle(handle)
        self.cancel(handle)
        if self.running >= self._limits.running:
            raise OperationRefused(
                503,
                f"{self._limits.running} operations are running, which is the limit; try again "
                "when one has ended",
            )
        while len(self._held) >= self._limits.handles and self._forget_oldest():
            pass
        held = HeldOperation(handle, operation, self._clock.seconds(), _bounded(retain_s))
        self._held[handle] = held
        work = operation.run(self._grid, partial(self._hold, held))
        held.running = start_cancellable(work, self._clock)
        held.running.addBoth(self._ended, held)

    def find(self, handle: str) -> DeepOperation:
        """
        Return the operation of a handle.

        Raises:
            WebError: there is no such operation, or it was dropped; or the handle is short, and too many
                unknown handles were requested.
        """
        short = len(handle) < LONG_HANDLE
        if short and self._wrong_now() >= self._limits.wrong_per_minute:
            raise WebError(
                429,
                "too many unknown operation handles were requested; try again in a minute, with "
                f"handles of at least {LONG_HANDLE} random characters",
                {"Retry-After": "60"},
            )
        held = self._held.get(handle)
        if held is None:
            self._wrong = self._wrong_now() + 1
            raise WebError(404, "there is no operation with this handle; start it again")
        return held.operation

    def answered(
        self, handle: str, *, retain_s: float | None = None, release: bool = False
    ) -> None:
        """
        Note that the state was sent to a client. If the operation has ended, its result is dropped if
        ``release`` is true, else kept for ``retain_s``, or for a day by default.
        """
        held = self._held.get(handle)
        if held is None:
            return
        if retain_s is not None:
            held.retain_s = _bounded(retain_s)
        if held.operation.finished and release:
            self._forget(held)
        elif held.operation.finished:
            held.asked = True
            self._keep(held)

    def cancel(self, handle: str) -> None:
        """Cancel the operation of a handle, and drop it."""
        held = self._held.get(handle)
        if held is not None:
            self._forget(held)

    def close(self) -> None:
        """Cancel running operations, and drop the results of ended ones."""
        for held in list(self._held.values()):
            self._forget(held)

    # Limits.

    def _wrong_now(self) -> float:
        now_s = self._clock.seconds()
        passed_s, self._wrong_s = max(0.0, now_s - self._wrong_s), now_s
        self._wrong = max(0.0, self._wrong - passed_s * self._limits.wrong_per_minute / 60)
        return self._wrong

    def _forget_oldest(self) -> bool:
        """Drop the oldest ended operation; return whether there was one."""
        for held in self._held.values():
            if held.running is None and held.operation.finished:
                self._forget(held)
                return True
        return False

    def _hold(self, held: HeldOperation, more_bytes: int) -> None:
        held.operation.memory_bytes += more_bytes
        self._memory_bytes += more_bytes
        while self._memory_bytes > self._limits.memory_bytes and self._forget_oldest():
            pass
        if self._memory_bytes > self._limits.memory_bytes:
            raise OperationRefused(
                500,
                "the results of all operations take too much memory; read this one as a stream "
                "(t=stream-manifest, t=stream-deep-check), or in parts",
            )

    # One operation.

    def _ended(self, result: Failure | None, held: HeldOperation) -> None:
        held.running = None
        operation = held.operation
        operation.finished = True
        if isinstance(result, Failure):
            if result.check(CancelledError):
                return
            assert isinstance(result.value, Exception)
            if not isinstance(result.value, PipegridError):
                log.failure("an operation failed", result)
            result.cleanFailure()
            self._memory_bytes -= operation.memory_bytes
            failed = DeepOperation(operation.root, operation.todo)
            failed.finished, failed.error = True, result.value
            held.operation = failed
        if self._held.get(held.handle) is held:
            self._keep(held)

    def _keep(self, held: HeldOperation) -> None:
        """Drop an ended operation when its retention time, counted from now, is over."""
        if held.retain_s is not None:
            keep_s = held.retain_s
        elif held.asked:
            keep_s = DAY_S
        else:
            keep_s = max(4 * DAY_S, self._clock.seconds() - held.started_s)
        _stop(held.forgetting)
        held.forgetting = self._clock.callLater(keep_s, self._forget, held)

    def _forget(self, held: HeldOperation) -> None:
        if self._held.get(held.handle) is held:
            del self._held[held.handle]
            self._memory_bytes -= held.operation.memory_bytes
            held.operation.memory_bytes = 0
        _stop(held.forgetting)
        if held.running is not None:
            held.running.cancel()


def check_handle(handle: str) -> None:
    """
    Check that a text can be a handle.

    Raises:
        UsageError: it is empty, too long, or contains a slash.
    """
    if not handle or len(handle) > MAX_HANDLE_LENGTH or "/" in handle:
        raise UsageError(
            "a long operation needs the argument ophandle, a handle for later requests: up to "
            f"{MAX_HANDLE_LENGTH} characters without a slash"
        )


def _bounded(retain_s: float | None) -> float | None:
    return None if retain_s is None else min(max(0.0, retain_s), MAX_RETAIN_S)


def _stop(timer: IDelayedCall | None) -> None:
    if timer is not None and timer.active():
        timer.cancel()
