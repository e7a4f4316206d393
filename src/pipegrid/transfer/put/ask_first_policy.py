"""
Whether a client's files are where the client would put them, as earlier puts have found, and what a put
does about it.

The decisions are pure: the caller reports responses and the ends of puts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast, get_args

from pipegrid.errors import UsageError

AskFirst = Literal["auto", "always", "never"]

REMEMBERED = 16
"""
Number of consecutive puts that must find no share on an unexpected server before puts stop asking first.
"""

SMALL_BYTES = 64 << 10
"""
For shares up to this size servers are asked first, if that is needed at all. Of larger shares all but the
last byte is sent while the put waits for responses.
"""

SLOW = 2.0
"""A put does not wait for a server that takes this many times as long as most servers took."""

GRACES = 5.0
"""
A put that must know where shares are waits this many times the grace for most servers to respond: servers
that are busy, or still connecting, are not stragglers. With a wait of only one grace such a put stored
everything twice.
"""


def ask_first(text: str) -> AskFirst:
    """
    Return the policy that a setting names.

    Raises:
        UsageError: the text names no policy.
    """
    if text not in get_args(AskFirst):
        raise UsageError(
            f"ask_first is {text!r}; it must be one of {', '.join(get_args(AskFirst))}"
        )
    return cast("AskFirst", text)


class PlacementHistory:
    """
    What all puts of a client have found.

    A put sends share i to the i-th server of the ring before any server has responded. Shares that
    another program has stored, or that were stored before the grid grew, may be on other servers; then
    each share that is completed is a superfluous copy. Two measures prevent such copies:

    * The last byte of a share waits for the responses (``FinalByteHold``), if sending the share takes
      longer than the responses.
    * Puts of small files ask first, and send a round trip later. They do so while one of the last
      ``REMEMBERED`` puts has found a share on an unexpected server.

    Args:
        left: how many more puts ask first, as an earlier process has stored it.
        changed: called with the new value of ``left``, so that it can be stored.
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
        """Whether puts must know where shares are before any share is complete, whatever that costs."""
        return self.policy == "always" or (self.policy == "auto" and self._left > 0)

    def asks_first(self, share_bytes: int) -> bool:
        """Return whether a put that begins now sends nothing before it knows where shares are."""
        return self.policy == "always" or (self.must_ask and share_bytes <= SMALL_BYTES)

    def holds_back(self, share_bytes: int, exceeds_window: bool) -> bool:
        """
        Return whether the last byte of a share waits for the outstanding responses.

        Args:
            exceeds_window: whether the share is larger than the window, so that responses must come
                before it can be complete anyway.
        """
        if self.policy == "never" or share_bytes <= SMALL_BYTES:
            return False
        return self.must_ask or exceeds_window

    def ended(self, found_misplaced: bool) -> None:
        """Record that a put has succeeded."""
        left = REMEMBERED if found_misplaced else max(0, self._left - 1)
        if left != self._left:
            self._left = left
            self._changed(left)


class FinalByteHold:
    """
    How long the last bytes of one put's shares wait for responses.

    Args:
        asked: number of servers that were asked at the beginning.
        grace_s: longest wait for a server that is much slower than most.
        must_know: whether the put must know where shares are, whatever that costs. Otherwise it waits only
            for servers that are not much slower than most, and for at most the grace.
    """

    def __init__(self, asked: int, began_s: float, grace_s: float, must_know: bool) -> None:
        self._asked = asked
        self._answered = 0
        self._began_s = began_s
        self._grace_ends_s = began_s + grace_s
        self._ends_s = began_s + grace_s * (GRACES if must_know else 1.0)
        self._must_know = must_know

    def answered(self, now_s: float, servers: int = 1) -> None:
        """Record that ``servers`` more servers have responded or failed."""
        before, self._answered = self._answered, self._answered + servers
        if 2 * self._answered > self._asked >= 2 * before:
            ends_s = self._began_s + SLOW * (now_s - self._began_s)
            if self._must_know:
                ends_s = max(ends_s, self._grace_ends_s)
            self._ends_s = min(self._ends_s, ends_s)

    def left_s(self, now_s: float) -> float:
        """Return how much longer to wait for outstanding responses, in seconds; 0 or less: no longer."""
        return self._ends_s - now_s
