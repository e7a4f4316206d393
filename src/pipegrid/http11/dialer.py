"""Making one connection to a host: the one routine of all who own connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred, fail
from twisted.internet.interfaces import (
    IProtocol,
    IProtocolFactory,
    IReactorTime,
    IStreamClientEndpoint,
)
from twisted.internet.protocol import Factory
from twisted.python.failure import Failure

from pipegrid.http11.connection import PipelinedConnection
from pipegrid.http11.limits import Limits
from pipegrid.http11.loss import Owner

Endpoints = Callable[[], IStreamClientEndpoint]
"""Makes what a connection is dialled with, anew for each."""


class Dialer:
    """
    Makes connections to one host.

    Args:
        connect: returns the endpoint; asked anew for each connection, so that it may change.
        server: what errors call it.
    """

    def __init__(
        self, clock: IReactorTime, limits: Limits, server: str, connect: Endpoints
    ) -> None:
        self._clock = clock
        self._limits = limits
        self._server = server
        self._connect = connect

    def dial(self, owner: Owner[PipelinedConnection]) -> Deferred[PipelinedConnection]:
        """
        Connect; fires with a connection that takes requests, over TLS perhaps before it is ready.

        Whatever goes wrong, by exception or too slowly, comes through the Deferred; cancelling it gives up.
        """
        made: list[PipelinedConnection] = []

        def build() -> PipelinedConnection:
            made.append(PipelinedConnection(self._clock, self._limits, self._server, owner))
            return made[-1]

        def connected(_: IProtocol) -> PipelinedConnection:
            # Not what the endpoint fires with: TLS and proxies wrap it.
            if not made[-1].open:
                raise ConnectionError("it was closed at once")
            return made[-1]

        try:
            attempt = self._connect().connect(quiet(build))
        except Exception as error:
            return fail(error)
        attempt.addTimeout(self._limits.connect_timeout_s, self._clock, _too_late)
        return attempt.addCallback(connected)


def _too_late(result: Any, timeout_s: float) -> Any:
    """Say how an attempt ended that was given up; what it says itself is how, and not why."""
    if isinstance(result, Failure):
        raise ConnectionError(f"it was not usable after {timeout_s:g} s")
    return result


def quiet(build: Callable[[], PipelinedConnection]) -> IProtocolFactory:
    """Return what makes connections so without a line in the program's log for each."""
    factory = Factory.forProtocol(build)
    factory.noisy = False
    return factory


def why_not(failure: Failure) -> BaseException:
    """Return why there is no connection."""
    return failure.value or ConnectionError("no reason known")
