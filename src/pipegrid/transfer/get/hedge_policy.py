"""
Decisions of a download: which shares to read, when to send hedged requests, and which time limits apply.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from pipegrid.core.encoding_parameters import Geometry
from pipegrid.transfer.get.get_history import MIN_SAMPLE_BYTES, GetHistory
from pipegrid.transfer.settings import DownloadSettings

# Which shares serve a range: those of the first k servers of the ring (the primaries), and hedges that
# replace slow primaries.
#
# Primaries are asked for everything at once. The other shares are asked for a probe, a small part. When a
# share has delivered its probe while a primary lags, that share becomes a hedge and is asked for the rest. If
# one primary lags and two hedges are available, the hedges divide the work of the primary: one hedge gets the
# first part of the segments, the other hedge the rest. So the two make up for the round trip before the first
# hedge begins, if the servers do not share a link; a shared link is busy all the time anyway. A primary that
# is only slightly late is not replaced: bytes arrive in bursts, and replacing a server that is not slow costs
# bandwidth.
#
# Pure: reads the state of the shares, and returns what to request of which share.

_TOLERANCE = 0.125
"""How late a primary may be, as a fraction of the time that has passed since the read began."""


class RacingShare(Protocol):
    """The state of a share that is read in a hedged read."""

    @property
    def share_number(self) -> int:
        """The number of the share, 0 to 255; unique within the read."""

    @property
    def received_bytes(self) -> int:
        """Bytes of the share received so far."""

    @property
    def waiting(self) -> bool:
        """Whether requested bytes are outstanding."""


class HedgedRead:
    """
    The hedged read of one range.

    Args:
        started: when the read began.
        time_limit_s: least time to wait for a primary that lags: on a narrow link even a steady transfer
            arrives in bursts.

    Attributes:
        open: whether the race is running; it ends when it is known which shares are fast enough.
        parts: maps a share number to the segments [first, end) to read from that share; a share that is not
            listed is read for all segments.
        due: when the primaries that lag now are replaced if they still lag; None: no replacement is pending.
    """

    def __init__(self, started: float, time_limit_s: float = 0.0) -> None:
        self.open = True
        self.parts: dict[int, tuple[int, int]] = {}
        self.due: float | None = None
        self._started = started
        self._time_limit_s = time_limit_s
        self._hedges: set[int] = set()

    def is_hedge(self, share_number: int) -> bool:
        """Return whether a share that is not a primary is asked for more than a probe."""
        return share_number in self._hedges

    def consider_hedging(
        self,
        now: float,
        primaries: Sequence[RacingShare],
        others: Sequence[RacingShare],
        segments: tuple[int, int],
        most_segments: int,
    ) -> None:
        """
        Add hedges if primaries lag.

        Args:
            segments: [first, end) of the segments that are not delivered yet.
            most_segments: maximum length of the first part when two hedges divide the work: the blocks of the
                second part must be held in memory until the first part has arrived.
        """
        fastest = max((share.received_bytes for share in others), default=0)
        lagging = sum(2 * share.received_bytes < fastest for share in primaries)
        if lagging > 1:
            self.parts.clear()  # several primaries lag, so each hedge replaces a whole primary
        if not lagging or self._hedges or all(share.waiting for share in others):
            self.due = None
            return
        if self.due is None:
            self.due = now + max(self._time_limit_s, _TOLERANCE * (now - self._started))
        if now < self.due:
            return
        self.due = None
        hedges = [share.share_number for share in others if 2 * share.received_bytes >= fastest]
        self._hedges.update(hedges)
        first, end = segments
        if lagging == 1 and len(hedges) > 1 and end - first > 1:
            # if there are more than two hedges, only two of them are used
            middle = first + max(1, min((end - first) // 2, most_segments))
            self.parts = {hedges[0]: (middle, end), hedges[1]: (first, middle)}
            self._hedges = set(self.parts)

    def closed(self, share_number: int) -> None:
        """
        Record that a share is no longer read. If two hedges divided the work and one of them is closed, the
        other gets all the work.
        """
        self._hedges.discard(share_number)
        if share_number in self.parts:
            self.parts.clear()

    def end(self, numbers: Iterable[int]) -> set[int]:
        """
        End the race: the shares in ``numbers`` have provided the first segment. Return the shares to continue
        with.
        """
        self.open = False
        self.due = None
        winners = set(numbers)
        dividing = winners & self.parts.keys()
        if len(dividing) > 1:
            # two shares that divide the work count as one share, but k whole shares are needed
            self.parts.clear()
        return winners | set(self.parts) if dividing else winners

    def reopen(self) -> None:
        """
        Reopen the race, since some share has become slow: more shares are read, each for all remaining
        segments.
        """
        self.open = True
        self.due = None
        self.parts.clear()

    def done(self, next_segment: int) -> list[int]:
        """
        Return the shares whose part ends at or before ``next_segment``, so that they need not be read any
        more.
        """
        return [number for number, (_, end) in self.parts.items() if end <= next_segment]


# The decisions of one download: which shares to read, what to request of each, how long to wait, and when to
# add shares.
#
# Pure: the caller reports facts and gets requests. ``Download`` sends the requests; ``HedgedRead`` decides
# which shares serve the range.
#
# **Time limits.** Two limits run in parallel. When no segment has been finished for ``hedge_s``, the download
# checks whether some servers lag. When no byte has arrived for ``silence_s``, the servers with outstanding
# requests are given up.

EVERYTHING = 1 << 62

RACE_BYTES = 1 << 20
"""Bytes requested beyond the next block of a share added because others lag: 80 Mbit/s at 100 ms of RTT."""

PROBE_BYTES = 1 << 16
PROBE_SHARE = 64
"""
Divisor for the size of probes. For each extra share, all probes of a range of several segments have together
``PROBE_BYTES``, or the length of the range divided by ``PROBE_SHARE`` if that is more, but at most a block
each. Probes cost bandwidth and are nearly always wasted.
"""

NARROW_PROBE_BYTES = 1 << 13
"""Least size of all probes together on a link that is known to be narrow."""

BURSTS = 8
"""Divisor for the wait for a primary on a narrow link: the range's transfer time is divided by this."""

HEDGES = 2
"""
Number of servers per extra share among which the probe of a range of several segments is divided: two hedges
can make up for a lost round trip, one cannot.
"""


class Reader(RacingShare, Protocol):
    """The state of a share that is read."""

    @property
    def paused(self) -> bool:
        """Whether the client has paused the server, which delays all outstanding bytes."""

    @property
    def period_bytes(self) -> int:
        """Bytes received since the last check for servers that lag."""


class Ask(NamedTuple):
    """
    A request to a share's server, for bytes that the decoder wants.

    Attributes:
        ahead_bytes: how many bytes to read beyond the next block.
        most_bytes: maximum size of the request; None: no limit.
        part: the segments [first, end) to read; None: all segments.
    """

    share_number: int
    ahead_bytes: int
    most_bytes: int | None = None
    part: tuple[int, int] | None = None


class ReadPolicy:
    """
    The decisions of one download.

    Args:
        length: size of the range to fetch, in bytes of the file.
        geometry: the geometry that follows from the cap.
        found_bytes: bytes of the range that may be in the part file already.
        now: when the download began, on the caller's clock, in seconds.

    Attributes:
        extra_shares: number of shares beyond k that are read while the race is open.
        ahead_bytes: maximum number of bytes to hold of each share before its server is paused.
        race: which shares are read, and for which segments.
        timeouts: decides when servers lag or are silent.
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
        length -= found_bytes  # bytes to fetch, as far as is known
        several = length > geometry.segment_bytes
        narrow = line.is_narrow_for(settings.extra_shares * geometry.block_bytes)
        least_bytes = NARROW_PROBE_BYTES if narrow else PROBE_BYTES
        # A resumed download should fetch little more than what is missing, so its probes are small; if a
        # segment is damaged, a second probe may follow.
        share_bytes = 0 if found_bytes else length // PROBE_SHARE
        probes = several or narrow
        self._probe_bytes = (
            max(least_bytes, share_bytes) // HEDGES if probes else geometry.block_bytes
        )
        self.extra_shares = HEDGES * settings.extra_shares if probes else settings.extra_shares
        self.ahead_bytes = settings.memory_bytes // (self._required_shares + self.extra_shares)
        self.race = HedgedRead(now, line.time_s(length) / BURSTS if narrow else 0.0)
        # A server that is slow only because the link is narrow does not count as lagging.
        hedge_s = max(settings.hedge_s, 2 * line.time_s(geometry.segment_bytes))
        self.timeouts = ReadTimeouts(hedge_s, settings.silence_s, now)
        self._hedged = False
        self._misplaced = False
        self._seen_bytes = 0
        self._first_seen: tuple[int, float] | None = None
        self._sample_bytes = max(MIN_SAMPLE_BYTES, geometry.segment_bytes // 2)

    # Facts.

    def began(self) -> bool:
        """
        Record that the first requests are about to be sent; return whether servers are also asked for
        their lists.
        """
        needs_lists = self._guesses.needs_lists
        self._guesses.began()
        return needs_lists

    def ended(self) -> None:
        """Record that the download has ended, with or without success."""
        self._guesses.ended()

    def succeeded(self) -> None:
        """Record that everything was delivered; if no share was misplaced, record a right guess."""
        if not self._misplaced:
            self._guesses.found(True)

    def misplaced(self) -> None:
        """
        Record at once that an expected share is not on its server, so that other downloads ask for lists.
        """
        if not self._misplaced:
            self._misplaced = True
            self._guesses.found(False)

    def answered(self, now: float, elapsed_s: float | None) -> None:
        """
        Record that a server has returned its list of shares after ``elapsed_s`` seconds, or has failed
        (None).
        """
        self.timeouts.something_came(now)
        if elapsed_s is not None:
            self._line.note_response(elapsed_s)

    def seen(self, now: float, seen_bytes: int) -> None:
        """Record how many bytes all open shares together have received."""
        if seen_bytes == self._seen_bytes:
            return
        if seen_bytes > self._seen_bytes:
            self._note_rate(now, seen_bytes)
        self._seen_bytes = seen_bytes
        self.timeouts.something_came(now)

    def _note_rate(self, now: float, seen_bytes: int) -> None:
        """Record the transfer rate since the first bytes, once enough bytes have arrived."""
        if self._first_seen is None:
            self._first_seen = (seen_bytes, now)
            return
        first_bytes, first_s = self._first_seen
        if seen_bytes - first_bytes >= self._sample_bytes:
            self._line.note_bytes(seen_bytes - first_bytes, now - first_s)
            self._first_seen = (seen_bytes, now)

    # Moves.

    def asks(
        self,
        now: float,
        shares: Sequence[Reader],
        geometry: Geometry | None,
        segments_left: tuple[int, int],
    ) -> Iterator[Ask]:
        """
        Yield what to request of each share that is read.

        Shares that will be used are asked for everything at once, and their servers are paused as needed: so
        no round trip passes, and no new connection is made, between one span and the next. The other shares
        are asked only for a probe, until they prove to be faster.

        Args:
            shares: the shares, in the order in which they were opened.
            geometry: the verified geometry, once it is known.
            segments_left: the segments [first, end) that are not delivered yet.
        """
        primaries, others = shares, shares[:0]
        race = self.race
        if race.open:
            primaries = shares[: self._required_shares]
            others = shares[self._required_shares :]
            if geometry is not None and not self._hedged:
                most_segments = self.ahead_bytes // geometry.block_bytes
                race.consider_hedging(now, primaries, others, segments_left, most_segments)
        for share in primaries:
            yield self._ask_all(share.share_number)
        for share in others:
            number = share.share_number
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
        """Number of shares beyond k to read now."""
        return self.extra_shares if self.race.open else 0

    def wait_s(self, now: float) -> float:
        """Return how long to wait for the next event, in seconds."""
        wait_s = self.timeouts.wait_s(now)
        due = self.race.due
        return wait_s if due is None else min(wait_s, max(0.0, due - now))

    def looks_for_laggards(self, now: float, shares: Sequence[Reader]) -> bool:
        """
        Add one more share if a check is due and some servers delay the others.

        Returns whether a check was due; if so, the caller must reset ``period_bytes`` of all shares.
        """
        if not self.timeouts.is_hedge_due(now):
            return False
        if self._some_lag(shares):
            self.extra_shares = self.extra_shares + 1 if self.race.open else 1
            self.race.reopen()
            self._hedged = True
            self.timeouts.hedged()
        return True

    def _some_lag(self, shares: Sequence[Reader]) -> bool:
        """
        Return whether some servers have delivered all requested bytes, or are much faster, while the segment
        waits for others.

        On a slow link all shares are equally slow, and one more share would only slow down the rest.
        """
        if self.race.open and not self._hedged:
            # A share that was asked only for a probe has delivered the probe long ago, so it says nothing
            # about speed.
            needed = self._required_shares
            hedges = [each for each in shares[needed:] if self.race.is_hedge(each.share_number)]
            shares = [*shares[:needed], *hedges]
        busy = [share for share in shares if share.waiting and not share.paused]
        if len(busy) < len(shares):
            return True
        paces = [share.period_bytes for share in busy]
        return not paces or 2 * min(paces) <= max(paces)


class ReadTimeouts:
    """
    Time limits of a download, computed from times that the caller passes.

    Args:
        hedge_s, silence_s: see ``DownloadSettings``.
        now: when the download began, on the caller's clock, in seconds.

    Attributes:
        last_activity: when the last bytes arrived; ``is_silence_over`` does not change this time.
    """

    def __init__(self, hedge_s: float, silence_s: float, now: float) -> None:
        self._hedge_s = hedge_s
        self._silence_s = silence_s
        self.last_activity = self._last_event = now
        self._last_progress = now

    # Facts.

    def something_came(self, now: float) -> None:
        """Record that some server has sent something."""
        self.last_activity = self._last_event = now

    def segment_finished(self, now: float) -> None:
        """Restart the time limit for hedging, since a segment was finished at ``now``."""
        self._last_progress = now

    def reader_paused(self, now: float) -> None:
        """Restart the time limits, since the reader of the plaintext delays the servers."""
        self.last_activity = self._last_event = self._last_progress = now

    def hedged(self) -> None:
        """
        Double the time limit for hedging after a share was added, so that a slow link is not loaded more and
        more.
        """
        self._hedge_s *= 2

    # Decisions.

    def wait_s(self, now: float) -> float:
        """Return how many seconds remain until the next time limit."""
        return max(0.0, min(self._hedge_at, self._silent_at) - now)

    def is_hedge_due(self, now: float) -> bool:
        """Return whether to check for servers that lag; if so, the next check is due a full period later."""
        if now < self._hedge_at:
            return False
        self._last_progress = now
        return True

    def is_silence_over(self, now: float) -> bool:
        """
        Return whether to give up servers with outstanding requests; the remaining servers get another full
        period.
        """
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
