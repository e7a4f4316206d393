"""Download of a small file: whole shares, one request per server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure

from pipegrid.core.caps import ChkCap
from pipegrid.core.small_file_decoder import (
    Unexpected,
    WholeShareForm,
    decode_whole,
    whole_share_form,
)
from pipegrid.errors import NoSuchShare, ServerError
from pipegrid.reactor.deferreds import Deadlines
from pipegrid.transfer.get.get_history import GetHistory, NotAsExpected
from pipegrid.transfer.peers import Peer, TransferContext, last_activity_s, ring
from pipegrid.transfer.results import GetResult
from pipegrid.transfer.settings import DownloadSettings
from pipegrid.transport.interface import read_small

# Nearly every small file that is fetched among many others is read this way. The spans, streams, readers
# and hedges of ``Download`` are not needed for it, and would take most of its time. If a share is missing,
# damaged or late, a ``Download`` fetches the file from the beginning: it finds other shares, and says what
# is wrong with which.


@attrs.frozen
class SmallFileGets:
    """
    What the downloads of small files of one client share.

    Attributes:
        earlier: results of earlier downloads; each download adds its own.
        deadlines: notifies downloads that take too long.
    """

    means: TransferContext
    settings: DownloadSettings
    earlier: GetHistory
    deadlines: Deadlines

    async def get(self, cap: ChkCap) -> tuple[bytes, GetResult] | None:
        """
        Fetch a file if it is small, and its shares are probably on the expected servers.

        Returns:
            The plaintext and the result; None if nothing was asked, and a ``Download`` must fetch the file.

        Raises:
            NotAsExpected: a ``Download`` that asks for lists must fetch it.
        """
        if self.earlier.guesses.needs_lists:
            return None
        form = whole_share_form(cap)
        if form is None or form.geometry.segment_bytes > self.settings.max_segment_bytes:
            return None
        extra_shares = self.settings.extra_shares
        if self.earlier.line.is_narrow_for(extra_shares * form.share_bytes):
            extra_shares = 0
        order = ring(cap.storage_index, self.means.peers)
        racers = min(cap.required_shares + extra_shares, cap.total_shares)
        if len(order) < racers:
            return None
        return await SmallFileDownload(self, cap, form, order[:racers]).run()


class SmallFileDownload:
    """
    The download of one small file from the servers where its first shares should be.

    Args:
        order: the servers, at least k; share ``i`` is read from server ``i``.
    """

    def __init__(
        self, gets: SmallFileGets, cap: ChkCap, form: WholeShareForm, order: Sequence[Peer]
    ) -> None:
        self._gets = gets
        self._cap = cap
        self._form = form
        self._order = order
        self._started = gets.means.clock.seconds()
        self._unanswered: dict[int, Deferred[Any]] = {}
        self._shares: dict[int, bytes] = {}
        self._failed = 0
        self._misplaced = False
        self._done: Deferred[bool] = Deferred()

    async def run(self) -> tuple[bytes, GetResult]:
        """Fetch the file, or raise ``NotAsExpected``."""
        gets, guesses = self._gets, self._gets.earlier.guesses
        guesses.began()
        gets.deadlines.add(self)
        try:
            self._send()
            if not await self._done:
                raise NotAsExpected
        finally:
            guesses.ended()
            gets.deadlines.discard(self)
            for call in list(self._unanswered.values()):
                call.cancel()
        try:
            plaintext = decode_whole(self._cap, self._form, self._shares)
        except Unexpected:
            guesses.found(False)
            raise NotAsExpected from None
        if not self._misplaced:
            guesses.found(True)
        used = {number: self._order[number].name for number in sorted(self._shares)}
        elapsed_s = gets.means.clock.seconds() - self._started
        return plaintext, GetResult(len(plaintext), used, [], elapsed_s)

    @property
    def due_s(self) -> float:
        """When a ``Download`` must take over: some server has been silent for longer than hedging waits."""
        hedge_s = self._gets.settings.hedge_s
        signs = (
            last_activity_s(self._started, self._order[number].last_activity, hedge_s)
            for number in self._unanswered
        )
        return min(signs, default=self._started) + hedge_s

    def overdue(self) -> None:
        """End this download because it takes too long."""
        self._end(False)

    def _send(self) -> None:
        length = self._form.share_bytes
        for number, peer in enumerate(self._order):
            call = read_small(peer.server, self._cap.storage_index, number, length)
            self._unanswered[number] = call
            call.addBoth(self._answered, number)

    def _answered(self, result: bytes | Failure, number: int) -> None:
        self._unanswered.pop(number, None)
        if self._done.called:
            return
        if isinstance(result, Failure):
            if not result.check(ServerError, CancelledError):
                self._done.errback(result)
                return
            if result.check(NoSuchShare) and not self._misplaced:
                self._misplaced = True
                self._gets.earlier.guesses.found(False)
            self._failed += 1
            if len(self._order) - self._failed < self._cap.required_shares:
                self._end(False)
            return
        self._shares[number] = result
        if len(self._shares) == self._cap.required_shares:
            self._end(True)

    def _end(self, has_shares: bool) -> None:
        if not self._done.called:
            self._done.callback(has_shares)
