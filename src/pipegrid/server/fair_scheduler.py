"""
Who works in which turn of the reactor: those who ask for little at once, the others a slice each, in turn.

**Goal.** An honest request takes half a dozen turns of the reactor: TLS, its body, two waits for the disk. It
waits for whatever else is done in each. A client that asks for much at once, or for what takes long, made
turns of 3 ms (leases) to 180 ms (a bundle), and others waited so long several times over.

**Rules.** Nobody works longer than a *slice* in one turn of the reactor; whoever has more to do waits in
line. The line has a slice in each turn, for as many as that is enough for; then everybody else is heard:
those who have just come at once, as long as the server has not worked for their connection for longer than
``BURST_S`` (``SHARE`` of all time is forgiven). All those for whom it has share a slice as well, and beyond
that, or behind others, they stand in line, whatever they ask for. In line, the address goes first that has
fewest waiting, and connections of one address in the order of coming.

So who asks for little waits for one slice of all the others together, and one of many waits as long as their
number is. Nothing is left undone while anybody wants something: unlike ``foolscap.governor``, nobody rests.

A slice is half a millisecond: a turn of the reactor costs a tenth of that. While nobody else has asked for
anything lately, it is twenty milliseconds, so that what one client pipelines becomes durable together.

The time that work takes is measured. What cannot be interrupted may exceed a slice; what takes much longer is
carried out in steps (``gbs.receivers.InSteps``).
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

from twisted.internet.interfaces import IReactorTime

from pipegrid.reactor.deferreds import Timer

SLICE_S = 0.0005
ALONE_S = 0.02
"""A slice while nobody else has asked for anything for ``ACTIVE_S``."""
ACTIVE_S = 0.05
"""
A client reads over other connections than it writes: with 0.25 s its own reads of a while ago cut its puts
into slices of half a millisecond, and a hundred small files took a third of a round trip more.
"""
GAP_S = 0.0002
"""After so long a pause there was a turn of the reactor in between."""

BURST_S = 0.02
SHARE = 0.01


class CpuUsage:
    """How long the server has worked for one connection lately."""

    def __init__(self, now_s: float) -> None:
        self._spent_s = 0.0
        self._at_s = now_s

    def spend(self, work_s: float, now_s: float) -> None:
        """Add ``work_s`` seconds of work that ended at ``now_s``."""
        paid_back_s = max(0.0, now_s - self._at_s) * SHARE
        self._spent_s = max(0.0, self._spent_s - paid_back_s) + work_s
        self._at_s = now_s

    def is_heavy(self, now_s: float) -> bool:
        """Whether it has to wait in line."""
        self.spend(0.0, now_s)
        return self._spent_s > BURST_S


class Waiting(Protocol):
    """
    Who may stand in line.

    Attributes:
        place: its address; those of one address share the line's favour.
    """

    place: str


class Member(Waiting, Protocol):
    """
    Who has turns.

    Attributes:
        spending: what it has had.
    """

    spending: CpuUsage

    def take_turn(self) -> None:
        """Its turn has come: carry out what it can before the turn is over."""


W = TypeVar("W", bound=Waiting)
M = TypeVar("M", bound=Member)


class FairQueue(Generic[W]):
    """Who waits, and who is next: of the address that has fewest waiting, the one that came first."""

    def __init__(self) -> None:
        self._places: dict[str, deque[W]] = {}  # those that had a turn last are last

    def __bool__(self) -> bool:
        return bool(self._places)

    def join(self, member: W) -> None:
        """Wait, behind the others of its address."""
        self._places.setdefault(member.place, deque()).append(member)

    def leave(self, member: W) -> None:
        """Take a member out of the queue; one that is not in it is no error."""
        waiting = self._places.get(member.place)
        if waiting is not None and member in waiting:
            waiting.remove(member)
            if not waiting:
                del self._places[member.place]

    def next(self) -> W:
        """Return whose turn it is; somebody has to wait."""
        place = min(self._places, key=lambda place: len(self._places[place]))
        waiting = self._places.pop(place)
        member = waiting.popleft()
        if waiting:
            self._places[place] = waiting  # behind others that have as many
        return member


class FairTurns(Generic[M]):
    """
    See above. The reactor's thread only.

    Args:
        clock: for measuring, and for turns.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._queue: FairQueue[M] = FairQueue()
        self._call = Timer(clock, self._next)
        # Of who works now, or did last.
        self._last: M | None = None
        self._began_s = self._ended_s = float("-inf")  # its slice, and its work
        self._work_s = float("-inf")  # since when it has worked itself
        self._run_s = float("-inf")  # since when there was work without a pause
        self._slice_s = ALONE_S
        # When somebody else than who works now was at work, or asked.
        self._others_s = float("-inf")
        self._in_line = False  # it is the line's turn

    def __repr__(self) -> str:
        return f"<FairTurns, {'some' if self._queue else 'none'} in line>"

    @property
    def over(self) -> bool:
        """Whether who works now should let the others have their turn."""
        return self._clock.seconds() - self._began_s > self._slice_s

    def start(self) -> float:
        """Somebody begins to work, who may have to wait in line all the same; returns the time."""
        self._work_s = now_s = self._clock.seconds()
        if self._in_line:
            self._began_s = self._run_s  # the line has one slice, for all of them
        else:
            self._began_s = now_s
            if now_s - self._ended_s > GAP_S:
                self._run_s = now_s
        return now_s

    def asked(self) -> None:
        """Somebody who is not known by name here asks for something."""
        self._others_s = self._clock.seconds()

    def may_have(self, member: M) -> bool:
        """Whether it may carry out something now, having said so (``start``); else it has to ``wait``."""
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
        """Have its turn in line: ``take_turn`` is called."""
        self._queue.join(member)
        if not self._in_line:
            self._call.set(0)

    def leave(self, member: M) -> None:
        """It wants no turn any more, whether it waits for one or not."""
        self._queue.leave(member)
        if not self._queue:
            self._call.stop()
        if self._last is member:
            self._last = None

    def end(self, member: M) -> None:
        """It has worked since ``start``."""
        self._ended_s = now_s = self._clock.seconds()
        member.spending.spend(now_s - self._work_s, now_s)

    def _choose_slice(self, member: M, now_s: float) -> None:
        if self._last is not member:
            # They are active if they have worked lately, however seldom this one comes.
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
