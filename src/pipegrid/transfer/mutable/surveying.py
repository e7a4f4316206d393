"""
Asking servers about a mutable file: whom, how many, and when it is enough.

The first servers of the ring are asked at once, where writers put shares: as many as the file has shares, for
writers k more; then everybody, in waves that double. Servers that lag behind when all else is clear are given
their grace, and no more. Waiting ends when a reader may take what it has (``mapping.is_settled``), or when
all who were asked have answered.
"""

from __future__ import annotations

from collections.abc import Callable

from pipegrid.core.mutable.book import ShareBook
from pipegrid.errors import CorruptionError, ServerError
from pipegrid.transfer.mutable.mapping import ShareMap, Spoilt, is_settled, is_whole
from pipegrid.transfer.mutable.slot import Slot
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.underway import RequestsUnderWay

Hints = dict[Peer, frozenset[int]]
"""Which shares servers had when they were last asked."""


class FileSurvey:
    """
    One look at a file.

    Args:
        read_bytes: of the beginning of each share.
        hints: these servers are asked first, too.
        usual: how many shares, k and n, a file has whose version is not known yet.
        opens_key: take the signing key from the first share that has it, while others are waited for: that
            takes milliseconds.
        spoilt: shares that earlier looks were misled by.
    """

    def __init__(
        self,
        slot: Slot,
        book: ShareBook,
        read_bytes: int,
        hints: Hints,
        usual: tuple[int, int],
        *,
        opens_key: bool = False,
        spoilt: Spoilt | None = None,
    ) -> None:
        self._slot = slot
        self._read_bytes = read_bytes
        self._hints = hints
        self._usual = usual
        self._opens_key = opens_key
        self._requests: RequestsUnderWay[Peer] = RequestsUnderWay(slot.clock)
        self._left = [*hints, *(peer for peer in slot.peers if peer not in hints)]
        self.found = ShareMap(book, spoilt)

    async def for_reader(self, least: tuple[int, bytes]) -> ShareMap:
        """
        Ask until there is a version to read, or nobody is left.

        Args:
            least: sequence number and root hash of the newest version seen before.
        """
        k, n = self._usual
        # What was acknowledged by happy servers of n is on k, at least, of so many.
        wanted = min(max(2 * k, n - min(self._slot.settings.happy, n) + k), n)
        return await self._ask(n, least, lambda: is_settled(self.found, wanted, least))

    async def for_writer(self, least: tuple[int, bytes], quorum: int) -> ShareMap:
        """
        Ask those who may have shares, until all shares are known, or all have answered.

        Shares that are known on fewer servers than they could be on may have copies on others, too: a writer
        that does not know of these would leave them behind.

        Args:
            quorum: so many servers are waited for, however slow they are.
        """
        k, n = self._usual
        return await self._ask(
            n + k,
            least,
            lambda: (
                is_whole(self.found, len(self._slot.peers))
                and is_settled(self.found, quorum, least)
            ),
            quorum,
        )

    async def everyone(self, quorum: int = 0) -> ShareMap:
        """Ask all servers, and wait for all but those that lag far behind; see ``for_writer``."""
        return await self._ask(len(self._left), (0, b""), lambda: False, quorum)

    async def _ask(
        self,
        first: int,
        least: tuple[int, bytes],
        is_enough: Callable[[], bool],
        quorum: int = 0,
    ) -> ShareMap:
        clock, settings = self._slot.clock, self._slot.settings
        began_s = clock.seconds()
        grace_ends_s: float | None = None
        wave = max(first, len(self._hints))
        try:
            while True:
                if is_enough():
                    return self.found
                if (
                    not self._requests.running
                    or (grace_ends_s or clock.seconds() + 1) <= clock.seconds()
                ):
                    if is_settled(self.found, quorum, least) or not self._left:
                        return self.found
                    self._start(wave)
                    wave *= 2
                    grace_ends_s = None
                elif (
                    grace_ends_s is None
                    and self._left_few()
                    and is_settled(self.found, quorum, least)
                ):
                    grace_ends_s = clock.seconds() + settings.grace(clock.seconds() - began_s)
                timeout_s = None if grace_ends_s is None else grace_ends_s - clock.seconds()
                await self._requests.wait(timeout_s)
        finally:
            self._requests.cancel()

    def _left_few(self) -> bool:
        return len(self._requests.running) <= max(1, self.found.answered)

    def _start(self, count: int) -> None:
        peers, self._left = self._left[:count], self._left[count:]
        for peer in peers:
            self._requests.start(self._look(peer), peer)
        self._requests.changed.fire()

    async def _look(self, peer: Peer) -> None:
        try:
            data = await self._slot.look(peer, self._read_bytes, self._expected(peer))
        except ServerError as error:
            self.found.failed_to_answer(peer, error)
        else:
            self.found.heard(peer, data, self._read_bytes)
            if self._opens_key and self.found.book.signing_key is None:
                self._open_key(peer)

    def _open_key(self, peer: Peer) -> None:
        for copy in self.found.copies[peer].values():
            if copy.share is not None:
                try:
                    self.found.book.open_signing_key(copy.share)
                except CorruptionError:  # whoever needs the key asks for it, and says so then
                    continue

    def _expected(self, peer: Peer) -> frozenset[int]:
        """Return which shares a server has if writers have put them where they always do."""
        if peer in self._hints:
            return self._hints[peer]
        _, n = self._usual
        place = self._slot.peers.index(peer)
        return frozenset(range(place, n, len(self._slot.peers)))
