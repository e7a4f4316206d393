"""Read decisions: hedged requests, timeouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import attrs

from pipegrid.core.encoding_parameters import Geometry
from pipegrid.transfer.get.get_history import MIN_SAMPLE_BYTES, GetHistory
from pipegrid.transfer.settings import DownloadSettings

# Which shares serve a range: the first k of the ring, and helpers in the place of those that are slow.
#
# The first k of the ring are the favourites, and are asked for everything at once. The others are asked for a
# probe. When a helper has given its probe while a favourite lags behind, it is asked for the rest. If one
# favourite lags and two helpers are there, they divide its work: the first part of the segments from one of
# them, the others from the other. So what the round trip until they begin has cost is caught up with where
# servers have lines of their own; and where one line is shared it is never idle anyway. Whoever is only a
# little late is waited for: bytes come in bursts, and to replace a server that is not slow costs the line.
#
# Pure: looks at readers, and says what to ask of whom.

_TOLERANCE = 0.125
"""By how much of the time that a helper's probe has taken a favourite may be late."""


class RacingShare(Protocol):
    """What is known of a share that takes part."""

    @property
    def share_number(self) -> int:
        """The number of the share, 0 to 255, which tells the runners of a race apart."""

    @property
    def received_bytes(self) -> int:
        """What it has given so far."""

    @property
    def waiting(self) -> bool:
        """Whether something was asked that it has not given."""


class HedgedRead:
    """
    The race for one range.

    Args:
        started: when it began.
        patience_s: how long a favourite that lags is waited for at least: on a narrow line even what comes
            evenly comes in bursts.

    Attributes:
        open: until it is known which shares are fast enough.
        parts: share number to the segments [first, end) that it is asked for; all, if it is not here.
        due: when to look again whatever happens, or None.
    """

    def __init__(self, started: float, patience_s: float = 0.0) -> None:
        self.open = True
        self.parts: dict[int, tuple[int, int]] = {}
        self.due: float | None = None
        self._started = started
        self._patience_s = patience_s
        self._helping: set[int] = set()

    def is_hedge(self, share_number: int) -> bool:
        """Return whether a share that is no favourite is asked for more than a probe."""
        return share_number in self._helping

    def consider_hedging(
        self,
        now: float,
        favourites: Sequence[RacingShare],
        others: Sequence[RacingShare],
        segments: tuple[int, int],
        most_segments: int,
    ) -> None:
        """
        Call helpers if favourites lag.

        Args:
            segments: [first, end) of what is left.
            most_segments: how many the first of two helpers may have for its part: the second one's
                blocks have to be held until that part has come.
        """
        fastest = max((runner.received_bytes for runner in others), default=0)
        lagging = sum(2 * runner.received_bytes < fastest for runner in favourites)
        if lagging > 1:
            self.parts.clear()  # who shares a favourite's work now has one for itself
        if not lagging or self._helping or all(runner.waiting for runner in others):
            self.due = None
            return
        if self.due is None:
            self.due = now + max(self._patience_s, _TOLERANCE * (now - self._started))
        if now < self.due:
            return
        self.due = None
        helpers = [runner.share_number for runner in others if 2 * runner.received_bytes >= fastest]
        self._helping.update(helpers)
        first, end = segments
        if lagging == 1 and len(helpers) > 1 and end - first > 1:
            # Of more than two, the others have lost.
            middle = first + max(1, min((end - first) // 2, most_segments))
            self.parts = {helpers[0]: (middle, end), helpers[1]: (first, middle)}
            self._helping = set(self.parts)

    def closed(self, share_number: int) -> None:
        """A share takes part no more; whoever had divided work with it has it all."""
        self._helping.discard(share_number)
        if share_number in self.parts:
            self.parts.clear()

    def end(self, numbers: Iterable[int]) -> set[int]:
        """
        End the race: these shares have made the first segment. Return those that go on.
        """
        self.open = False
        self.due = None
        winners = set(numbers)
        dividing = winners & self.parts.keys()
        if len(dividing) > 1:
            self.parts.clear()  # together they are one share, and these shares have to be k
        return winners | set(self.parts) if dividing else winners

    def reopen(self) -> None:
        """Somebody falters: more shares take part, each for all that is left."""
        self.open = True
        self.due = None
        self.parts.clear()

    def done(self, next_segment: int) -> list[int]:
        """Return the shares that have given their part, when this is the next segment to come."""
        return [number for number, (_, end) in self.parts.items() if end <= next_segment]


# The decisions of one get: which shares to race, what to ask of whom, how long to wait, when to call others.
#
# Facts go in, moves come out; there is no clock, server or file here. What acts is ``download``'s loop; who
# serves the range is ``race``'s decision.
#
# **Patience.** Two clocks run side by side. When no segment has been finished for ``hedge_s``, the download
# looks whether some servers lag behind the others; when nothing at all has come for ``silence_s``, whoever
# owes something is given up.

EVERYTHING = 1 << 62

RACE_BYTES = 1 << 20
"""What those who join a race late are asked for beyond the next block: it keeps 80 Mbit/s busy at 100 ms."""

PROBE_BYTES = 1 << 16
PROBE_SHARE = 64
"""
What the racers beyond the first k are asked for together, if the range has several segments: so much, or this
fraction of the range, at most a block. For it costs the line, and nearly always in vain.
"""

NARROW_PROBE_BYTES = 1 << 13
"""The least of that on a line of which is known that it is narrow."""

BURSTS = 8
"""On such a line a favourite is waited for as long as this fraction of the range takes."""

HELPERS = 2
"""
Of a range of several segments, the probe is divided among so many servers for each extra share: two can
catch up with what one cannot.
"""


class Reader(RacingShare, Protocol):
    """What is known of a share that is read."""

    @property
    def paused(self) -> bool:
        """Whether it is we who hold back all that it has not given."""

    @property
    def period_bytes(self) -> int:
        """What it has given since the last look at those that lag."""


@attrs.frozen
class Ask:
    """
    A move: ask a share's server for what the decoder wants of it.

    Attributes:
        ahead_bytes: beyond the next block.
        most_bytes: no more than this; None: all of that.
        part: only of the segments [first, end).
    """

    share_number: int
    ahead_bytes: int
    most_bytes: int | None = None
    part: tuple[int, int] | None = None


class ReadPolicy:
    """
    The decisions of one download.

    Args:
        length: of the range, in bytes of the file.
        geometry: as it can be told from the cap.
        found_bytes: of the range that may be there already.
        now: when it began, on the caller's clock, in seconds.

    Attributes:
        extra_shares: so many more than k are read while the race is open.
        ahead_bytes: how much may be held of each share before its server is paused.
        race: who takes part, for what.
    """

    def __init__(
        self,
        settings: DownloadSettings,
        earlier: GetHistory,
        geometry: Geometry,
        length: int,
        found_bytes: int,
        now: float,
    ) -> None:
        self._line = line = earlier.line
        self._guesses = earlier.guesses
        self._required_shares = geometry.required_shares
        length -= found_bytes  # what is to be fetched, as far as can be told
        several = length > geometry.segment_bytes
        narrow = line.is_narrow_for(settings.extra_shares * geometry.block_bytes)
        least_bytes = NARROW_PROBE_BYTES if narrow else PROBE_BYTES
        # A rerun is to fetch little more than what is missing, and may probe twice if a segment was damaged.
        share_bytes = 0 if found_bytes else length // PROBE_SHARE
        probes = several or narrow
        self._probe_bytes = (
            max(least_bytes, share_bytes) // HELPERS if probes else geometry.block_bytes
        )
        self.extra_shares = HELPERS * settings.extra_shares if probes else settings.extra_shares
        self.ahead_bytes = settings.memory_bytes // (self._required_shares + self.extra_shares)
        self.race = HedgedRead(now, line.time_s(length) / BURSTS if narrow else 0.0)
        # No server lags because the line is narrow.
        hedge_s = max(settings.hedge_s, 2 * line.time_s(geometry.segment_bytes))
        self._patience = ReadPatience(hedge_s, settings.silence_s, now)
        self._hedged = False
        self._misplaced = False
        self._seen_bytes = 0
        self._first_seen: tuple[int, float] | None = None
        self._sample_bytes = max(MIN_SAMPLE_BYTES, geometry.segment_bytes // 2)

    # Facts.

    def began(self) -> bool:
        """The first burst is about to leave; returns whether servers are asked for their lists, too."""
        needs_lists = self._guesses.needs_lists
        self._guesses.began()
        return needs_lists

    def ended(self) -> None:
        """The download has ended, somehow."""
        self._guesses.ended()

    def succeeded(self) -> None:
        """All was delivered: if no share was misplaced, the guess was right."""
        if not self._misplaced:
            self._guesses.found(True)

    def misplaced(self) -> None:
        """A share of the first burst is not where it was guessed: others should know at once."""
        if not self._misplaced:
            self._misplaced = True
            self._guesses.found(False)

    def answered(self, now: float, elapsed_s: float | None) -> None:
        """A server has said which shares it has, or failed (None)."""
        self._patience.something_came(now)
        if elapsed_s is not None:
            self._line.note_answer(elapsed_s)

    def seen(self, now: float, seen_bytes: int) -> None:
        """So much has come of the shares that are read now, all together."""
        if seen_bytes == self._seen_bytes:
            return
        if seen_bytes > self._seen_bytes:
            self._note_rate(now, seen_bytes)
        self._seen_bytes = seen_bytes
        self._patience.something_came(now)

    def _note_rate(self, now: float, seen_bytes: int) -> None:
        """Let the line learn what has come since the first bytes, once that says something."""
        if self._first_seen is None:
            self._first_seen = (seen_bytes, now)
            return
        first_bytes, first_s = self._first_seen
        if seen_bytes - first_bytes >= self._sample_bytes:
            self._line.note_bytes(seen_bytes - first_bytes, now - first_s)
            self._first_seen = (seen_bytes, now)

    def left(self, now: float) -> None:
        """A share is read no more; whoever is asked in its place has all the time that it had."""
        self._patience.something_came(now)

    def segment_finished(self, now: float) -> None:
        """A segment was finished at ``now``, so that the file has grown; see ``ReadPatience``."""
        self._patience.segment_finished(now)

    def reader_paused(self, now: float) -> None:
        """It is we who keep the servers waiting: the reader's time does not count."""
        self._patience.reader_paused(now)

    # Moves.

    def asks(
        self,
        now: float,
        runners: Sequence[Reader],
        geometry: Geometry | None,
        segments_left: tuple[int, int],
    ) -> Iterator[Ask]:
        """
        Say what to ask of each share that is read.

        Those who will win are asked for all at once, and held back by pausing them: no round trip, and
        no new connection, stands between one span and the next. Of the others a probe will do, until
        they prove to be faster.

        Args:
            runners: in the order in which they were taken up.
            geometry: the true one, once it is known.
            segments_left: [first, end).
        """
        favourites, others = runners, runners[:0]
        race = self.race
        if race.open:
            favourites = runners[: self._required_shares]
            others = runners[self._required_shares :]
            if geometry is not None and not self._hedged:
                most_segments = self.ahead_bytes // geometry.block_bytes
                race.consider_hedging(now, favourites, others, segments_left, most_segments)
        for runner in favourites:
            yield self._ask_all(runner.share_number)
        for runner in others:
            number = runner.share_number
            if self._hedged:
                yield Ask(number, min(RACE_BYTES, self.ahead_bytes))
            elif race.is_hedge(number):
                yield self._ask_all(number)
            else:
                yield Ask(number, 0, self._probe_bytes)

    def _ask_all(self, number: int) -> Ask:
        return Ask(number, EVERYTHING, part=self.race.parts.get(number))

    @property
    def wanted_extra(self) -> int:
        """How many more than k shares are to be read now."""
        return self.extra_shares if self.race.open else 0

    def wait_s(self, now: float) -> float:
        """Return how long to wait for the next event."""
        wait_s = self._patience.wait_s(now)
        due = self.race.due
        return wait_s if due is None else min(wait_s, max(0.0, due - now))

    def looks_for_laggards(self, now: float, runners: Sequence[Reader]) -> bool:
        """
        Let one more share join if it is time to look, and some keep the others waiting.

        Returns whether it was time: then a new period begins for all.
        """
        if not self._patience.is_hedge_due(now):
            return False
        if self._some_lag(runners):
            self.extra_shares = self.extra_shares + 1 if self.race.open else 1
            self.race.reopen()
            self._hedged = True
            self._patience.hedged()
        return True

    def is_silence_over(self, now: float) -> bool:
        """Return whether to give up those who owe something; the others get a whole period more."""
        return self._patience.is_silence_over(now)

    @property
    def last_activity(self) -> float:
        """When anything came last, however often silence was over since."""
        return self._patience.last_activity

    def _some_lag(self, runners: Sequence[Reader]) -> bool:
        """
        Return whether the segment waits for some servers while others have done their part.

        On a slow line all shares creep at the same pace: then one more would only slow the rest.
        """
        if self.race.open and not self._hedged:
            # Who was asked for a probe only has long given it.
            needed = self._required_shares
            helpers = [each for each in runners[needed:] if self.race.is_hedge(each.share_number)]
            runners = [*runners[:needed], *helpers]
        busy = [runner for runner in runners if runner.waiting and not runner.paused]
        if len(busy) < len(runners):
            return True
        paces = [runner.period_bytes for runner in busy]
        return not paces or 2 * min(paces) <= max(paces)


class ReadPatience:
    """
    How long a download waits, and for what: arithmetic over times that it is told.

    Args:
        hedge_s, silence_s: see the module.
        now: when the download began, on the caller's clock, in seconds.

    Attributes:
        last_activity: when anything came last, however often silence was over since.
    """

    def __init__(self, hedge_s: float, silence_s: float, now: float) -> None:
        self._hedge_s = hedge_s
        self._silence_s = silence_s
        self.last_activity = self._last_event = now
        self._last_progress = now

    # Facts.

    def something_came(self, now: float) -> None:
        """Some server has sent something."""
        self.last_activity = self._last_event = now

    def segment_finished(self, now: float) -> None:
        """A segment was finished at ``now``: from here on it is counted when to hedge."""
        self._last_progress = now

    def reader_paused(self, now: float) -> None:
        """It is we who keep the servers waiting: the reader's time does not count."""
        self.last_activity = self._last_event = self._last_progress = now

    def hedged(self) -> None:
        """One more share joins; a slow line is no reason to load it more and more."""
        self._hedge_s *= 2

    # Decisions.

    def wait_s(self, now: float) -> float:
        """Return how long to wait for the next event."""
        return max(0.0, min(self._hedge_at, self._silent_at) - now)

    def is_hedge_due(self, now: float) -> bool:
        """Return whether to look for servers that lag; the next time is a whole period later."""
        if now < self._hedge_at:
            return False
        self._last_progress = now
        return True

    def is_silence_over(self, now: float) -> bool:
        """Return whether to give up those who owe something; the others get a whole period more."""
        if now < self._silent_at:
            return False
        self._last_event = now
        return True

    @property
    def _hedge_at(self) -> float:
        return self._last_progress + self._hedge_s

    @property
    def _silent_at(self) -> float:
        return self._last_event + self._silence_s
