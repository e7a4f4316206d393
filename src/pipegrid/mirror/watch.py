"""
Which mirror is too slow, and what of its work others should do: numbers in, moves out.

Called a few times a second, with what each mirror owes and how long ago its last byte came.

**Stalls.** A connection from which no byte has come for a second, though it owes some, loses what it was
asked for, if there is another mirror; if there is none, after ``LONE_STALL_S``, or ``PIPELINED_STALL_S``.
While our own disk holds reading up nobody stalls.

**The tail.** When nothing waits any more, a mirror that has finished takes over from the one that would
finish last as much as evens out their times. What it takes is asked twice, and whoever is first has given
it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipegrid.mirror.value import Value

STALL_S = 1.0
LONE_STALL_S = 15.0
PIPELINED_STALL_S = 3.0
"""Of a connection that has had several requests at a time, and may be silent because of that."""

WORTH_STEALING_S = 0.5
"""What would come within this time anyway is left where it is."""

RATE_MEMORY_S = 2.0


class GivingRate:
    """How fast one mirror gives, lately."""

    __slots__ = ("_at_s", "_received_bytes", "bytes_per_s")

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self._received_bytes = 0
        self._at_s: float | None = None

    def note(self, now_s: float, received_bytes: int, owes: bool) -> None:
        """So many bytes have come in all. Time in which nothing was owed does not count."""
        if self._at_s is not None and now_s > self._at_s:
            elapsed_s = now_s - self._at_s
            rate = (received_bytes - self._received_bytes) / elapsed_s
            if owes or rate > 0:
                weight = min(1.0, elapsed_s / RATE_MEMORY_S) if self.bytes_per_s else 1.0
                self.bytes_per_s += weight * (rate - self.bytes_per_s)
        self._at_s, self._received_bytes = now_s, received_bytes


class MirrorStanding(Value):
    """
    How one mirror stands.

    Attributes:
        mirror: its number.
        owed_bytes: asked and not come.
        bytes_per_s: lately; 0.0 while unknown.
        can_work: is neither resting nor given up.
    """

    __slots__ = ("bytes_per_s", "can_work", "mirror", "owed_bytes")

    def __init__(self, mirror: int, owed_bytes: int, bytes_per_s: float, can_work: bool) -> None:
        self.mirror = mirror
        self.owed_bytes = owed_bytes
        self.bytes_per_s = bytes_per_s
        self.can_work = can_work

    @property
    def left_s(self) -> float:
        """When it would have finished."""
        if not self.owed_bytes:
            return 0.0
        return self.owed_bytes / self.bytes_per_s if self.bytes_per_s else float("inf")


def has_stalled(idle_s: float, others: bool, pipelined: bool = False) -> bool:
    """
    Return whether a connection that owes something has been silent for too long.

    Args:
        others: whether another mirror can do its work.
        pipelined: it has had several requests at a time.
    """
    return idle_s > (STALL_S if others else PIPELINED_STALL_S if pipelined else LONE_STALL_S)


class Theft(Value):
    """A mirror takes over from another about so many bytes, from the end of what that was asked for."""

    __slots__ = ("size_bytes", "thief", "victim")

    def __init__(self, thief: int, victim: int, size_bytes: int) -> None:
        self.thief = thief
        self.victim = victim
        self.size_bytes = size_bytes


def theft(standings: Sequence[MirrorStanding], reserve_bytes: int = 64 << 10) -> Theft | None:
    """
    Return who should take over from whom, now that nothing waits; None: nobody needs to.

    Args:
        reserve_bytes: what is taken at least, so that a mirror that gives nothing is relieved of something.
    """
    able = [one for one in standings if one.can_work]
    idle = [one for one in able if not one.owed_bytes]
    late = max(standings, key=lambda one: one.left_s, default=None)
    if not idle or late is None or late.left_s < WORTH_STEALING_S:
        return None
    thief = max(idle, key=lambda one: one.bytes_per_s)
    rates = thief.bytes_per_s + late.bytes_per_s
    share = thief.bytes_per_s / rates if rates else 0.5
    return Theft(thief.mirror, late.mirror, max(reserve_bytes, int(late.owed_bytes * share)))
