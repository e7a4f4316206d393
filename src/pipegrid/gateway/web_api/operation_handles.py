"""Operations that outlive the request that started them, by the handle that their client has chosen."""

from __future__ import annotations

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from pipegrid.errors import PipegridError, UsageError
from pipegrid.gateway.web_api.deep_operations import DeepOperation
from pipegrid.reactor.deferreds import start_cancellable
from pipegrid.tree.public_grid import Grid

# **How long.** A running operation is kept. What has ended and was never asked for is kept for four days, or
# as long as it ran; after the first answer, a day more. ``retain-for`` replaces both.
#
# **How much.** The number of operations, of those that run, and what all results hold are bounded. What has
# ended gives way, the oldest first, to what is new; what runs does not, and the new one is refused.
#
# **Who.** A handle is all that a client needs to read a manifest, and so every cap in it. A long one cannot
# be guessed. For short ones only a few wrong handles are answered in a minute: then all short ones wait.

DAY_S = 86_400.0
MAX_RETAIN_S = 30 * DAY_S
MAX_HANDLE_LENGTH = 1000
LONG_HANDLE = 20
"""Characters from which on a handle is not guessed: ``tahoe`` chooses 26 of 32 kinds."""

log = Logger()


class UnknownHandle(UsageError):
    """There is no operation of this handle, or it is not kept any more."""


class TooManyGuesses(PipegridError):
    """Many unknown handles were asked for; short ones are not answered for a while."""


class OperationRefused(PipegridError):
    """As many operations run as may, or their results take too much memory."""


@attrs.frozen
class HandleLimits:
    """
    What operations may take.

    Attributes:
        handles: kept, those that run included.
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
        retain_s: as its client wishes; None: as usual.
        asked: its result was given, once at least.
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
        Begin an operation; one that has the same handle is cancelled and forgotten.

        Raises:
            UsageError: it is no handle.
            OperationRefused: too many run already.
        """
        check_handle(handle)
        before = self._held.get(handle)
        if before is not None:
            self._forget(before)
        if self.running >= self._limits.running:
            raise OperationRefused(
                f"{self._limits.running} operations run already, as many as may; try again when one has ended"
            )
        self._make_space()
        held = HeldOperation(handle, operation, self._clock.seconds(), _bounded(retain_s))
        self._held[handle] = held

        def hold(more_bytes: int) -> None:
            self._hold(held, more_bytes)

        held.running = start_cancellable(operation.run(self._grid, hold), self._clock)
        held.running.addBoth(self._ended, held)

    def find(self, handle: str) -> DeepOperation:
        """
        Return the operation of a handle.

        Raises:
            UnknownHandle: there is none.
            TooManyGuesses: it is short, and many unknown ones were asked for.
        """
        short = len(handle) < LONG_HANDLE
        if short and self._wrong_now() >= self._limits.wrong_per_minute:
            raise TooManyGuesses(
                "many unknown operation handles were asked for; try again in a minute, and choose handles of "
                f"at least {LONG_HANDLE} random characters"
            )
        held = self._held.get(handle)
        if held is None:
            self._wrong = self._wrong_now() + 1
            raise UnknownHandle("there is no operation with this handle; start it again")
        return held.operation

    def answered(
        self, handle: str, *, retain_s: float | None = None, release: bool = False
    ) -> None:
        """The state of an operation was given to a client, with these wishes of it."""
        held = self._held.get(handle)
        if held is None:
            return
        if retain_s is not None:
            held.retain_s = _bounded(retain_s)
        if held.operation.finished:
            if release:
                self._forget(held)
                return
            held.asked = True
            self._keep(held)

    def cancel(self, handle: str) -> None:
        """End an operation, and forget its handle."""
        held = self._held.get(handle)
        if held is not None:
            self._forget(held)

    def close(self) -> None:
        """Cancel the operations that run, and forget the results of the others."""
        for held in list(self._held.values()):
            self._forget(held)

    # Bounds.

    def _wrong_now(self) -> float:
        now_s = self._clock.seconds()
        passed_s, self._wrong_s = max(0.0, now_s - self._wrong_s), now_s
        self._wrong = max(0.0, self._wrong - passed_s * self._limits.wrong_per_minute / 60)
        return self._wrong

    def _make_space(self) -> None:
        while len(self._held) >= self._limits.handles and self._forget_oldest():
            pass

    def _forget_oldest(self) -> bool:
        """Forget the oldest operation that has ended; returns whether there was one."""
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
                "the results of all operations take more memory than they may; read this one as a stream "
                "(t=stream-manifest, t=stream-deep-check), or in parts"
            )

    # The life of one.

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
            failed = DeepOperation(operation.root)
            failed.finished, failed.error = True, result.value
            held.operation = failed
        if self._held.get(held.handle) is held:
            self._keep(held)

    def _keep(self, held: HeldOperation) -> None:
        """Forget it when its time is over, counted from now."""
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
    Raises:
        UsageError: no operation can have this handle.
    """
    if not handle or len(handle) > MAX_HANDLE_LENGTH or "/" in handle:
        raise UsageError(
            "an operation that takes long needs ophandle=, the handle that it is asked for by: up to "
            f"{MAX_HANDLE_LENGTH} characters without a slash"
        )


def _bounded(retain_s: float | None) -> float | None:
    return None if retain_s is None else min(max(0.0, retain_s), MAX_RETAIN_S)


def _stop(timer: IDelayedCall | None) -> None:
    if timer is not None and timer.active():
        timer.cancel()
