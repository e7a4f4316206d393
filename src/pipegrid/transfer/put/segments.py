"""
What is coded goes to the ways that are open, and what some have missed is coded again for them.

Every segment goes by once, in order. A way that was opened late, or lost a connection, is given what it
missed behind the last one, coded again from the source: nothing is kept for it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from pipegrid.core.caps import ChkCap
from pipegrid.core.encoder import Encoder, ShareWrite
from pipegrid.transfer.peers import Means
from pipegrid.transfer.put.codingline import CodingLine
from pipegrid.transfer.put.keyedfile import KeyedFile
from pipegrid.transfer.put.openways import OpenWays
from pipegrid.transfer.put.shareway import ShareWay

WaitForRoom = Callable[[], Coroutine[Any, Any, None]]


class Segments:
    """
    The segments of one upload.

    Attributes:
        gone_by: how many have been given to the ways that were open then.
    """

    def __init__(self, file: KeyedFile, means: Means, ways: OpenWays) -> None:
        self.gone_by = 0
        self._geometry = file.geometry
        self._source = file.source
        self._workers = means.workers
        self._ways = ways
        self._encoder = Encoder(file.geometry, file.key)
        self._line = CodingLine(self._encoder, file.source, means.workers)

    @property
    def cap(self) -> ChkCap:
        """The file's capability; there is none before the trailers are sent."""
        return self._encoder.cap

    def close(self) -> None:
        """Code no more segments ahead; what runs in a thread ends by itself."""
        self._line.close()

    async def send_blocks(self, wait_for_room: WaitForRoom) -> None:
        """
        Send the blocks of every segment to those that are open when it goes by.

        Args:
            wait_for_room: awaited before each; raises what ends the upload.
        """
        for index in range(self._geometry.num_segments):
            await wait_for_room()
            coded = await self._line.take()
            _send(self._encoder.add(coded), index, self._ways.open)
            self.gone_by = index + 1

    async def send_trailers(self) -> None:
        """Send what stands behind the blocks, which makes the file's cap."""
        trees = 32 * self._geometry.num_segments * self._geometry.total_shares
        writes = await self._workers.run_if_large(16 * trees, self._encoder.finish)
        _send(writes, None, self._ways.open)

    async def send_missed(self, late: Sequence[ShareWay], wait_for_room: WaitForRoom) -> None:
        """Code again, and send, what ways that were opened late have missed, or have lost."""
        geometry = self._geometry
        assert self.gone_by == geometry.num_segments
        missed = [way.missed for way in late if way.missed]
        first = min((each.start for each in missed), default=0)
        for index in range(first, max((each.stop for each in missed), default=0)):
            await wait_for_room()
            # A way whose turn is not now may just have lost something that is earlier: next time.
            joining = [way for way in late if way.misses_next(index)]
            if joining:
                shares = {way.share_number for way in joining}
                size = 8 * geometry.segment_length(index)
                writes = await self._workers.run_if_large(size, self._recode, index, shares)
                # Meanwhile one may have lost more.
                _send(writes, index, [way for way in joining if way.misses_next(index)])
        for way in late:
            if way.missed or not way.is_open:
                continue
            if not way.has_trailer:
                way.send(self._encoder.trailer(way.share_number))
            way.finish()

    def _recode(self, index: int, shares: set[int]) -> list[ShareWrite]:
        geometry = self._geometry
        plaintext = self._source.read_at(
            index * geometry.segment_bytes, geometry.segment_length(index)
        )
        return self._encoder.recode(index, plaintext, shares)


def _send(writes: Iterable[ShareWrite], segment: int | None, ways: Iterable[ShareWay]) -> None:
    by_share: dict[int, list[ShareWay]] = {}
    for way in ways:
        by_share.setdefault(way.share_number, []).append(way)
    for write in writes:
        for way in by_share.get(write.share_number, ()):
            way.send(write, segment)
