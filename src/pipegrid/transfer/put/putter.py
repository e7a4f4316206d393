"""
From a source to a file with its key, which is then stored: what comes before the network, and what bounds it.

Small files become literal caps. Files of one segment are read once and coded from memory, so that
what makes the key is what is stored whatever happens to the file; larger ones are read twice and
checked for changes in between.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import attrs

from pipegrid.core.caps import LitCap, is_literal_size
from pipegrid.core.params import Geometry, Params
from pipegrid.flow.budget import Budget
from pipegrid.flow.turns import Turns
from pipegrid.transfer.peers import Means
from pipegrid.transfer.progress import PutReports
from pipegrid.transfer.put.attempts import store
from pipegrid.transfer.put.codingline import DEPTH
from pipegrid.transfer.put.elsewhere import Elsewhere
from pipegrid.transfer.put.fullservers import FullServers
from pipegrid.transfer.put.keyedfile import with_key
from pipegrid.transfer.put.keynotes import KeyNote, KeyNotes
from pipegrid.transfer.put.means import PutMeans
from pipegrid.transfer.put.overdue import Overdue
from pipegrid.transfer.put.reasons import too_few_servers
from pipegrid.transfer.put.source import (
    BytesSource,
    FileSource,
    Source,
    SourceLike,
    UncopiedSource,
    open_at_once,
)
from pipegrid.transfer.put.source_opener import copy_unread, open_for_put
from pipegrid.transfer.results import PutResult
from pipegrid.transfer.settings import UploadSettings

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
        clock = self._clock = means.clock
        self._means = PutMeans(
            means,
            settings,
            elsewhere or Elsewhere(),
            FullServers(),
            Overdue(clock, settings.grace_s),
            say,
        )
        self._memory = memory
        self._notes = notes
        self._tidied = notes is None
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
            servers, known = len(self._means.grid.takers), len(self._means.grid.peers)
            if servers < happy:  # to be said before a large file is read
                raise too_few_servers(source.name, servers, happy, known - servers)
            geometry = params.geometry(source.size)
            lent = await self._memory.borrow(_held_bytes(geometry))
            try:
                await self._turns.begin()
                return await self._put_encoded(
                    source, geometry, happy, convergence, reports or PutReports()
                )
            finally:
                self._memory.give_back(lent)
        finally:
            self._close(source)

    async def _open(self, given: SourceLike) -> Source:
        if isinstance(given, (bytes, bytearray, memoryview)):
            return BytesSource(given)
        grid = self._means.grid
        if not isinstance(given, (str, os.PathLike)):
            # What the caller has opened already is not ours to count.
            source = await open_for_put(given, grid.workers, self._clock)
            self._opened[source] = 0
            return source
        lent = await self._descriptors.borrow(1)
        try:
            opened = await grid.workers.run(open_at_once, given)
        except BaseException:
            self._descriptors.give_back(lent)
            raise
        if isinstance(opened, UncopiedSource):
            # It may take for ever, and others need not wait for it.
            self._descriptors.give_back(lent)
            lent = 0
            opened = await copy_unread(opened, grid.workers)
        self._opened[opened] = lent
        return opened

    def _close(self, source: Source) -> None:
        """Close a source, unless that was done."""
        if source in self._opened:
            source.close()
            self._descriptors.give_back(self._opened.pop(source))

    async def _put_encoded(
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
            data = await self._means.grid.workers.run_if_large(size, source.read_at, 0, size)
            self._close(source)  # a hundred small files need not be open while they are sent
            source = BytesSource(data, source.name)
        note = await self._take_note(source, geometry) if convergence is None else None
        secret = convergence if note is None else note.secret
        done = False
        try:
            file = await with_key(
                source, geometry, happy, secret, self._means.grid, reports.hashing
            )
            stored = await store(self._means, file, reports)
            done = True
            return stored
        finally:
            if note is not None and done:
                note.remove()
            elif note is not None:
                note.keep()

    async def _take_note(self, source: Source, geometry: Geometry) -> KeyNote | None:
        """Return the note of a put with a random key, if it can go on after an interruption."""
        if self._notes is None or not isinstance(source, FileSource) or source.path is None:
            return None
        return await self._means.grid.workers.run(
            self._notes.take, source.path, source.identity, geometry
        )


def _held_bytes(geometry: Geometry) -> int:
    """Return what the segments of an upload take while they are coded: plain, cipher, blocks."""
    k, n = geometry.required_shares, geometry.total_shares
    segment = geometry.segment_bytes * (2 * k + n - k) // k
    return _OVERHEAD_BYTES + segment * min(DEPTH, geometry.num_segments)
