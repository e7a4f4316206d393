"""
From a source to a cap: everything about a put that comes before and around the upload itself.

Small files become literal caps. Files of one segment are read once and coded from memory, so that
what makes the key is what is stored whatever happens to the file; larger ones are read twice and
checked for changes in between.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import attrs
from twisted.internet.defer import CancelledError
from twisted.internet.task import deferLater

from pipegrid.core import hashes, wholeshares
from pipegrid.core.caps import LitCap, is_literal_size
from pipegrid.core.params import Geometry, Params
from pipegrid.errors import SourceError, UnhappyError
from pipegrid.flow.budget import Budget
from pipegrid.flow.turns import Turns
from pipegrid.transfer.peers import Means, ring
from pipegrid.transfer.progress import PutReports
from pipegrid.transfer.put.codingline import DEPTH
from pipegrid.transfer.put.elsewhere import Elsewhere
from pipegrid.transfer.put.fullservers import FullServers, refusal
from pipegrid.transfer.put.keynotes import KeyNote, KeyNotes
from pipegrid.transfer.put.keys import convergent_key, random_key
from pipegrid.transfer.put.source import BytesSource, FileSource, Source, SourceLike, open_source
from pipegrid.transfer.put.upload import Upload
from pipegrid.transfer.put.whole import Begun, Overdue, WholePut, takes_whole
from pipegrid.transfer.results import PutResult
from pipegrid.transfer.settings import UploadSettings

_CONTENTION_WAITS_S = (0.25, 0.5, 1.0, 2.0, 4.0)
"""
How long to wait, time after time, where happiness fails because somebody else is just uploading the
same shares: when they are done, these are found in place.
"""

_FILES_PER_TURN = 12
"""Small files are coded on the reactor; so many take some 5 ms."""

_OVERHEAD_BYTES = 64 << 10
"""What the objects of even the smallest upload take."""

_OPEN_FILES = 64
"""Files that are open for reading at a time; some systems give a process 256 descriptors."""


class Putter:
    """
    Stores files on one grid; any number at the same time.

    Args:
        memory: what all uploads together may hold while they code.
        notes: remembers the secrets of puts with random keys while they run; None: nobody does.
        say: told, in a sentence, what the user should know beside the outcome.
        elsewhere: what earlier puts have found.
    """

    def __init__(
        self,
        means: Means,
        *,
        memory: Budget,
        settings: UploadSettings,
        notes: KeyNotes | None = None,
        say: Callable[[str], None] = lambda sentence: None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._means = means
        clock = self._clock = means.clock
        self._workers = means.workers
        self._memory = memory
        self._settings = settings
        self._notes = notes
        self._say = say
        self._tidied = notes is None
        self._elsewhere = elsewhere or Elsewhere()
        self._full = FullServers()
        self._overdue = Overdue(clock, settings.grace_s)
        self._turns = Turns(clock, _FILES_PER_TURN)
        self._descriptors = Budget(_OPEN_FILES)
        self._opened: dict[Source, int] = {}

    async def put(
        self,
        given: SourceLike,
        params: Params,
        happy: int,
        convergence: bytes | None,
        reports: PutReports | None = None,
    ) -> PutResult:
        """
        Store one file; ``convergence`` None means a random key. See ``Grid.put``.
        """
        started = self._clock.seconds()
        if not self._tidied and self._notes is not None:
            self._tidied = True
            self._notes.forget_old()  # mostly there is no such directory
        source = await self._open(given)
        try:
            if is_literal_size(source.size):
                cap = LitCap(bytes(source.read_at(0, source.size)))
                return PutResult(cap, source.size, 0, {}, {}, 0, self._clock.seconds() - started)
            geometry = params.geometry(source.size)
            lent = await self._memory.borrow(_held_bytes(geometry))
            try:
                await self._turns.begin()
                return await self._upload(
                    source, geometry, happy, convergence, reports or PutReports()
                )
            finally:
                self._memory.give_back(lent)
        finally:
            self._close(source)

    async def _open(self, given: SourceLike) -> Source:
        if isinstance(given, (bytes, bytearray, memoryview)):
            return BytesSource(given)
        # What the caller has opened already is not ours to count.
        lent = await self._descriptors.borrow(isinstance(given, (str, os.PathLike)))
        try:
            # Copying a pipe to temporary space takes as long as the pipe does.
            source = await self._workers.run(open_source, given)
        except BaseException:
            self._descriptors.give_back(lent)
            raise
        self._opened[source] = lent
        return source

    def _close(self, source: Source) -> None:
        """Close a source, unless that was done."""
        if source in self._opened:
            source.close()
            self._descriptors.give_back(self._opened.pop(source))

    async def _upload(
        self,
        source: Source,
        geometry: Geometry,
        happy: int,
        convergence: bytes | None,
        reports: PutReports,
    ) -> PutResult:
        if geometry.num_segments == 1:
            reports = attrs.evolve(reports, hashing=None)  # it is over at once
            size = source.size
            data = await self._workers.run_if_large(size, source.read_at, 0, size)
            self._close(source)  # a hundred small files need not be open while they are sent
            source = BytesSource(data, source.name)
        note = await self._take_note(source, geometry) if convergence is None else None
        if note is None:
            return await self._store(source, geometry, happy, convergence, reports)
        done = False
        try:
            stored = await self._store(source, geometry, happy, note.secret, reports)
            done = True
            return stored
        finally:
            if done:
                note.remove()
            else:
                note.keep()

    async def _take_note(self, source: Source, geometry: Geometry) -> KeyNote | None:
        """Return the note of a put with a random key, if it can go on after an interruption."""
        if self._notes is None or not isinstance(source, FileSource) or source.path is None:
            return None
        return await self._workers.run(self._notes.take, source.path, source.identity, geometry)

    async def _store(
        self,
        source: Source,
        geometry: Geometry,
        happy: int,
        secret: bytes | None,
        reports: PutReports,
    ) -> PutResult:
        """Store a file whose key comes of its content and a secret, or of nothing."""
        if secret is None:
            key = random_key()
        else:
            key = await convergent_key(source, geometry, secret, self._workers, reports.hashing)

        async def check_source() -> None:
            if source.check_unchanged() or secret is None:
                return
            # The time stamps cannot tell; the content can.
            if key != await convergent_key(source, geometry, secret, self._workers):
                raise SourceError(
                    f"{source.name} changed while it was read; nothing was stored, try again "
                    "when nobody writes to it"
                )

        await self._refuse_early(source, geometry, key, happy)
        outcome = await self._put_whole(source, geometry, key, happy, reports)
        if isinstance(outcome, PutResult):
            self._full.took(outcome.shares_placed.values())
            return outcome
        begun = outcome
        for wait_s in (*_CONTENTION_WAITS_S, None):
            upload = Upload(
                means=self._means,
                workers=self._workers,
                source=source,
                geometry=geometry,
                key=key,
                happy=happy,
                settings=self._settings,
                check_source=check_source,
                elsewhere=self._elsewhere,
                full=self._full,
                reports=reports,
                begun=begun,
            )
            begun = None
            try:
                stored = await upload.run()
                self._full.took(stored.shares_placed.values())
                return stored
            except UnhappyError:
                if not upload.contended or wait_s is None:
                    raise
            except CancelledError:
                self._say_what_is_lost(geometry)
                raise
            await deferLater(self._clock, wait_s)
        raise AssertionError("the last round returns or raises")

    async def _refuse_early(
        self, source: Source, geometry: Geometry, key: bytes, happy: int
    ) -> None:
        """
        Raises:
            UnhappyError: too many servers are known to be full.
        """
        index, peers = hashes.storage_index(key), self._means.peers
        share_bytes = wholeshares.share_bytes(geometry)
        full = self._full.among(peers, share_bytes, self._clock.seconds())
        if full:
            error = await refusal(
                self._clock,
                full,
                peers,
                storage_index=index,
                file_name=source.name,
                happy=happy,
                required_shares=geometry.required_shares,
            )
            if error is not None:
                raise error

    async def _put_whole(
        self,
        source: Source,
        geometry: Geometry,
        key: bytes,
        happy: int,
        reports: PutReports,
    ) -> PutResult | Begun | None:
        """Store a small file in one move, where servers take it so; None: nothing was sent."""
        if not wholeshares.fits(geometry) or self._elsewhere.asks:
            return None
        index = hashes.storage_index(key)
        order = ring(index, self._means.peers)
        n = geometry.total_shares
        if not happy <= len(order) or not takes_whole(order, n, wholeshares.share_bytes(geometry)):
            return None
        put = WholePut(
            self._clock,
            order,
            self._means.secrets,
            index,
            geometry,
            happy,
            self._settings,
            self._elsewhere,
            reports,
        )
        return await put.run(key, source.read_at(0, geometry.size), self._overdue)

    def _say_what_is_lost(self, geometry: Geometry) -> None:
        """A put was cut off; over Foolscap unfinished shares go with the connection."""
        peers = self._means.peers
        forgetful = sum(peer.protocol == "foolscap" for peer in peers)
        if forgetful and geometry.num_segments > 1:
            self._say(
                f"an interrupted put begins anew on {forgetful} of {len(peers)} servers: they are "
                "spoken to over Foolscap, where unfinished shares are gone with the connection"
            )


def _held_bytes(geometry: Geometry) -> int:
    """Return what the segments of an upload take while they are coded: plain, cipher, blocks."""
    k, n = geometry.required_shares, geometry.total_shares
    segment = geometry.segment_bytes * (2 * k + n - k) // k
    return _OVERHEAD_BYTES + segment * min(DEPTH, geometry.num_segments)
