"""
Divides the reactor's time among connections: requests that need little are served at once, others in turns.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

from twisted.internet.interfaces import IReactorTime

from pipegrid.reactor.deferreds import Timer

SLICE_S = 0.0005
ALONE_S = 0.02
"""The slice while no other connection has sent a request for ``ACTIVE_S``."""
ACTIVE_S = 0.05
"""
A client reads and writes over different connections: with 0.25 s its own earlier reads cut its puts into
slices of half a millisecond, and a hundred small files took a third of a round trip longer.
"""
GAP_S = 0.0002
"""A pause this long means that the reactor has had a turn in between."""

BURST_S = 0.02
SHARE = 0.01


class CpuUsage:
    """How much time the server has spent on one connection lately."""

    def __init__(self, now_s: float) -> None:
        self._spent_s = 0.0
        self._at_s = now_s

    def spend(self, work_s: float, now_s: float) -> None:
        """Add ``work_s`` seconds of work that ended at ``now_s``."""
        paid_back_s = max(0.0, now_s - self._at_s) * SHARE
        self._spent_s = max(0.0, self._spent_s - paid_back_s) + work_s
        self._at_s = now_s

    def is_heavy(self, now_s: float) -> bool:
        """Return whether it has to wait in the queue."""
        self.spend(0.0, now_s)
        return self._spent_s > BURST_S


class QueuedConnection(Protocol):
    """
    What a ``FairQueue`` contains.

    Attributes:
        place: its address; connections of one address share its priority.
    """

    place: str


class ServedConnection(QueuedConnection, Protocol):
    """
    A connection that takes turns.

    Attributes:
        spending: the time spent on it.
    """

    spending: CpuUsage

    def take_turn(self) -> None:
        """Do as much as possible before the turn is over."""


W = TypeVar("W", bound=QueuedConnection)
M = TypeVar("M", bound=ServedConnection)


class FairQueue(Generic[W]):
    """
    A queue that serves first the address with the fewest waiting, and each address in order of arrival.
    """

    def __init__(self) -> None:
        self._places: dict[str, deque[W]] = {}  # the most recently served last

    def __bool__(self) -> bool:
        return bool(self._places)

    def join(self, member: W) -> None:
        """Wait, after the others of its address."""
        self._places.setdefault(member.place, deque()).append(member)

    def leave(self, member: W) -> None:
        """Remove a member from the queue, if it is in it."""
        waiting = self._places.get(member.place)
        if waiting is not None and member in waiting:
            waiting.remove(member)
            if not waiting:
                del self._places[member.place]

    def next(self) -> W:
        """Remove and return the next; the queue must not be empty."""
        place = min(self._places, key=lambda place: len(self._places[place]))
        waiting = self._places.pop(place)
        member = waiting.popleft()
        if waiting:
            self._places[place] = waiting  # after others with as many waiting
        return member


class FairTurns(Generic[M]):
    """
    Gives connections their turns; in the reactor's thread only.

    An honest request takes half a dozen turns of the reactor: TLS, its body, two waits for the disk. In each
    of them it waits for all other work. Without limits, a client with large requests made turns of 3 ms
    (leases) to 180 ms (a bundle), and delayed others several times that long.

    In one turn of the reactor, no connection works longer than a slice; if it has more to do, it waits in a
    queue, which gets one slice per turn. New requests are served at once if the server has recently worked
    for their connection no longer than ``BURST_S`` (plus ``SHARE`` of all time). Together they get one slice
    as well; beyond that, they wait in the queue. The address with the fewest waiting is next, and connections
    of one address in order of arrival. So a small request waits for one slice of all the others, and a
    request of one of many connections waits in proportion to their number. The server is never idle while a
    request waits, unlike ``foolscap.broker.Governor``.

    A slice is half a millisecond, ten times the cost of a turn of the reactor. While no other connection has
    been active recently, it is twenty milliseconds, so that requests pipelined by one client become durable
    together. The time of work is measured. Work that cannot be interrupted may exceed a slice; if it takes
    much longer, it is divided into steps (``gbs.body_receivers.InSteps``).

    Args:
        clock: for measuring, and for turns.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._queue: FairQueue[M] = FairQueue()
        self._call = Timer(clock, self._next)
        # The connection that works now, or worked last.
        self._last: M | None = None
        self._began_s = self._ended_s = float(
            "-inf"
        )  # the start of its slice, and the end of its work
        self._work_s = float("-inf")  # the start of its own work
        self._run_s = float("-inf")  # the start of uninterrupted work by any connection
        self._slice_s = ALONE_S
        # When a connection other than the working one was last active, or last sent a request.
        self._others_s = float("-inf")
        self._in_line = False  # the queue is being served

    def __repr__(self) -> str:
        return f"<FairTurns, {'some' if self._queue else 'none'} waiting>"

    @property
    def over(self) -> bool:
        """Whether the working connection should stop, so that others get their turns."""
        return self._clock.seconds() - self._began_s > self._slice_s

    def start(self) -> float:
        """Record that a connection begins to work, or to wait for work; returns the time."""
        self._work_s = now_s = self._clock.seconds()
        if self._in_line:
            self._began_s = self._run_s  # the queue has one slice for all its members
        else:
            self._began_s = now_s
            if now_s - self._ended_s > GAP_S:
                self._run_s = now_s
        return now_s

    def asked(self) -> None:
        """Record a request of the other protocol."""
        self._others_s = self._clock.seconds()

    def may_have(self, member: M) -> bool:
        """Return whether a member may work now, after ``start``; else it has to call ``wait``."""
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
        """Put a member in the queue: ``take_turn`` is called later."""
        self._queue.join(member)
        if not self._in_line:
            self._call.set(0)

    def leave(self, member: M) -> None:
        """Remove a member that wants no turn any more, whether it waits for one or not."""
        self._queue.leave(member)
        if not self._queue:
            self._call.stop()
        if self._last is member:
            self._last = None

    def end(self, member: M) -> None:
        """Record the end of work that began with ``start``."""
        self._ended_s = now_s = self._clock.seconds()
        member.spending.spend(now_s - self._work_s, now_s)

    def _choose_slice(self, member: M, now_s: float) -> None:
        if self._last is not member:
            # Other connections are active if they have worked lately, even if this one works seldom.
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
