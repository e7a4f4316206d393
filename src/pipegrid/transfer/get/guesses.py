"""
Whether shares are where uploaders put them, as a client's past downloads have found.

A download asks the servers of the predicted shares for their lists as well: where the guess is wrong, the
lists have come with the refusals, and no round trip is lost. Where it is right they were asked in vain, and
that is half of all that the servers of a small file are asked. One file may cost that. Of many at once it is
the servers' time that counts, so there the lists are left out as long as every guess comes true; one that
does not costs its own file a round trip, and brings the lists back for those behind it.

Pure: told of beginnings and ends.
"""

from __future__ import annotations

from collections import deque

MANY = 8
"""With so many running the next download is one of many. They ask for lists, and so keep an eye on things."""

_REMEMBERED = 16


class Guesses:
    """What all downloads of a client have guessed."""

    def __init__(self) -> None:
        self._running = 0
        self._right: deque[bool] = deque(maxlen=_REMEMBERED)

    def __repr__(self) -> str:
        return f"<Guesses {sum(self._right)} of {len(self._right)} right, {self._running} running>"

    @property
    def needs_lists(self) -> bool:
        """Whether a download that begins now should ask for lists besides."""
        return self._running < MANY or not self._right or not all(self._right)

    def began(self) -> None:
        """A download has begun."""
        self._running += 1

    def ended(self) -> None:
        """A download has ended, somehow."""
        self._running -= 1

    def found(self, right: bool) -> None:
        """A file's shares were where they were guessed, or some was not."""
        self._right.append(right)
