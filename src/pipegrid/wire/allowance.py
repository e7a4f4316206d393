"""
What a Foolscap message may become in memory, counted before any of it is there.

Every message begins with a few KiB, and is allowed more when it is known what it is. ``broker`` charges for
each token, and for its body, what they become.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from foolscap.tokens import BananaError

from pipegrid.wire.allocated import AllocatedAnswers
from pipegrid.wire.messages import MAX_BLOCK_WRITES

TOKEN_COST = 128
"""Bytes of memory that a token becomes, besides its body; a tuple of a number and a string are four."""

FIRST_COST = 4096
"""Of a message before it is known what it is. Calls of the tub itself, as for a name, become some 2000."""

CALL_COST = 64 * 1024
"""Of a call of an object of ours, where nothing else is said."""

ANSWER_COST = 32 * 1024
"""Of an answer where its call says nothing else. A failure has up to 5 KB of text, in some 60 tokens."""

MAX_SMALL_TOKENS = 100_000
"""
Of a message without blocks, a second's work: 256 shares, each with 30 tests of seven tokens, 30 small writes
of five, and twelve around them, are 95,232; 4096 announcements 25,000.
"""

TOKEN_BYTES = 100
"""
A message may have one token more for so many bytes in it: the five of a block of an MDMF share have 531 and
more.
"""

MAX_TOKENS = MAX_SMALL_TOKENS + 5 * MAX_BLOCK_WRITES


class TooMuch(BananaError):  # type: ignore[misc]
    """The other end broke a bound, or the protocol. Why is in the text."""

    def __str__(self) -> str:
        return str(self.args[0])


@attrs.frozen
class Bounds:
    """
    What differs between connections.

    Attributes:
        call_cost: allowance of a call that the other end makes of an object of ours.
        answer_cost: the same for an answer, given the method that was called and its arguments.
        turn_tokens: looked at before others have their turn.
        allocated: answers that are recognized as a whole, if any are.
    """

    call_cost: int = CALL_COST
    answer_cost: Callable[[str, tuple[Any, ...]], int] = lambda method, arguments: ANSWER_COST
    turn_tokens: int = 512
    allocated: AllocatedAnswers | None = None


class Allowance:
    """
    Of the message that is being received.

    Attributes:
        held_cost: what it is so far.
    """

    __slots__ = ("_cost_left", "_tokens_earned", "_tokens_left", "held_cost")

    def __init__(self) -> None:
        self.held_cost = 0
        self._cost_left = 0
        self._tokens_left = self._tokens_earned = 0

    def begin(self) -> None:
        """What comes now belongs to another message."""
        self.held_cost = 0
        self._cost_left = FIRST_COST
        self._tokens_left = MAX_SMALL_TOKENS
        self._tokens_earned = MAX_TOKENS - MAX_SMALL_TOKENS

    def count_body(self, size: int) -> None:
        """A token brings so many bytes, which allow for more tokens."""
        more = min(size // TOKEN_BYTES, self._tokens_earned)
        self._tokens_earned -= more
        self._tokens_left += more

    def count_token(self) -> None:
        """One more token; raises TooMuch if it must not be."""
        self._tokens_left -= 1
        if self._tokens_left < 0:
            raise TooMuch("a message had more tokens than one of its size may have")

    def charge(self, cost: int) -> None:
        """It becomes larger by so much; raises TooMuch if it must not."""
        self._cost_left -= cost
        self.held_cost += cost
        if self._cost_left < 0:
            raise TooMuch(
                f"a message became larger than its kind may be, at {self.held_cost} bytes"
            )

    def allow(self, cost: int) -> None:
        """It has turned out what it is, and that it may have so much in all."""
        self._cost_left = max(self._cost_left, cost - self.held_cost)
