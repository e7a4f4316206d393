"""
Making one connection to a host: the one routine of all who own connections.

A connection may hang for no fault of the host: a packet was lost, and the kernel sends the next one after
seconds; the host has restarted, or dropped it, and nobody says so. So when a quarter of the time is over
(``SECOND_AFTER``) and it is not usable yet, TLS included, a second attempt is made beside the first. Which of
them is usable first is taken, and the other one cut.

**Several addresses of one host** (``Alternatives``) are tried as RFC 8305 has it: the next is dialled
``STAGGER_S`` after the one before, or at once when one has failed, and the first connection that is usable
wins; its address is tried first from then on. An address that refuses, swallows packets or belongs to another
machine costs ``STAGGER_S`` at most. There are never more attempts than addresses, and the second one.

What is lost between TCP and the end of TLS's handshake is dialled again at once, if it was the first: a
crowded host may have cut it, or one that heard nothing for long, as of a client that was suspended. Whoever
refuses the connection, has another key or speaks no TLS has said what there is to say; others can be asked.

**Time in which this process did not run** is nobody's fault: it was suspended, or something else blocked the
reactor. Whoever is late by more than ``LATE_S`` to say that the time is over has not listened meanwhile, so
there is a quarter more; that ``MOST_LATE`` times at most.
"""

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
from pipegrid.http11.connection_loss import Loss, NoOwner, Owner, Unanswered
from pipegrid.http11.limits import Limits

Endpoints = Callable[[], IStreamClientEndpoint]
"""Makes what a connection is dialled with, anew for each."""

STAGGER_S = 0.25
"""Between attempts at different addresses; the delay that RFC 8305 recommends."""

SECOND_AFTER = 0.25
"""Of the time that there is. At 15 s that is behind the third SYN, and leaves time for four more."""

LATE_S = 1.0
MOST_LATE = 4


class Alternatives:
    """
    Several ways to one host, such as its addresses in different networks.

    What is made for one connection only, without a race, goes the best way: the one that has worked last.

    Args:
        ways: one at least, in the order of preference.
        told: called when a connection is made (False), and when it is usable, over TLS too (True);
            nothing was sent before.
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
        """The ways, in the order in which they should be tried now."""
        return list(self._ways)

    def worked(self, way: Endpoints) -> None:
        """A connection was usable that went this way: the next will try it first."""
        self._ways.remove(way)
        self._ways.insert(0, way)
        self._told(True)

    def connected(self) -> None:
        """A connection is made, and not usable yet."""
        self._told(False)


class Dialer:
    """
    Makes connections to one host.

    Args:
        connect: returns the endpoint; asked anew for each connection, so that it may change. Of
            ``Alternatives`` all are tried.
        server: what errors call it.
    """

    def __init__(
        self, clock: IReactorTime, limits: Limits, server: str, connect: Endpoints
    ) -> None:
        self.clock = clock
        self.limit_s = limits.connect_timeout_s
        self.ways = connect if isinstance(connect, Alternatives) else Alternatives([connect])
        # How long it may take is counted here; what a connection counts itself is to be more.
        patient = attrs.evolve(limits, connect_timeout_s=(1 + MOST_LATE) * self.limit_s)
        self.new = lambda owner: PipelinedConnection(clock, patient, server, owner)
        self._leaving: set[PipelinedConnection] = set()

    def dial(self, owner: Owner[PipelinedConnection]) -> Deferred[PipelinedConnection]:
        """
        Connect; fires with a connection that is usable, over TLS too.

        Whatever goes wrong, by exception or too slowly, comes through the Deferred; cancelling it gives up.

        Args:
            owner: of the connection, from then on.
        """
        dialling = _Dialling(self, owner)
        dialling.begin()
        return dialling.made

    def when_gone(self) -> Deferred[None]:
        """Fires when nothing is left of the attempts that were given up."""
        leaving = [connection.when_lost() for connection in self._leaving]
        gone: Deferred[None] = DeferredList(leaving).addCallback(lambda _: None)
        return gone

    def drop(self, connection: PipelinedConnection, reason: str) -> None:
        """End a connection that nobody owns; one without a transport has nothing to end."""
        if connection.transport is not None:
            self._leaving.add(connection)
            connection.when_lost().addCallback(lambda _: self._leaving.discard(connection))
            connection.abort(reason)


class _Dialling:
    """
    One connection that is wanted, and the attempts to make it.

    Attributes:
        made: fires with it.
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
        self._late = 0  # how often that was found out late

    def begin(self) -> None:
        """Make the first attempt, which may end before this returns."""
        limit_s = self._dialer.limit_s
        self._second = self._dialer.clock.callLater(limit_s * SECOND_AFTER, self._try_again)
        self._wait(limit_s)
        self._try_next()

    def usable(self, attempt: _Attempt, connection: PipelinedConnection) -> None:
        """An attempt has succeeded: the first one to do so."""
        self._attempts.remove(attempt)
        self._dialer.ways.worked(attempt.way)
        self._end("another one was usable first")
        connection.owner = self._owner
        self.made.callback(connection)

    def failed(self, attempt: _Attempt, failure: Failure, again: bool) -> None:
        """
        An attempt has failed; another one may do better, if one is under way.

        Args:
            again: if not, one had better be made.
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
        """Try the next address, and after a while the one after that."""
        if self._next is not None and self._next.active():
            self._next.cancel()
        way = self._untried.pop(0)
        if self._untried:
            self._next = self._dialer.clock.callLater(STAGGER_S, self._try_next)
        self._try(way)

    def _try_again(self) -> None:
        # Where one is still being tried, another that has failed already would fail again.
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
    """One attempt: it owns the connection until that is usable."""

    def __init__(self, dialer: Dialer, dialling: _Dialling, way: Endpoints) -> None:
        self.way = way
        self._dialer = dialer
        self._dialling = dialling
        self._connecting: Deferred[Any] | None = None
        # An endpoint may want a second one, when the first did not get as far as a connection.
        self._made: list[PipelinedConnection] = []
        self._connected = False  # as the endpoint has it
        self._over = False

    def begin(self) -> None:
        """Connect; whoever dials is told what becomes of it, perhaps before this returns."""
        try:
            self._connecting = self.way().connect(quiet(self._build))
        except Exception:
            self._failed(Failure())
            return
        self._connecting.addCallbacks(self._is_connected, self._failed)

    def give_up(self, why: str) -> None:
        """Leave nothing behind; nobody is told."""
        self._over = True
        if self._connecting is not None:
            self._connecting.cancel()
        for connection in self._made:
            self._dialer.drop(connection, why)

    def has_room(self, connection: PipelinedConnection) -> None:
        """It is usable, TLS included; the endpoint may still have to say that it is connected."""
        if self._over:
            self._dialer.drop(connection, "it was given up")
        elif self._connected:
            self._over = True
            self._made = []
            self._dialling.usable(self, connection)

    def lost(
        self, connection: PipelinedConnection, loss: Loss, _unanswered: list[Unanswered]
    ) -> None:
        """It ended before it was usable; of another one than the last the endpoint knows."""
        if self._connected:
            why = loss.error or ConnectionError(loss.reason)
            self._failed(Failure(why), again=loss.cut)

    def _build(self) -> PipelinedConnection:
        self._made.append(self._dialer.new(self))
        return self._made[-1]

    def _is_connected(self, _: IProtocol) -> None:
        # Not what the endpoint fires with: TLS and proxies wrap it.
        connection = self._made[-1]
        self._connected = True
        if not self._over:
            self._dialer.ways.connected()
        if not connection.open:
            self._failed(Failure(ConnectionError("it was closed at once")), again=True)
        elif connection.ready:
            self.has_room(connection)

    def _failed(self, failure: Failure, again: bool = False) -> None:
        if not self._over:
            self._over = True
            self._dialling.failed(self, failure, again)


def quiet(build: Callable[[], PipelinedConnection]) -> IProtocolFactory:
    """Return what makes connections so without a line in the program's log for each."""
    factory = Factory.forProtocol(build)
    factory.noisy = False
    return factory


def why_not(failure: Failure) -> BaseException:
    """Return why there is no connection."""
    return failure.value or ConnectionError("no reason known")
