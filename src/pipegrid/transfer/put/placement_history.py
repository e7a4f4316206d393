"""
Whether a client's files are where they would be put, as its past puts have found; and what a put does then.

A put sends share i to the i-th server of the ring before anybody has answered. What another program has
stored, or what was stored before the grid grew, may be elsewhere, and then each share that arrives whole is
one too many. Two things prevent that, as far as they are free or have been found to be needed:

* The last byte of a share waits for the answers (``FinalByteHold``), where sending takes longer than they do.
* Small files ask first, and send when they know: a round trip more. Puts do that for as long as one of the
  last ``REMEMBERED`` has found a share elsewhere.

Pure: told of ends and answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from pipegrid.errors import UsageError

AskFirst = Literal["auto", "always", "never"]

REMEMBERED = 16
"""So many puts in a row must find nothing elsewhere before the next one does not ask first."""

SMALL_BYTES = 64 << 10
"""
Shares up to this are asked for first, where that is needed at all. Of larger ones all but a byte is sent
meanwhile: the same round trip, but the bytes are there.
"""

SLOW = 2.0
"""Nobody waits for a server that takes so many times as long as it took until most had answered."""

PATIENCE = 5.0
"""
A put that has to know waits so many times the grace for most to answer: servers that are all busy, or that
connections are still being made to, are no stragglers. With the grace alone such a put stored all twice.
"""


def ask_first(text: str) -> AskFirst:
    """
    Return the policy that a setting names.

    Raises:
        UsageError: it is none.
    """
    for each in get_args(AskFirst):
        if text == each:
            found: AskFirst = each
            return found
    raise UsageError(f"ask_first is {text!r}; it must be one of {', '.join(get_args(AskFirst))}")


class PlacementHistory:
    """
    What all puts of a client have found.

    Args:
        left: how many more puts ask first, as an earlier process has left it.
        changed: told when that changes, so that a later process may know.
    """

    def __init__(
        self,
        policy: AskFirst = "auto",
        left: int = 0,
        changed: Callable[[int], None] = lambda left: None,
    ) -> None:
        self.policy = policy
        self._left = max(0, min(left, REMEMBERED))
        self._changed = changed

    def __repr__(self) -> str:
        return f"<PlacementHistory {self.policy}, {self._left} puts to ask first>"

    @property
    def must_ask(self) -> bool:
        """Whether puts have to know where shares are before any is complete, whatever that costs."""
        return self.policy == "always" or (self.policy == "auto" and self._left > 0)

    def asks_first(self, share_bytes: int) -> bool:
        """Whether a put that begins now sends nothing before it knows where shares are."""
        return self.policy == "always" or (self.must_ask and share_bytes <= SMALL_BYTES)

    def holds_back(self, share_bytes: int, exceeds_window: bool) -> bool:
        """
        Whether the last byte of a share waits for the answers that are still missing.

        Args:
            exceeds_window: the share does not fit in what the server may be sent before it answers, so that
                answers must come before it can be complete anyhow.
        """
        if self.policy == "never" or share_bytes <= SMALL_BYTES:
            return False
        return self.must_ask or exceeds_window

    def ended(self, found_elsewhere: bool) -> None:
        """A put has ended well."""
        left = REMEMBERED if found_elsewhere else max(0, self._left - 1)
        if left != self._left:
            self._left = left
            self._changed(left)


class FinalByteHold:
    """
    How long the last bytes of one put's shares wait for answers.

    Args:
        asked: how many servers were asked at the beginning.
        grace_s: no longer than that for any server that is much slower than most.
        patient: whether the put has to know, whatever that costs; else it waits only for servers that are
            not much slower than most, and no longer than the grace for them.
    """

    def __init__(self, asked: int, began_s: float, grace_s: float, patient: bool) -> None:
        self._asked = asked
        self._answered = 0
        self._began_s = began_s
        self._grace_ends_s = began_s + grace_s
        self._ends_s = began_s + grace_s * (PATIENCE if patient else 1.0)
        self._patient = patient

    def answered(self, now_s: float, servers: int = 1) -> None:
        """So many more servers have answered, or have failed."""
        before, self._answered = self._answered, self._answered + servers
        if 2 * self._answered > self._asked >= 2 * before:
            ends_s = self._began_s + SLOW * (now_s - self._began_s)
            if self._patient:
                ends_s = max(ends_s, self._grace_ends_s)
            self._ends_s = min(self._ends_s, ends_s)

    def left_s(self, now_s: float) -> float:
        """Return how much longer they wait for what is unanswered; 0 or less: not at all."""
        return self._ends_s - now_s
