"""Download a small file as whole shares, with one request per server."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure

from pipegrid.core.caps import ChkCap
from pipegrid.core.segment_decoding import (
    Unexpected,
    WholeShareForm,
    decode_whole,
    whole_share_form,
)
from pipegrid.errors import NoSuchShare, ServerError, ServerUnreachable
from pipegrid.reactor.deferreds import Deadlines
from pipegrid.transfer.get.get_history import GetHistory, NotAsExpected
from pipegrid.transfer.peers import Peer, TransferContext, ring
from pipegrid.transfer.results import GetResult, Traffic
from pipegrid.transfer.settings import DownloadSettings
from pipegrid.transfer.time_limits import MOST_TIMES, last_activity_s
from pipegrid.transport.interface import read_small

# Nearly every small file that is fetched among many others is read this way. It does not need the spans,
# streams, readers and hedges of ``Download``, which would take most of the time. If servers are late, the
# next shares are requested as well, once. If a server cannot be reached, and fewer than k other requests can
# succeed, one more share is requested. If a share is damaged, too many shares are missing, or the additional
# shares are late as well, a ``Download`` fetches the file from the beginning: it finds other shares, and
# reports which share is damaged and how.
#
# For a single file, one share more than needed is read, so that one slow server has no effect. In a tree the
# extra shares would be a quarter of all work. Instead, if one of the first servers has far more unanswered
# reads than the next server in the ring, that next server is used in its place, so that few files wait for a
# slow server.
#
# On a slow link the reads of a tree wait for one another, often longer than a server may be silent to a
# single transfer. More reads would only increase the wait. So an active server does not count as late while
# the oldest unanswered read of the next server in the ring has waited at least half as long.
#
# Everything happens in callbacks of the responses, without coroutines: for a file of a kilobyte, one
# coroutine per step would take a considerable part of the time.

BUSY_READS = 64
"""A server is not asked first if its unanswered reads exceed this plus twice those of the next server."""

BUSY_TIMES = 100
"""
How long an active server may be silent to a download while the next server in the ring responds no sooner, as
a multiple of ``hedge_s``; if the next server responds sooner, ``MOST_TIMES`` applies.
"""

_SOON_S = 0.001

SmallFile = tuple[bytes, GetResult]
"""The plaintext, and the result of the get."""


class SmallFileGets:
    """
    What the downloads of small files of one client share.

    Attributes:
        earlier: results of earlier downloads; each download adds its own result.
        deadlines: notifies downloads that take too long.
        unanswered: maps each server to its unanswered reads, in order, with the times when they were sent.
    """

    __slots__ = ("deadlines", "earlier", "means", "settings", "unanswered")

    def __init__(
        self,
        means: TransferContext,
        settings: DownloadSettings,
        earlier: GetHistory,
        deadlines: Deadlines,
    ) -> None:
        self.means = means
        self.settings = settings
        self.earlier = earlier
        self.deadlines = deadlines
        self.unanswered: dict[Peer, dict[object, float]] = defaultdict(dict)

    def get(self, cap: ChkCap, traffic: Traffic | None = None) -> Deferred[SmallFile] | None:
        """
        Fetch a file if it is small, and its shares are probably on the expected servers.

        Args:
            traffic: gets each share that arrives before the file is complete.

        Returns:
            A Deferred; or None if no server was asked, and the caller must use a ``Download``. If the
                Deferred fails with ``NotAsExpected``, the caller must use a ``Download`` that asks for lists.
        """
        if self.earlier.guesses.needs_lists:
            return None
        form = whole_share_form(cap)
        if form is None or form.geometry.segment_bytes > self.settings.max_segment_bytes:
            return None
        extra_shares = self.settings.extra_shares
        if self.earlier.guesses.trees or self.earlier.line.is_narrow_for(
            extra_shares * form.share_bytes
        ):
            extra_shares = 0
        index = cap.storage_index
        order = ring(index, self.means.peers)[: cap.total_shares]
        racers = min(cap.required_shares + extra_shares, cap.total_shares)
        if len(order) < racers:
            return None
        numbers = list(range(len(order)))
        if self.earlier.guesses.trees:
            self._skip_busiest(numbers, order, racers)
        download = SmallFileDownload(self, cap, index, form, order, numbers)
        download.traffic = traffic
        download.begin(racers)
        return download.result

    def _skip_busiest(self, numbers: list[int], order: Sequence[Peer], first: int) -> None:
        """Move the busiest of the first servers to the end, if the server after them is far less busy."""
        if len(order) == first:
            return
        unanswered = self.unanswered
        most, busiest = max((len(unanswered[order[number]]), number) for number in range(first))
        if most > BUSY_READS + 2 * len(unanswered[order[first]]):
            numbers.remove(busiest)
            numbers.append(busiest)


class SmallFileDownload:
    """
    The download of one small file from the servers where its first shares should be.

    Args:
        index: the storage index of the cap.
        order: the servers, at least k; share ``i`` is read from server ``i``.
        numbers: the share numbers, in the order in which the shares are requested.

    Attributes:
        traffic: see ``SmallFileGets.get``.
        result: see ``SmallFileGets.get``.
    """

    __slots__ = (
        "_asked",
        "_cap",
        "_failed",
        "_form",
        "_gets",
        "_hedges",
        "_index",
        "_misplaced",
        "_numbers",
        "_order",
        "_over",
        "_shares",
        "_since_s",
        "_started",
        "_unanswered",
        "result",
        "traffic",
    )

    def __init__(
        self,
        gets: SmallFileGets,
        cap: ChkCap,
        index: bytes,
        form: WholeShareForm,
        order: Sequence[Peer],
        numbers: Sequence[int],
    ) -> None:
        self._gets = gets
        self._cap = cap
        self._index = index
        self._form = form
        self._order = order
        self._numbers = numbers
        self._started = self._since_s = gets.means.clock.seconds()
        self._unanswered: dict[int, Deferred[Any]] = {}
        self._shares: dict[int, bytes] = {}
        self._asked = 0
        self._hedges: Sequence[int] = ()  # shares requested because others were late
        self._failed = 0
        self._misplaced = self._over = False
        self.traffic: Traffic | None = None
        self.result: Deferred[SmallFile] = Deferred(self._cancelled)

    def begin(self, racers: int) -> None:
        """Request the first ``racers`` shares."""
        self._gets.earlier.guesses.began()
        self._gets.deadlines.add(self)
        try:
            self._ask(racers)
        except BaseException:
            self._end()
            raise

    @property
    def due_s(self) -> float:
        """
        The time at which some server that must respond will have been silent for ``hedge_s`` if it stays
        silent; ``overdue`` is called then.
        """
        hedge_s = self._gets.settings.hedge_s
        soonest_s = self._since_s + hedge_s
        if self._gets.means.clock.seconds() < soonest_s - _SOON_S:
            return soonest_s  # so the servers' last activity need not be looked up
        hedges = self._hedges
        times = BUSY_TIMES if self._next_is_as_late() else MOST_TIMES
        signs = [
            last_activity_s(self._since_s, self._order[number].last_activity, hedge_s, times)
            for number in self._unanswered
            if not hedges or number in hedges
        ]
        return min(signs, default=self._since_s) + hedge_s

    def _next_is_as_late(self) -> bool:
        """
        Return whether the oldest unanswered read of the next server in order has waited at least half as long
        as this download.
        """
        if self._asked == len(self._numbers):
            return False
        following = self._order[self._numbers[self._asked]]
        now_s = self._gets.means.clock.seconds()
        oldest_s = next(iter(self._gets.unanswered[following].values()), now_s)
        return 2 * (now_s - oldest_s) >= now_s - self._since_s

    def overdue(self) -> None:
        """
        Request as many further shares as are missing, and the usual extra shares; or fail if this was done
        before.
        """
        missing = self._cap.required_shares - len(self._shares) + self._gets.settings.extra_shares
        hedges = self._numbers[self._asked : self._asked + missing]
        if self._hedges or not hedges:
            self._fail(NotAsExpected())
            return
        self._hedges = hedges
        self._since_s = self._gets.means.clock.seconds()
        self._gets.deadlines.add(self)
        self._ask(len(hedges))

    def _ask(self, shares: int) -> None:
        first, self._asked = self._asked, self._asked + shares
        index, length = self._index, self._form.share_bytes
        for number in self._numbers[first : self._asked]:
            if self._over:
                return
            peer = self._order[number]
            call = read_small(peer.server, index, number, length)
            self._unanswered[number] = call
            self._gets.unanswered[peer][self, number] = self._gets.means.clock.seconds()
            call.addBoth(self._answered, number)

    def _answered(self, result: bytes | Failure, number: int) -> None:
        self._unanswered.pop(number, None)
        peer = self._order[number]
        asked_s = self._gets.unanswered[peer].pop((self, number))
        if self._over:
            return
        if isinstance(result, bytes):
            self._shares[number] = result
            if self.traffic is not None and not self._report(self.traffic, peer, asked_s, result):
                return
            if len(self._shares) == self._cap.required_shares:
                self._decode()
        elif not result.check(ServerError, CancelledError):
            self._fail(result)
        else:
            if result.check(NoSuchShare) and not self._misplaced:
                self._misplaced = True
                self._gets.earlier.guesses.found(False)
            self._failed += 1
            if self._asked - self._failed < self._cap.required_shares:
                if result.check(ServerUnreachable) and self._asked < len(self._order):
                    self._ask(1)
                else:
                    self._fail(NotAsExpected())

    def _report(self, traffic: Traffic, peer: Peer, asked_s: float, share: bytes) -> bool:
        """
        Report a share to ``traffic``; return whether the download continues: the report may raise, or cancel
        the download.
        """
        try:
            traffic(peer.identity, asked_s, self._gets.means.clock.seconds(), len(share))
        except Exception:
            if not self._over:
                self._fail(Failure())
        return not self._over

    def _decode(self) -> None:
        guesses = self._gets.earlier.guesses
        self._end()
        try:
            plaintext = decode_whole(self._cap, self._form, self._shares)
        except Unexpected:
            guesses.found(False)
            self.result.errback(NotAsExpected())
            return
        except Exception:  # otherwise the exception would end up in the response of one server
            self.result.errback(Failure())
            return
        if not self._misplaced:
            guesses.found(True)
        used = {number: self._order[number].name for number in sorted(self._shares)}
        elapsed_s = self._gets.means.clock.seconds() - self._started
        self.result.callback((plaintext, GetResult(len(plaintext), used, [], elapsed_s)))

    def _fail(self, error: Failure | Exception) -> None:
        self._end()
        self.result.errback(error)

    def _cancelled(self, _: object) -> None:
        self._end()

    def _end(self) -> None:
        """End the download and cancel all unanswered reads."""
        self._over = True
        self._gets.earlier.guesses.ended()
        self._gets.deadlines.discard(self)
        unanswered, self._unanswered = self._unanswered, {}
        for call in unanswered.values():
            call.cancel()
