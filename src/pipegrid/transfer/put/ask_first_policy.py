"""
Whether earlier puts of a client found shares on unexpected servers, and whether a put therefore asks servers
before it sends.

The decisions are pure: the caller reports responses and the ends of puts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast, get_args

from pipegrid.errors import UsageError

AskFirst = Literal["auto", "always", "never"]

REMEMBERED = 16
"""How many consecutive puts must find no share on an unexpected server before puts stop asking first."""

SMALL_BYTES = 64 << 10
"""
While puts must ask for existing shares, shares up to this size are sent only after the servers' responses.
Of a larger share, all but the last byte is sent while the put waits, unless the policy is ``always``.
"""

SLOW = 2.0
"""A put stops waiting for the remaining responses after this many times the response time of most servers."""

GRACES = 5.0
"""
A put that must know where shares are waits at most this many times the grace: servers that are busy, or still
connecting, are not stragglers. With a wait of only one grace such a put stored every share twice.
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
    Whether recent puts of a client have found shares on unexpected servers.

    A put sends share i to the i-th server of the ring before any server has responded. If another program has
    stored the shares, or the grid has grown since they were stored, they may be on other servers; then each
    share that the put completes is a superfluous copy. Two measures prevent such copies:

    * The last byte of a share waits for the responses (``FinalByteHold``), if sending the share takes longer
      than the responses.
    * Puts of small files ask first, and send one round trip later. They do so while one of the last
      ``REMEMBERED`` puts has found a share on an unexpected server.

    Args:
        left: how many more puts ask first; the value that an earlier process has stored.
        changed: called with the new value of ``left``, so that the caller can store it.
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
        """Whether puts must know where shares are before any share is complete, even if this delays them."""
        return self.policy == "always" or (self.policy == "auto" and self._left > 0)

    def asks_first(self, share_bytes: int) -> bool:
        """Return whether a put that begins now sends nothing before it knows where shares are."""
        return self.policy == "always" or (self.must_ask and share_bytes <= SMALL_BYTES)

    def holds_back(self, share_bytes: int, exceeds_window: bool) -> bool:
        """
        Return whether the last byte of a share waits for the outstanding responses.

        Args:
            exceeds_window: whether the share is larger than the window, so that servers must respond anyway
                before it can be complete.
        """
        if self.policy == "never" or share_bytes <= SMALL_BYTES:
            return False
        return self.must_ask or exceeds_window

    def ended(self, found_misplaced: bool) -> None:
        """
        Record that a put has succeeded. ``found_misplaced``: whether it found a share on an unexpected
        server.
        """
        left = REMEMBERED if found_misplaced else max(0, self._left - 1)
        if left != self._left:
            self._left = left
            self._changed(left)


class FinalByteHold:
    """
    Decides how long the last bytes of one put's shares wait for responses.

    Once most servers have responded, the others have until ``SLOW`` times as long since the put began; with
    ``must_know`` at least until the grace is over.

    Args:
        asked: number of servers that were asked at the beginning.
        began_s: when the put began.
        grace_s: the grace, in seconds.
        must_know: whether the put must know where shares are. If so, it waits for most servers up to
            ``GRACES`` times the grace; otherwise at most the grace.
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
        """Return how many more seconds to wait for outstanding responses; 0 or less: wait no longer."""
        return self._ends_s - now_s
