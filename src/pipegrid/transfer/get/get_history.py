"""
What the gets of a client teach those after them: its line's width, and where shares are.

**The line.** A file of one segment can be raced for with whole shares: then a slow server is not felt at
all. But the share too many takes as long to come as any other, and where the line is narrow that is far
more than the round trip that calling a helper later costs. So it is asked for whole only where its bytes
cost no more.

**Guesses.** A download asks the servers of the predicted shares for their lists as well: where the guess is
wrong, the lists have come with the refusals, and no round trip is lost. Where it is right they were asked
in vain, and that is half of all that the servers of a small file are asked. One file may cost that. Of many
at once it is the servers' time that counts, so there the lists are left out as long as every guess comes
true; one that does not costs its own file a round trip, and brings the lists back for those behind it.

Pure: told of beginnings and ends, bytes and times, in seconds.
"""

from __future__ import annotations

from collections import deque

import attrs

MANY = 8
"""With so many running the next download is one of many. They ask for lists, and so keep an eye on things."""

_REMEMBERED = 16

_SAMPLES = 8
MIN_SAMPLE_BYTES = 64 << 10
"""Less tells of round trips, and nothing of the line."""


class LinkEstimate:
    """The line that all downloads of a client share."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_SAMPLES)
        self._answers_s: deque[float] = deque(maxlen=8 * _SAMPLES)

    def note_answer(self, elapsed_s: float) -> None:
        """A small question was answered."""
        self._answers_s.append(elapsed_s)

    def note_bytes(self, size_bytes: int, elapsed_s: float) -> None:
        """So much has come in one go, over all servers."""
        if size_bytes >= MIN_SAMPLE_BYTES and elapsed_s > 0:
            self._rates.append(size_bytes / elapsed_s)

    @property
    def bytes_per_s(self) -> float | None:
        """The best that was seen lately, or None if nothing is known."""
        return max(self._rates, default=None)

    @property
    def rtt_s(self) -> float | None:
        """The shortest answer lately, or None if nothing is known."""
        return min(self._answers_s, default=None)

    def time_s(self, size_bytes: int) -> float:
        """Return how long so many bytes take; 0 if nothing is known."""
        rate = self.bytes_per_s
        return size_bytes / rate if rate else 0.0

    def is_narrow_for(self, size_bytes: int) -> bool:
        """Whether so many bytes are known to take longer than a round trip."""
        rate, rtt_s = self.bytes_per_s, self.rtt_s
        return rate is not None and rtt_s is not None and size_bytes > rate * rtt_s


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
        """A download has begun; ``ended`` has to follow, once."""
        self._running += 1

    def ended(self) -> None:
        """A download has ended, somehow."""
        self._running -= 1

    def found(self, right: bool) -> None:
        """A file's shares were where they were guessed, or some was not."""
        self._right.append(right)


@attrs.frozen
class GetHistory:
    """All that a client has learned from its gets."""

    line: LinkEstimate = attrs.Factory(LinkEstimate)
    guesses: Guesses = attrs.Factory(Guesses)
