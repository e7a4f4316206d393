"""
Divides the reactor's time among connections: connections that need little time are served at once, the others
in turns.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

from twisted.internet.interfaces import IReactorTime

from pipegrid.reactor.deferreds import Timer

SLICE_S = 0.0005
ALONE_S = 0.02
"""The slice if no other connection has worked or sent a request for ``ACTIVE_S``."""
ACTIVE_S = 0.05
"""
How long another connection counts as active after it worked or sent a request. A client reads and writes over
different connections: with 0.25 s the client's own earlier reads limited its puts to slices of half a
millisecond, and a hundred small files took a third of a round trip longer.
"""
GAP_S = 0.0002
"""A pause of this length between two pieces of work means that a new turn of the reactor has begun."""

BURST_S = 0.02
SHARE = 0.01


class CpuUsage:
    """
    How much time the server has recently spent on one connection. The amount decreases by ``SHARE`` of the
    time that passes.
    """

    def __init__(self, now_s: float) -> None:
        self._spent_s = 0.0
        self._at_s = now_s

    def spend(self, work_s: float, now_s: float) -> None:
        """Add ``work_s`` seconds of work that ended at ``now_s``."""
        paid_back_s = max(0.0, now_s - self._at_s) * SHARE
        self._spent_s = max(0.0, self._spent_s - paid_back_s) + work_s
        self._at_s = now_s

    def is_heavy(self, now_s: float) -> bool:
        """Return whether the connection has used so much time that it must wait in the queue."""
        self.spend(0.0, now_s)
        return self._spent_s > BURST_S


class QueuedConnection(Protocol):
    """
    A member of a ``FairQueue``.

    Attributes:
        place: the address of the client; connections of one address share one priority.
    """

    place: str


class ServedConnection(QueuedConnection, Protocol):
    """
    A connection that takes turns.

    Attributes:
        spending: the time that the server has spent on the connection.
    """

    spending: CpuUsage

    def take_turn(self) -> None:
        """Do as much work as possible before the turn is over."""


W = TypeVar("W", bound=QueuedConnection)
M = TypeVar("M", bound=ServedConnection)


class FairQueue(Generic[W]):
    """
    A queue that serves first the address with the fewest waiting members, and the members of one address in
    order of arrival.
    """

    def __init__(self) -> None:
        self._places: dict[str, deque[W]] = {}  # the address served most recently is last

    def __bool__(self) -> bool:
        return bool(self._places)

    def join(self, member: W) -> None:
        """Add a member after the waiting members of its address."""
        self._places.setdefault(member.place, deque()).append(member)

    def leave(self, member: W) -> None:
        """Remove a member from the queue, if the queue contains it."""
        waiting = self._places.get(member.place)
        if waiting is not None and member in waiting:
            waiting.remove(member)
            if not waiting:
                del self._places[member.place]

    def next(self) -> W:
        """Remove and return the member that is next; the queue must not be empty."""
        place = min(self._places, key=lambda place: len(self._places[place]))
        waiting = self._places.pop(place)
        member = waiting.popleft()
        if waiting:
            self._places[place] = waiting  # after addresses with equally many waiting
        return member


class FairTurns(Generic[M]):
    """
    Gives connections their turns; used only in the reactor's thread.

    An honest request takes half a dozen turns of the reactor: for TLS, its body, and two waits for the disk.
    In each turn, the request waits for all other work. Without limits, a client with large requests made
    turns of 3 ms (leases) to 180 ms (a bundle), and delayed other clients by several turns of that length.

    In one turn of the reactor, no connection works longer than a slice. If it has more to do, it waits in a
    queue, which gets one slice per turn. New requests are served at once if the server has recently worked
    for their connection no longer than ``BURST_S`` (plus ``SHARE`` of all time). Such requests together also
    get one slice per turn; further ones wait in the queue. The queue serves first the address with the fewest
    waiting connections, and connections of one address in order of arrival. So a small request waits for one
    slice of all other work, and a request of one of many connections waits in proportion to their number. The
    server is never idle while a request waits, unlike with ``foolscap.broker.Governor``.

    A slice is half a millisecond, ten times the cost of a turn of the reactor. While no other connection has
    been active recently, a slice is twenty milliseconds, so that requests pipelined by one client become
    durable together. The time of work is measured. Work that cannot be interrupted may exceed a slice; if it
    takes much longer, it is divided into steps (``gbs.body_receivers.InSteps``).

    Args:
        clock: measures the work, and calls the turns.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._queue: FairQueue[M] = FairQueue()
        self._call = Timer(clock, self._next)
        # The connection that works now, or the last one that worked.
        self._last: M | None = None
        self._began_s = self._ended_s = float(
            "-inf"
        )  # the start of the current slice, and the end of the last work
        self._work_s = float("-inf")  # the start of the connection's own work
        self._run_s = float("-inf")  # the start of uninterrupted work of all connections
        self._slice_s = ALONE_S
        # The last time when another connection than ``_last`` worked, or sent a request.
        self._others_s = float("-inf")
        self._in_line = False  # whether the queue is being served

    def __repr__(self) -> str:
        return f"<FairTurns, {'some' if self._queue else 'none'} waiting>"

    @property
    def over(self) -> bool:
        """Whether the working connection must stop, so that other connections get their turns."""
        return self._clock.seconds() - self._began_s > self._slice_s

    def start(self) -> float:
        """Record that a connection begins its work, or asks for a turn; returns the time."""
        self._work_s = now_s = self._clock.seconds()
        if self._in_line:
            self._began_s = self._run_s  # all members of the queue share one slice
        else:
            self._began_s = now_s
            if now_s - self._ended_s > GAP_S:
                self._run_s = now_s
        return now_s

    def asked(self) -> None:
        """Record input of a client that has not shown the secret."""
        self._others_s = self._clock.seconds()

    def may_have(self, member: M) -> bool:
        """
        Return whether a member may work now; called after ``start``. If not, the member must call ``wait``.
        """
        now_s = self._began_s
        heavy = member.spending.is_heavy(now_s)
        if heavy and self._queue:
            return False
        others = self._last is not member
        self._choose_slice(member, now_s)
        if heavy and others and self._run_s < now_s:
            if now_s - self._run_s > self._slice_s:
                return False
            self._began_s = self._run_s
        return True

    def wait(self, member: M) -> None:
        """Put a member in the queue, which calls ``take_turn`` when it is the member's turn."""
        self._queue.join(member)
        if not self._in_line:
            self._call.set(0)

    def leave(self, member: M) -> None:
        """Remove a member that wants no more turns, even if it is not waiting."""
        self._queue.leave(member)
        if not self._queue:
            self._call.stop()
        if self._last is member:
            self._last = None

    def end(self, member: M) -> None:
        """Record the end of a member's work that began with ``start``."""
        self._ended_s = now_s = self._clock.seconds()
        member.spending.spend(now_s - self._work_s, now_s)

    def _choose_slice(self, member: M, now_s: float) -> None:
        if self._last is not member:
            # ``_last`` worked until ``_ended_s`` and is another connection, so others count as active.
            self._others_s = max(self._others_s, self._ended_s)
            self._last = member
        self._slice_s = SLICE_S if now_s - self._others_s < ACTIVE_S else ALONE_S

    def _next(self) -> None:
        self._run_s = now_s = self._clock.seconds()
        self._in_line = True
        try:
            while self._queue and now_s - self._run_s <= self._slice_s:
                member = self._queue.next()
                self._choose_slice(member, now_s)
                member.take_turn()
                now_s = self._clock.seconds()
        finally:
            self._in_line = False
            if self._queue:
                self._call.set(0)
