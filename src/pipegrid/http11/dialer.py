"""Connecting to a host: second attempts, several addresses, and the time limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.interfaces import (
    IDelayedCall,
    IProtocol,
    IProtocolFactory,
    IReactorTime,
    IStreamClientEndpoint,
)
from twisted.internet.protocol import Factory
from twisted.python.failure import Failure

from pipegrid.http11.connection import PipelinedConnection
from pipegrid.http11.connection_limits import Limits
from pipegrid.http11.connection_loss import Loss, NoOwner, Owner, Unanswered

Endpoints = Callable[[], IStreamClientEndpoint]
"""A function that makes a new endpoint for each attempt."""

STAGGER_S = 0.25
"""Delay between attempts at different addresses, as recommended by RFC 8305."""

SECOND_AFTER = 0.25
"""
The fraction of the time limit after which the second attempt starts. With a limit of 15 s, the second attempt
starts after the third SYN, and has time for four more.
"""

LATE_S = 1.0
MOST_LATE = 4


class Alternatives:
    """
    Several ways to connect to one host, such as its addresses in different networks.

    Calling this object returns an endpoint of the way that worked last, for a connection without a race.

    Args:
        ways: at least one, in the order of preference.
        told: called with False when a connection is made, and with True when the connection is usable, TLS
            included. Both times, no request was sent on it yet.
    """

    def __init__(
        self, ways: Sequence[Endpoints], told: Callable[[bool], None] = lambda usable: None
    ) -> None:
        self._ways = list(ways)
        self._told = told

    def __call__(self) -> IStreamClientEndpoint:
        return self._ways[0]()

    @property
    def best_first(self) -> list[Endpoints]:
        """The ways in the order in which to try them: the one that worked last comes first."""
        return list(self._ways)

    def worked(self, way: Endpoints) -> None:
        """Record that this way led to a usable connection: the next attempt tries this way first."""
        self._ways.remove(way)
        self._ways.insert(0, way)
        self._told(True)

    def connected(self) -> None:
        """Report that a connection is made, but not usable yet."""
        self._told(False)


class Dialer:
    """
    Makes connections to one host.

    A connection attempt may hang although the host works: a packet was lost and the kernel repeats it after
    seconds, or the host has restarted and dropped the connection silently. So if the connection is not
    usable, TLS included, after ``SECOND_AFTER`` of the time limit, a second attempt starts. The first usable
    connection is used, and the other attempt aborted.

    Several addresses of one host (``Alternatives``) are tried as in RFC 8305: each one ``STAGGER_S`` after
    the previous one, or at once if the previous one has failed. The first usable connection is used, and its
    address is tried first from then on. So an address that does not respond costs at most ``STAGGER_S``.
    There are at most as many attempts as addresses, plus the second attempt.

    If the first attempt is lost between TCP and the end of the TLS handshake, the second attempt starts at
    once: the host may have closed the connection because it was overloaded, or because it received nothing
    for long, as from a suspended client. If the host refuses the connection, has another key or speaks no
    TLS, the attempt is not repeated.

    Time in which this process did not run (it was suspended, or the reactor was blocked) does not count: if
    the timer fires more than ``LATE_S`` late, the limit is extended by a quarter, at most ``MOST_LATE``
    times.

    Args:
        connect: returns the endpoint; called for each attempt, so that the endpoint can change. If this is an
            ``Alternatives``, all its ways are tried.
        server: the host's name for errors.
    """

    def __init__(
        self, clock: IReactorTime, limits: Limits, server: str, connect: Endpoints
    ) -> None:
        self.clock = clock
        self.limit_s = limits.connect_timeout_s
        self.ways = connect if isinstance(connect, Alternatives) else Alternatives([connect])
        # The dialer applies the time limit, so the limit of the connection itself must be longer.
        longer = attrs.evolve(limits, connect_timeout_s=(1 + MOST_LATE) * self.limit_s)
        self.new = lambda owner: PipelinedConnection(clock, longer, server, owner)
        self._leaving: set[PipelinedConnection] = set()

    def dial(self, owner: Owner[PipelinedConnection]) -> Deferred[PipelinedConnection]:
        """
        Connect; fires with a connection that is usable, TLS included.

        All errors come through the Deferred; cancelling the Deferred aborts the attempts.

        Args:
            owner: the owner of the connection once it is usable.
        """
        dialling = _Dialling(self, owner)
        dialling.begin()
        return dialling.made

    def when_gone(self) -> Deferred[None]:
        """Return a Deferred that fires when all dropped connections are closed."""
        leaving = [connection.when_lost() for connection in self._leaving]
        gone: Deferred[None] = DeferredList(leaving).addCallback(lambda _: None)
        return gone

    def drop(self, connection: PipelinedConnection, reason: str) -> None:
        """Abort a connection that has no owner. A connection without a transport needs no abort."""
        if connection.transport is not None:
            self._leaving.add(connection)
            connection.when_lost().addCallback(lambda _: self._leaving.discard(connection))
            connection.abort(reason)


class _Dialling:
    """
    One connection to be made, and the attempts to make it.

    Attributes:
        made: fires with the connection.
    """

    def __init__(self, dialer: Dialer, owner: Owner[PipelinedConnection]) -> None:
        self.made: Deferred[PipelinedConnection] = Deferred(lambda _: self._end("it was given up"))
        self._dialer = dialer
        self._owner = owner
        self._attempts: list[_Attempt] = []
        self._ways = dialer.ways.best_first
        self._untried = list(self._ways)
        self._next: IDelayedCall | None = None
        self._second: IDelayedCall | None = None
        self._last: IDelayedCall | None = None
        self._due_s = 0.0
        self._late = 0  # how often the timer has fired late

    def begin(self) -> None:
        """Start the first attempt, which may end before this method returns."""
        limit_s = self._dialer.limit_s
        self._second = self._dialer.clock.callLater(limit_s * SECOND_AFTER, self._try_again)
        self._wait(limit_s)
        self._try_next()

    def usable(self, attempt: _Attempt, connection: PipelinedConnection) -> None:
        """Use the connection of the first attempt that has succeeded, and give up the others."""
        self._attempts.remove(attempt)
        self._dialer.ways.worked(attempt.way)
        self._end("another one was usable first")
        connection.owner = self._owner
        self.made.callback(connection)

    def failed(self, attempt: _Attempt, failure: Failure, again: bool) -> None:
        """
        Record the failure of an attempt; try another one if possible, or fail if no attempt is running.

        Args:
            again: whether a second attempt may succeed.
        """
        self._attempts.remove(attempt)
        if self._untried:
            self._try_next()
            return
        if self._attempts:
            return
        if again and self._second is not None and self._second.active():
            self._second.reset(0)
            return
        self._end()
        self.made.errback(failure)

    def _try_next(self) -> None:
        """Try the next address now, and schedule the address after it for ``STAGGER_S`` later."""
        if self._next is not None and self._next.active():
            self._next.cancel()
        way = self._untried.pop(0)
        if self._untried:
            self._next = self._dialer.clock.callLater(STAGGER_S, self._try_next)
        self._try(way)

    def _try_again(self) -> None:
        # Prefer an address that is still being tried to an address that has failed.
        self._try(self._attempts[0].way if self._attempts else self._ways[0])

    def _try(self, way: Endpoints) -> None:
        attempt = _Attempt(self._dialer, self, way)
        self._attempts.append(attempt)
        attempt.begin()

    def _wait(self, delay_s: float) -> None:
        clock = self._dialer.clock
        self._due_s = clock.seconds() + delay_s
        self._last = clock.callLater(delay_s, self._time_is_over)

    def _time_is_over(self) -> None:
        limit_s = self._dialer.limit_s
        if self._dialer.clock.seconds() - self._due_s > LATE_S and self._late < MOST_LATE:
            self._late += 1
            self._wait(limit_s * SECOND_AFTER)
            return
        why = f"it was not usable after {limit_s:g} s"
        self._end(why)
        self.made.errback(ConnectionError(why))

    def _end(self, why: str = "") -> None:
        self._untried = []
        for call in (self._next, self._second, self._last):
            if call is not None and call.active():
                call.cancel()
        attempts, self._attempts = self._attempts, []
        for attempt in attempts:
            attempt.give_up(why)


class _Attempt(NoOwner):
    """One attempt; it owns the connection until the connection is usable."""

    def __init__(self, dialer: Dialer, dialling: _Dialling, way: Endpoints) -> None:
        self.way = way
        self._dialer = dialer
        self._dialling = dialling
        self._connecting: Deferred[Any] | None = None
        # An endpoint may build a second protocol if it did not connect the first.
        self._made: list[PipelinedConnection] = []
        self._connected = False  # whether the endpoint has fired
        self._over = False

    def begin(self) -> None:
        """Connect. The outcome is reported to ``dialling``, perhaps before this method returns."""
        try:
            self._connecting = self.way().connect(quiet(self._build))
        except Exception:
            self._failed(Failure())
            return
        self._connecting.addCallbacks(self._is_connected, self._failed)

    def give_up(self, why: str) -> None:
        """Abort the attempt without reporting an outcome."""
        self._over = True
        if self._connecting is not None:
            self._connecting.cancel()
        for connection in self._made:
            self._dialer.drop(connection, why)

    def has_space(self, connection: PipelinedConnection) -> None:
        """Report the connection, which is usable now (TLS included), once the endpoint has fired."""
        if self._over:
            self._dialer.drop(connection, "it was given up")
        elif self._connected:
            self._over = True
            self._made = []
            self._dialling.usable(self, connection)

    def lost(
        self, connection: PipelinedConnection, loss: Loss, _unanswered: list[Unanswered]
    ) -> None:
        """
        Report the loss of the connection before it was usable. Until the endpoint has fired, the endpoint
        itself reports the error.
        """
        if self._connected:
            why = loss.error or ConnectionError(loss.reason)
            self._failed(Failure(why), again=loss.cut)

    def _build(self) -> PipelinedConnection:
        self._made.append(self._dialer.new(self))
        return self._made[-1]

    def _is_connected(self, _: IProtocol) -> None:
        # The endpoint's result is not used: TLS and proxies wrap the connection.
        connection = self._made[-1]
        self._connected = True
        if not self._over:
            self._dialer.ways.connected()
        if not connection.open:
            self._failed(Failure(ConnectionError("it was closed at once")), again=True)
        elif connection.ready:
            self.has_space(connection)

    def _failed(self, failure: Failure, again: bool = False) -> None:
        if not self._over:
            self._over = True
            self._dialling.failed(self, failure, again)


def quiet(build: Callable[[], PipelinedConnection]) -> IProtocolFactory:
    """Return a factory that does not log each connection."""
    factory = Factory.forProtocol(build)
    factory.noisy = False
    return factory


def why_not(failure: Failure) -> BaseException:
    """Return why the attempt failed."""
    return failure.value or ConnectionError("no reason known")
