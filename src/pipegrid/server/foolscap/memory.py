"""
What Foolscap's connections hold in memory, and who goes when it is too much.

Messages that are being received or carried out, answers that are being sent, references: a connection that
has more than a little of them asks here first. All together have what the server's other protocol has left
them. When that is used up, the connection that holds most is cut off, if it holds at least as much as the
one that asks would; else the one that asks. So whoever declares much and sends it slowly, or asks for much
and does not read it, is the first to go, and a client with one usual message is never in its way.

Pure: who is told, and how, is the holders' business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

MAX_HELD_BYTES = 192 << 20
"""The largest message has 128 MiB, and its tokens become 52 MiB more."""


class Holder(Protocol):
    """Whoever holds memory that is counted here: a connection."""

    def crowd_out(self) -> None:
        """Let go of all, and end: others need the room."""


class HeldMemory:
    """
    The books.

    Args:
        ask: takes note that so many bytes more are held, or fewer; returns whether that may be.
        limit_bytes: for all these connections, whatever there is besides.
    """

    def __init__(self, ask: Callable[[int], bool], limit_bytes: int = MAX_HELD_BYTES) -> None:
        self._ask = ask
        self._limit_bytes = limit_bytes
        self.total_bytes = 0  # held by all of them
        self._held: dict[Holder, int] = {}

    def __repr__(self) -> str:
        return f"<HeldMemory, {self.total_bytes} bytes by {len(self._held)}>"

    def hold(self, holder: Holder, more_bytes: int) -> bool:
        """Have somebody hold more; returns whether that may be: if not, they are the one to go."""
        would_hold = self._held.get(holder, 0) + more_bytes
        while not self._take(more_bytes):
            victim = max(self._held, key=lambda each: self._held[each], default=holder)
            if victim is holder or self._held[victim] < would_hold:
                return False
            self.let_go_all(victim)
            victim.crowd_out()
        self._held[holder] = would_hold
        return True

    def let_go(self, holder: Holder, fewer_bytes: int) -> None:
        """Somebody holds less; it does not matter if they were cut off before."""
        held = self._held.get(holder, 0)
        fewer_bytes = min(fewer_bytes, held)
        if fewer_bytes:
            self._take(-fewer_bytes)
            self._held[holder] = held - fewer_bytes

    def let_go_all(self, holder: Holder) -> None:
        """Count nothing any more for a holder who is gone."""
        held = self._held.pop(holder, 0)
        if held:
            self._take(-held)

    def _take(self, more_bytes: int) -> bool:
        if more_bytes > 0 and self.total_bytes + more_bytes > self._limit_bytes:
            return False
        taken = self._ask(more_bytes)
        if taken:
            self.total_bytes += more_bytes
        return taken
