"""
From a source to a cap: everything about a put that comes before and around the upload itself.

Small files become literal caps. Files of one segment are read once and coded from memory, so that
what makes the key is what is stored whatever happens to the file; larger ones are read twice and
checked for changes in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from pipegrid.core.caps import LitCap, is_literal_size
from pipegrid.core.leases import ClientSecrets
from pipegrid.core.params import Geometry, Params
from pipegrid.errors import SourceError, UnhappyError
from pipegrid.flow.budget import Budget
from pipegrid.flow.turns import Turns
from pipegrid.flow.workers import CpuWorkers
from pipegrid.transfer.codingline import DEPTH
from pipegrid.transfer.keys import convergent_key, random_key
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.progress import Progress
from pipegrid.transfer.results import PutResult
from pipegrid.transfer.settings import UploadSettings
from pipegrid.transfer.source import BytesSource, Source, SourceLike, open_source
from pipegrid.transfer.upload import Upload

_CONTENTION_WAITS_S = (0.25, 0.5, 1.0, 2.0, 4.0)
"""
How long to wait, time after time, where happiness fails because somebody else is just uploading the
same shares: when they are done, these are found in place.
"""

_FILES_PER_TURN = 4
"""Small files are coded on the reactor; so many take some 5 ms."""

_OVERHEAD_BYTES = 64 << 10
"""What the objects of even the smallest upload take."""


class Putter:
    """
    Stores files on one grid; any number at the same time.

    Args:
        memory: what all uploads together may hold while they code.
    """

    def __init__(
        self,
        *,
        clock: IReactorTime,
        workers: CpuWorkers,
        peers: Sequence[Peer],
        client_secrets: ClientSecrets,
        memory: Budget,
        settings: UploadSettings,
    ) -> None:
        self._clock = clock
        self._workers = workers
        self._peers = peers
        self._client_secrets = client_secrets
        self._memory = memory
        self._settings = settings
        self._turns = Turns(clock, _FILES_PER_TURN)

    async def put(
        self,
        given: SourceLike,
        params: Params,
        happy: int,
        convergence: bytes | None,
        progress: Progress | None = None,
    ) -> PutResult:
        """
        Store one file; ``convergence`` None means a random key. See ``Grid.put``.
        """
        started = self._clock.seconds()
        if isinstance(given, (bytes, bytearray, memoryview)):
            source: Source = BytesSource(given)
        else:
            # Copying a pipe to temporary space takes as long as the pipe does.
            source = await self._workers.run(open_source, given)
        try:
            if is_literal_size(source.size):
                cap = LitCap(source.read_at(0, source.size))
                return PutResult(cap, source.size, 0, {}, {}, 0, self._clock.seconds() - started)
            geometry = params.geometry(source.size)
            lent = await self._memory.borrow(_held_bytes(geometry))
            try:
                await self._turns.begin()
                return await self._upload(source, geometry, happy, convergence, progress)
            finally:
                self._memory.give_back(lent)
        finally:
            source.close()

    async def _upload(
        self,
        source: Source,
        geometry: Geometry,
        happy: int,
        convergence: bytes | None,
        progress: Progress | None,
    ) -> PutResult:
        if geometry.num_segments == 1:
            size = source.size
            data = await self._workers.run_if_large(size, source.read_at, 0, size)
            source = BytesSource(data, source.name)
        if convergence is None:
            key = random_key()
        else:
            key = await convergent_key(source, geometry, convergence, self._workers)

        async def check_source() -> None:
            if source.check_unchanged() or convergence is None:
                return
            # The time stamps cannot tell; the content can.
            if key != await convergent_key(source, geometry, convergence, self._workers):
                raise SourceError(
                    f"{source.name} changed while it was read; nothing was stored, try again "
                    "when nobody writes to it"
                )

        for wait_s in (*_CONTENTION_WAITS_S, None):
            upload = Upload(
                clock=self._clock,
                workers=self._workers,
                peers=self._peers,
                client_secrets=self._client_secrets,
                source=source,
                geometry=geometry,
                key=key,
                happy=happy,
                settings=self._settings,
                check_source=check_source,
                progress=progress,
            )
            try:
                return await upload.run()
            except UnhappyError:
                if not upload.contended or wait_s is None:
                    raise
            await deferLater(self._clock, wait_s)
        raise AssertionError("the last round returns or raises")


def _held_bytes(geometry: Geometry) -> int:
    """Return what the segments of an upload take while they are coded: plain, cipher, blocks."""
    k, n = geometry.required_shares, geometry.total_shares
    segment = geometry.segment_bytes * (2 * k + n - k) // k
    return _OVERHEAD_BYTES + segment * min(DEPTH, geometry.num_segments)
