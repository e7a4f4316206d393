"""
Shares made again of other shares: their ciphertext is fetched, segment by segment, and coded as at first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from twisted.internet.defer import Deferred

from pipegrid.core.caps import ChkVerifierCap
from pipegrid.core.encoder import CodedSegment, ShareWrite
from pipegrid.core.reencoder import Reencoder
from pipegrid.transfer.found import FoundShares
from pipegrid.transfer.get.download import Download
from pipegrid.transfer.get.segmentfeed import SegmentFeed
from pipegrid.transfer.peers import Means
from pipegrid.transfer.settings import DownloadSettings


class Recoding:
    """The shares of one file, from those that are good."""

    def __init__(self, means: Means, cap: ChkVerifierCap, settings: DownloadSettings) -> None:
        self._means = means
        self._cap = cap
        self._settings = settings

    @asynccontextmanager
    async def ciphertext(
        self, encoder: Reencoder, found: FoundShares
    ) -> AsyncIterator[SegmentFeed]:
        """Fetch the file's ciphertext, as long as it is wanted."""
        feed = SegmentFeed(encoder.geometry)
        download = Download(
            self._means,
            cap=self._cap,
            sink=feed,
            start=0,
            length=self._cap.size,
            settings=self._settings,
            avoid=found.bad,
            holders=found.holders,
        )
        running = Deferred.fromCoroutine(download.run()).addBoth(feed.ended)
        try:
            yield feed
        finally:
            running.cancel()

    async def coded(
        self,
        encoder: Reencoder,
        index: int,
        ciphertext: list[memoryview],
        numbers: set[int] | None = None,
    ) -> CodedSegment:
        """Return a segment coded; ``numbers``: of the shares whose blocks are wanted, None: of all."""
        size = 8 * encoder.geometry.segment_length(index)
        return await self._means.workers.run_if_large(size, _code, encoder, ciphertext, numbers)

    async def shares(
        self, encoder: Reencoder, found: FoundShares
    ) -> AsyncIterator[list[ShareWrite]]:
        """Yield what is to be written of all shares, segment by segment, and what stands behind."""
        async with self.ciphertext(encoder, found) as feed:
            for index in range(encoder.geometry.num_segments):
                yield encoder.add(await self.coded(encoder, index, await feed.take()))
        yield encoder.finish()


def _code(
    encoder: Reencoder, ciphertext: list[memoryview], numbers: set[int] | None
) -> CodedSegment:
    # All hashes are needed, but only some blocks.
    return encoder.code(encoder.encrypt(ciphertext), numbers)
