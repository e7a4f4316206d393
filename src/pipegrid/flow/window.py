"""
How many bytes may be in flight: what every window does, and the one that is a fixed number.

Pure: times go in, a number comes out. ``flow.pipeline`` does the sending and waiting; ``flow.autowindow``
measures the number.

Times are seconds of one monotonic clock whose zero does not matter; sizes are bytes.
"""

from __future__ import annotations

from typing import Protocol

import attrs

from pipegrid.arguments import check_whole
from pipegrid.errors import UsageError

_EIGHTHS = 9
"""
A message may be as large as what is left of so many eighths of a limit. While less than the limit is taken a
message may leave, so that what is held at most is an eighth more than the limit, and no message has to be
smaller than that eighth.
"""


def left_for_message(limit_bytes: int, taken_bytes: int) -> int:
    """Return how large a message may be where so much of a limit is taken; 0 or less if none may be."""
    return limit_bytes * _EIGHTHS // 8 - taken_bytes


@attrs.define(eq=False)
class Sent:
    """One message in flight: what the window needs to know when it is acknowledged."""

    size: int
    time: float
    # The state of the connection when the message left, as in a TCP rate sample.
    delivered_bytes: int = 0
    delivered_time: float = 0.0
    first_sent_time: float = 0.0
    app_limited: bool = False
    probe: int = 0
    # Not of the window's business: whether the sender still has the message's bytes.
    held: bool = True


class Window(Protocol):
    """
    Decides how many bytes may be unacknowledged.

    A sender may send while less than ``limit_bytes`` are in flight, so that up to one message more
    than that is in flight at any time.

    Attributes:
        gathers: whether a sender should have the next message ready while there is no room for it.
    """

    gathers: bool

    @property
    def limit_bytes(self) -> int:
        """The limit now; it changes only with the calls below."""

    @property
    def message_bytes(self) -> int:
        """How large a message should be at most, so that the window never waits for one of them alone."""

    def sent(self, now: float, size: int) -> Sent:
        """A message of ``size`` bytes leaves. Returns the token to acknowledge it by."""

    def acknowledged(self, now: float, token: Sent) -> None:
        """The message has arrived, and so has the answer."""

    def abandoned(self, token: Sent) -> None:
        """The message is no longer in flight, and nothing can be learnt from it."""


class FixedWindow:
    """A limit that stays as it was given: 1 byte means one message at a time, and none is got ready."""

    gathers = False

    def __init__(self, limit_bytes: int) -> None:
        """
        Raises:
            UsageError: the limit is less than 1.
        """
        if check_whole(limit_bytes, "a window") < 1:
            raise UsageError(f"a window of {limit_bytes} bytes lets nothing out; give at least 1")
        self.limit_bytes = limit_bytes

    def __repr__(self) -> str:
        return f"FixedWindow({self.limit_bytes})"

    @property
    def message_bytes(self) -> int:
        return self.limit_bytes // 2

    def sent(self, now: float, size: int) -> Sent:
        return Sent(size, now)

    def acknowledged(self, now: float, token: Sent) -> None:
        """Learn nothing from it: the limit stays as it was given."""

    def abandoned(self, token: Sent) -> None:
        """Do nothing, since nothing is counted: the limit stays as it was given."""
