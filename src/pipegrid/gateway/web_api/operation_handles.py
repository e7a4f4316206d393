"""Operations that outlive the request that started them, by handles that clients choose."""

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

# **How long.** A running operation is kept. A result that was never fetched is kept for four days, or as long
# as the operation ran; after the first fetch, for one day. ``retain-for`` replaces both.
#
# **How much.** The number of operations, of running ones, and the memory of all results are bounded. For a
# new operation the oldest result is dropped; running ones are not, and the new one is refused.
#
# **Who.** A handle is all that a client needs to read a manifest, and so every cap in it. A long handle
# cannot be guessed. For short ones only a few unknown handles are answered in a minute: after that all short
# ones are refused.

DAY_S = 86_400.0
MAX_RETAIN_S = 30 * DAY_S
MAX_HANDLE_LENGTH = 1000
LONG_HANDLE = 20
"""The length from which a handle cannot be guessed: ``tahoe`` chooses 26 characters of 32 kinds."""

log = Logger()


class OperationRefused(WebError):
    """Too many operations run, or their results take too much memory."""


@attrs.frozen
class HandleLimits:
    """
    Limits of operations.

    Attributes:
        handles: kept, with the running ones.
        running: at a time.
        memory_bytes: of all results.
        wrong_per_minute: unknown handles that are answered.
    """

    handles: int = 1000
    running: int = 32
    memory_bytes: int = 64 << 20
    wrong_per_minute: int = 60


@attrs.define(eq=False)
class HeldOperation:
    """
    An operation that is kept.

    Attributes:
        started_s: by the clock.
        retain_s: as its client wishes; None: the default.
        asked: its result was fetched at least once.
    """

    handle: str
    operation: DeepOperation
    started_s: float
    retain_s: float | None = None
    asked: bool = False
    running: Deferred[None] | None = None
    forgetting: IDelayedCall | None = None


class OperationHandles:
    """The operations of a gateway by their handles."""

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
        """How many operations have not ended."""
        return sum(one.running is not None for one in self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    def start(self, handle: str, operation: DeepOperation, retain_s: float | None = None) -> None:
        """
        Begin an operation; one with the same handle is cancelled and dropped.

        Raises:
            UsageError: this cannot be a handle.
            OperationRefused: too many are running.
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
            WebError: there is none, or it was dropped; or it is short, and too many unknown ones were
                requested.
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
        """The state of an operation was sent to a client, which wishes this."""
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
        """Cancel an operation, and drop its handle."""
        held = self._held.get(handle)
        if held is not None:
            self._forget(held)

    def close(self) -> None:
        """Cancel running operations, and drop the results of the others."""
        for held in list(self._held.values()):
            self._forget(held)

    # Limits.

    def _wrong_now(self) -> float:
        now_s = self._clock.seconds()
        passed_s, self._wrong_s = max(0.0, now_s - self._wrong_s), now_s
        self._wrong = max(0.0, self._wrong - passed_s * self._limits.wrong_per_minute / 60)
        return self._wrong

    def _forget_oldest(self) -> bool:
        """Drop the oldest ended operation; returns whether there was one."""
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
        """Drop it when its time is over, counted from now."""
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
    Check a handle.

    Raises:
        UsageError: no operation can have this handle.
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
