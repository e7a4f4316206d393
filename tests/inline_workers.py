"""CPU workers without threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from twisted.internet import defer
from twisted.internet.defer import Deferred

from pipegrid.errors import UsageError
from pipegrid.reactor.blocking_calls import BlockingCall

P = ParamSpec("P")
T = TypeVar("T")


class InlineWorkers:
    """Runs every job at once, where it is called."""

    def __init__(self) -> None:
        self._stopped = False

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """
        Run the function now.

        Raises:
            UsageError: stopped.
        """
        if self._stopped:
            raise UsageError("these workers have been stopped; make new ones")
        return defer.execute(function, *args, **kwargs)

    def run_if_large(
        self, size_bytes: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Deferred[T]:
        """Run the function now, whatever the size."""
        return defer.execute(function, *args, **kwargs)

    def run_blocking(
        self,
        function: Callable[Concatenate[BlockingCall, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Deferred[T]:
        """Run the function now; it had better not wait."""
        call = BlockingCall()
        try:
            return defer.execute(function, call, *args, **kwargs)
        finally:
            call.ended()

    def stop(self) -> Deferred[None]:
        """Take no more jobs."""
        self._stopped = True
        return defer.succeed(None)
