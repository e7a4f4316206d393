"""One put: open the source, get the key, store the shares, retry on contention."""

from __future__ import annotations

import os
from collections.abc import Callable

from twisted.internet.defer import CancelledError
from twisted.internet.task import deferLater

from pipegrid.core.caps import LitCap, is_literal_size
from pipegrid.core.encoding_parameters import Geometry, Params
from pipegrid.errors import UnhappyError
from pipegrid.flow.concurrency_limits import Budget
from pipegrid.reactor.deferreds import Deadlines, PerTurnLimit
from pipegrid.transfer.failure_messages import too_few_servers
from pipegrid.transfer.peers import TransferContext
from pipegrid.transfer.put.ask_first_policy import PlacementHistory
from pipegrid.transfer.put.client_put_state import FullServers, PutContext
from pipegrid.transfer.put.encode_ahead import DEPTH
from pipegrid.transfer.put.file_key import KeyedFile, KeyNote, KeyNotes, with_key
from pipegrid.transfer.put.small_file_upload import Handover, put_whole
from pipegrid.transfer.put.source import (
    BytesSource,
    FileSource,
    Source,
    SourceLike,
    UncopiedSource,
    open_at_once,
)
from pipegrid.transfer.put.source_opening import copy_unread, open_for_put
from pipegrid.transfer.put.upload_loop import Upload
from pipegrid.transfer.results import PutReports, PutResult
from pipegrid.transfer.settings import UploadSettings

# Storing a file whose key is known: a small file with one request per server, any other with ``Upload``. The
# upload is retried while another client stores the same file.

_CONTENTION_WAITS_S = (0.25, 0.5, 1.0, 2.0, 4.0)
"""
Seconds to wait before each retry when happiness fails because another client is uploading the same shares.
When that client has finished, its shares are found on the servers.
"""


async def store(means: PutContext, file: KeyedFile, reports: PutReports) -> PutResult:
    """
    Store a file.

    Raises:
        UnhappyError: the shares could not be spread over enough servers.
        SourceError: the source could not be read, or changed.
    """
    await means.full.check(means.grid, file)
    stored = await put_whole(means, file, reports)
    if not isinstance(stored, PutResult):
        stored = await _upload(means, file, reports, stored)
    means.full.took(stored.shares_placed.values())
    wanted = min(file.geometry.total_shares, sum(peer.takes_uploads for peer in means.grid.peers))
    means.grid.shortfall.note(stored.happiness, wanted, stored.reasons)
    return stored


async def _upload(
    means: PutContext, file: KeyedFile, reports: PutReports, begun: Handover | None
) -> PutResult:
    """Upload the file; retry if another client is uploading it at the same time."""
    for wait_s in (*_CONTENTION_WAITS_S, None):
        upload = Upload(means, file, reports, begun)
        begun = None
        try:
            return await upload.run()
        except UnhappyError:
            if not upload.contended or wait_s is None:
                raise
        except CancelledError:
            _say_what_is_lost(means, file)
            raise
        await deferLater(means.grid.clock, wait_s)
    raise AssertionError("the last round returns or raises")


def _say_what_is_lost(means: PutContext, file: KeyedFile) -> None:
    """Warn that an interrupted put loses its unfinished shares on servers reached over Foolscap."""
    peers = means.grid.peers
    forgetful = sum(peer.protocol == "foolscap" for peer in peers)
    if forgetful and file.geometry.num_segments > 1:
        means.say(
            f"an interrupted put starts again on {forgetful} of {len(peers)} servers: they use Foolscap, "
            "where a lost connection discards unfinished shares"
        )


# The steps of a put before the network, from a source to a file with its key; and the limits on files, memory
# and descriptors.
#
# Small files become literal caps. Files of one segment are read once and encoded from memory, so that the key
# always belongs to the bytes that are stored, even if the file changes. Larger files are read twice and
# checked for changes between the two readings.

_FILES_PER_TURN = 12
"""Number of small files that are encoded in one reactor turn; this many take about 5 ms."""

_OVERHEAD_BYTES = 64 << 10
"""Memory for the objects of even the smallest upload."""

_OPEN_FILES = 64
"""Maximum number of files open for reading at the same time; some systems give a process 256 descriptors."""


class Uploader:
    """
    Stores files on one grid; runs any number of puts at the same time.

    Args:
        memory: limits the memory that all uploads together use for encoding.
        notes: stores the secrets of running puts with random keys; None: such puts cannot be resumed.
        say: gets a sentence that the user should know in addition to the result.
        history: whether earlier puts have found shares on unexpected servers.
    """

    def __init__(
        self,
        means: TransferContext,
        *,
        memory: Budget,
        settings: UploadSettings,
        notes: KeyNotes | None = None,
        say: Callable[[str], None] = lambda sentence: None,
        history: PlacementHistory | None = None,
    ) -> None:
        clock = self._clock = means.clock
        self._means = PutContext(
            means,
            settings,
            history or PlacementHistory(),
            FullServers(),
            Deadlines(clock, settings.grace_s),
            say,
        )
        self._memory = memory
        self._notes = notes
        self._tidied = notes is None
        self._turns = PerTurnLimit(clock, _FILES_PER_TURN)
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
        """Store one file; with ``convergence`` None its key is random. See ``Grid.put``."""
        started = self._clock.seconds()
        if not self._tidied and self._notes is not None:
            self._tidied = True
            self._notes.forget_stale()  # usually no note is stale, so this does not block long
        source = await self._open(given)
        try:
            if is_literal_size(source.size):
                cap = LitCap(bytes(source.read_at(0, source.size)))
                return PutResult(cap, source.size, 0, {}, {}, 0, self._clock.seconds() - started)
            servers, known = len(self._means.grid.takers), len(self._means.grid.peers)
            if servers < happy:  # raise before a large file is read
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
            # A file that the caller has opened does not count towards this limit of descriptors.
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
            # Reading a pipe may take forever, so other files do not wait for its descriptor.
            self._descriptors.give_back(lent)
            lent = 0
            opened = await copy_unread(opened, grid.workers)
        self._opened[opened] = lent
        return opened

    def _close(self, source: Source) -> None:
        """Close a source if it is still open."""
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
            reports = reports._replace(hashing=None)  # hashing takes no time worth a report
            size = source.size
            data = await self._means.grid.workers.run_if_large(size, source.read_at, 0, size)
            self._close(source)  # a hundred small files need not stay open while they are sent
            source = BytesSource(data, source.name)
        note = await self._take_note(source, geometry) if convergence is None else None
        secret = convergence if note is None else note.secret
        try:
            file = await with_key(
                source, geometry, happy, secret, self._means.grid, reports.hashing
            )
            stored = await store(self._means, file, reports)
        except BaseException:
            if note is not None:
                note.keep()
            raise
        if note is not None:
            note.remove()
        return stored

    async def _take_note(self, source: Source, geometry: Geometry) -> KeyNote | None:
        """Return the key note of a put with a random key; None if the put cannot be resumed."""
        if self._notes is None or not isinstance(source, FileSource) or source.path is None:
            return None
        return await self._means.grid.workers.run(
            self._notes.take, source.path, source.identity, geometry
        )


def _held_bytes(geometry: Geometry) -> int:
    """
    Return the memory that the segments of an upload need while they are encoded: plaintext, ciphertext,
    blocks.
    """
    k, n = geometry.required_shares, geometry.total_shares
    segment = geometry.segment_bytes * (2 * k + n - k) // k
    return _OVERHEAD_BYTES + segment * min(DEPTH, geometry.num_segments)
