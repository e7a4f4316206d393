"""The grid of applications, without trees: put, get, check, repair, and mutable files."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from io import BytesIO
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from twisted.internet.defer import CancelledError, Deferred, DeferredList, fail, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from pipegrid.argument_checks import check_callable, check_kind, check_whole, shown
from pipegrid.core.caps import (
    Cap,
    ChkCap,
    LitCap,
    MutableCap,
    checkable,
    mutable_file,
    readable,
    writable,
)
from pipegrid.core.encoding_parameters import MAX_SEGMENT_BYTES, Params, too_many_shares
from pipegrid.core.hashes import ClientSecrets
from pipegrid.disk.part_file import PartFile
from pipegrid.errors import NotEnoughSharesError, ServerError, SinkError, UsageError
from pipegrid.flow.concurrency_limits import MANY, Budget, SmallFileCapacity
from pipegrid.grid.client_cache_files import open_placement_history
from pipegrid.grid.client_config import GridConfig, check_happy
from pipegrid.grid.lease_release_lock import StoringLock
from pipegrid.grid.open_grid import OpenOptions, open_grid
from pipegrid.grid.server_readiness import Readiness, status_of
from pipegrid.grid.server_registry import ServerRegistry, Warnings
from pipegrid.reactor.deferreds import (
    Deadlines,
    Waiters,
    Wakeup,
    as_deferred,
    check_own_thread,
    gather,
    notify_deferred,
    start_cancellable,
)
from pipegrid.reactor.trace import Tracing
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.get.blocking_sink import is_pipe_or_device, open_pipe_or_device
from pipegrid.transfer.get.get_history import GetHistory, NotAsExpected
from pipegrid.transfer.get.sink import SinkLike, open_sink
from pipegrid.transfer.peers import Peer, TransferContext
from pipegrid.transfer.put.file_key import KeyNotes
from pipegrid.transfer.put.source import SourceLike, size_of
from pipegrid.transfer.results import (
    CheckResult,
    GetResult,
    Progress,
    PutReports,
    PutResult,
    RenewResult,
    RepairResult,
    ServerStatus,
    Traffic,
)
from pipegrid.transfer.settings import (
    DownloadSettings,
    Limits,
    UpkeepSettings,
    UploadSettings,
    limited,
)
from pipegrid.transport.interface import expect_small_reads

if TYPE_CHECKING:
    from pipegrid.core.mutable.versions import Version
    from pipegrid.grid.access_blacklist import AccessBlacklist
    from pipegrid.grid.introducer_client import IntroducerStatus
    from pipegrid.grid.introducer_discovery import Discovery
    from pipegrid.grid.mutables import Mutables
    from pipegrid.reactor.preconnect import Preconnector
    from pipegrid.transfer.get.small_file_download import SmallFile, SmallFileGets
    from pipegrid.transfer.lease_release import LeaseReleaser
    from pipegrid.transfer.mutable.base_version_search import Redo
    from pipegrid.transfer.mutable.modify import ContentEdit
    from pipegrid.transfer.mutable.mutable_files import ContentOfKey, RangeOf
    from pipegrid.transfer.mutable.publish import CreateResult, WriteResult
    from pipegrid.transfer.mutable.write_queue import Merge
    from pipegrid.transfer.put.uploader import Uploader
    from pipegrid.transfer.upkeep import ObjectUpkeep, Upkeep, UpkeepRequest
    from pipegrid.wire.storage_messages import ServerIdentity


# ``FileGrid`` has the parts that all operations share: servers with their windows, workers, memory, opening
# and closing.
#
# The public methods of a grid return Deferreds of operations that have started and can be cancelled.
# ``_start`` records the running operations, and ``close`` cancels them.

# Modules that only one kind of transfer needs are imported when the first transfer of that kind begins.

P = ParamSpec("P")
T = TypeVar("T")
G = TypeVar("G", bound="FileGrid")

_ONLY_HERE = (
    "only storage directories of this machine are known here: if the cap is from another grid, its servers "
    "are missing, and 'pipegrid init NURL...' joins it"
)

UPLOAD_MEMORY_BYTES = 32 << 20
"""
The most memory that all uploads use for encoding, in addition to the windows: large files are encoded one
after the other, small ones at the same time. Including the windows, a client stays below 64 MiB.
"""


def started(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], Deferred[T]]:
    """
    Decorate a coroutine method so that a call passes the coroutine to the object's ``_start``, and returns a
    Deferred.
    """
    notify_deferred(method)

    @wraps(method)
    def begin(self: Any, /, *arguments: P.args, **options: P.kwargs) -> Deferred[T]:
        running: Deferred[T] = self._start(method(self, *arguments, **options))
        return running

    return begin


class FileGrid:
    """
    A storage grid, as configured in one directory.

    Open it with ``Grid.open``; close it when done.

    Attributes:
        config: the settings of the directory.
        created: a sentence for the user if opening has created an embedded grid, else None.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        config: GridConfig,
        peers: list[Peer],
        workers: CpuWorkers,
        *,
        created: str | None = None,
        upload_settings: UploadSettings | None = None,
        download_settings: DownloadSettings | None = None,
        on_close: Callable[[], Deferred[None]] | None = None,
        members: ServerRegistry | None = None,
        discovery: Discovery | None = None,
        warnings: Warnings | None = None,
        wait_for: int = 0,
        limits: Limits | None = None,
        blacklist: AccessBlacklist | None = None,
    ) -> None:
        self._blacklist = blacklist
        self.config = config
        self.created = created
        self._warnings = warnings or Warnings(config.warnings)
        self._members = members
        self._discovery = discovery
        self._readiness = Readiness(peers, discovery, reactor, wait_for)
        self._reactor = reactor
        self._peers = peers
        self._workers = workers
        self._means = TransferContext(reactor, workers, peers, ClientSecrets(config.lease_secret))
        limits = self._limits = limits or Limits()
        self._download_settings = limited(download_settings or DownloadSettings(), limits)
        self._on_close = on_close
        self._upload_settings = upload_settings or UploadSettings()
        memory = limits.memory_bytes
        self._upload_memory = Budget(UPLOAD_MEMORY_BYTES if memory is None else memory // 2)
        self._putter: Uploader | None = None
        self._mutables: Mutables | None = None
        self._earlier = GetHistory()
        self._small_gets: SmallFileGets | None = None
        states = () if config.state is None else (config.state,)
        self._storing = StoringLock((*states, *config.caches) if config.caches else (), reactor)
        self._running: set[Deferred[Any]] = set()
        self._beginning = 0  # how many operations are in their first step
        self._closed = False
        self._left = False
        self._closing: Waiters[None] = Waiters()

    @classmethod
    @as_deferred
    async def open(
        cls: type[G],
        reactor: IReactorTime,
        directory: str | os.PathLike[str] | None = None,
        *,
        tracer: Tracing | None = None,
        wait_for: int = 0,
        window_bytes: int | None = None,
        max_segment_bytes: int | None = None,
        limits: Limits | None = None,
        ahead: Preconnector | None = None,
        make: bool = True,
        follows_blacklist: bool = False,
    ) -> G:
        """
        Open the grid that a directory configures, without waiting for servers.

        Args:
            reactor: the running reactor.
            directory: a client's directory; None for the user's own, where an embedded grid of ten storage
                directories is made if nothing is configured (see ``make``).
            tracer: receives a span for each request and CPU job; the caller closes it.
            wait_for: number of servers that must respond before the first operation starts; by default an
                operation starts when enough servers are known.
            window_bytes: a fixed limit on unacknowledged bytes to each server; by default the limit follows
                the measured bandwidth and round-trip time of the server.
            max_segment_bytes: files with larger segments are not fetched; by default 16 MiB, or the
                configured segment size if that is larger.
            limits: limits on the machine's resources and on the network connection.
            ahead: connections to servers that were opened early; unused ones are closed with the grid.
            make: whether an embedded grid may be created; a new one has no share of any existing file.
            follows_blacklist: files that ``access.blacklist`` names are not fetched; by default a directory
                whose list names a file is refused.

        Raises (through the Deferred):
            UsageError: the directory is not configured, one of its settings is not valid, or the settings
                start Tor, but Tor does not start.
        """
        check_own_thread("a grid")
        check_whole(wait_for, "wait_for", least=0)
        check_kind(limits, (Limits, type(None)), "what a grid may take", "a Limits")
        if max_segment_bytes is not None:
            check_whole(max_segment_bytes, "max_segment_bytes", least=1)
        options = OpenOptions(tracer, window_bytes, limits, ahead, make, follows_blacklist)
        opened = open_grid(reactor, directory, options)
        if max_segment_bytes is None:
            max_segment_bytes = max(MAX_SEGMENT_BYTES, opened.config.params.max_segment_bytes)
        parts = opened._asdict()
        starting = parts.pop("starting")
        grid = cls(
            reactor,
            **parts,
            wait_for=wait_for,
            limits=limits,
            download_settings=DownloadSettings(max_segment_bytes=max_segment_bytes),
        )
        await grid._proxy_started(starting)
        return grid

    async def _proxy_started(self, starting: Deferred[None] | None) -> None:
        """
        Wait until the proxy that the settings start can be used; if it does not start, close the grid.

        Raises:
            UsageError: the proxy does not start.
        """
        if starting is None:
            return
        try:
            await starting
        except BaseException as error:
            await self.close()
            if isinstance(error, ConnectionError):
                raise UsageError(str(error)) from None
            raise

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences for the user, for example about skipped or unreachable servers and introducers."""
        return (*self._warnings(), *self._means.shortfall.sentences())

    def add_warning(self, sentence: str) -> None:
        """Add a sentence to ``warnings``, unless it is already there or the maximum number is reached."""
        self._warnings.add(sentence)

    def _warn_of_shares(self, params: Params) -> None:
        """Add a warning if a stored file has more shares than there are servers."""
        if warning := too_many_shares(params.total_shares, len(self._peers)):
            self._warnings.add(warning)

    @property
    def workers(self) -> CpuWorkers:
        """Threads for CPU work; they end with the grid."""
        return self._workers

    @property
    def clock(self) -> IReactorTime:
        """The reactor as a clock, which tests replace."""
        return self._reactor

    @property
    def limits(self) -> Limits:
        """The limits on the machine's resources and on the network connection that this grid may use."""
        return self._limits

    def check_access(self, cap: str | Cap | None) -> None:
        """
        Raise an error if ``access.blacklist`` blocks the object of a cap.

        Raises:
            AccessProhibited: the object is blocked.
        """
        if self._blacklist is not None:
            self._blacklist.check(cap)

    def _open_mutables(self) -> Mutables:
        if self._mutables is None:
            from pipegrid.grid.mutables import Mutables

            self._mutables = Mutables(
                self._means, self.config, self._readiness, self._download_settings.silence_s
            )
        return self._mutables

    @property
    def _small_file_capacity(self) -> SmallFileCapacity:
        """How many small files all servers can take at the same time: the lowest capacity of a server."""
        return min(
            (peer.server.small_file_capacity for peer in self._peers), default=SmallFileCapacity.ANY
        )

    def _expect(self, objects: int) -> None:
        """
        Announce to the servers how many small objects will be stored, so that connections are opened in
        advance for many.
        """
        for peer in self._peers if objects >= MANY else ():
            peer.server.expect(objects)

    @started
    async def status(self) -> list[ServerStatus]:
        """
        Ask every server for its status; the status of an unreachable server has the reason.

        First wait for introducers, and at most one minute for the number of servers in ``wait_for``.
        """

        await self._readiness.up_or_late()
        if self._discovery is not None:
            await self._discovery.wait_settled()
        asked = [Deferred.fromCoroutine(status_of(peer, self._reactor)) for peer in self._peers]
        unusable = [] if self._members is None else list(self._members.unusable.values())
        return await gather(asked) + unusable

    @property
    def servers(self) -> list[ServerIdentity]:
        """The servers that are known now, whether they are reachable or not."""
        return [peer.identity for peer in self._peers]

    @started
    async def ask_servers(self, told: Callable[[ServerStatus], None]) -> None:
        """
        Ask every known server for its status; fires when each has responded or has exceeded the time limit.

        Args:
            told: called with each server's status as soon as it is known.
        """
        check_callable(told, "told")
        for unusable in () if self._members is None else list(self._members.unusable.values()):
            told(unusable)

        async def ask(peer: Peer) -> None:
            told(await status_of(peer, self._reactor))

        await gather([Deferred.fromCoroutine(ask(peer)) for peer in self._peers])

    @property
    def introducers(self) -> list[IntroducerStatus]:
        """The current state of each configured introducer."""
        return [] if self._discovery is None else self._discovery.statuses

    def close(self) -> Deferred[None]:
        """
        End all running operations, close the connections to servers, and fire when everything has ended.

        A second call fires at the same time as the first. Cancelling the Deferred does not stop the closing.
        """
        if self._left:
            return succeed(None)
        try:
            check_own_thread("a grid")
        except UsageError as error:
            return fail(error)
        waiting = self._closing.wait()
        if not self._closed:
            self._closed = True
            Deferred.fromCoroutine(self._leave()).addBoth(self._has_left)
        return waiting

    def _has_left(self, result: Failure | None) -> None:
        self._left = True
        if isinstance(result, Failure):
            assert isinstance(result.value, Exception)
            self._closing.fail(result.value)
        else:
            self._closing.fire(None)

    async def _leave(self) -> None:
        for running in list(self._running):
            running.cancel()
        if self._running or self._beginning:
            # The caller may itself be a running operation: let it end in the next reactor turn, before its
            # servers are closed.
            await deferLater(self._reactor, 0)
        if self._mutables is not None:
            self._mutables.close()
        if self._discovery is not None:
            self._discovery.stop()
        leaving = [peer.server.disconnect() for peer in self._peers]
        leaving += [] if self._members is None else self._members.leaving
        await DeferredList(leaving, consumeErrors=True)  # ignore errors of disconnecting
        await self._workers.stop()
        self._storing.release()
        if self._on_close is not None:
            await self._on_close()

    def _check_open(self) -> None:
        check_own_thread("a grid")
        if self._closed:
            raise UsageError("this grid is closed; open it again")

    def _explain(self, error: NotEnoughSharesError) -> None:
        """If no server has a share, add a hint to the error: the file is probably on another grid."""
        if error.found or error.absent or not self._peers:
            return
        hint = (
            _ONLY_HERE
            if self.config.is_on_this_machine
            else "if the cap is from another grid, its servers are missing here"
        )
        if hint not in str(error):  # another operation may have added the hint already
            error.args = (f"{error}; {hint}", *error.args[1:])

    def _start(self, work: Coroutine[Any, Any, T]) -> Deferred[T]:
        try:
            self._check_open()
        except UsageError as error:
            work.close()
            return fail(error)
        self._beginning += 1
        running = start_cancellable(work, self._reactor)
        self._beginning -= 1
        self._running.add(running)
        if self._closed:  # the operation's first step may have called ``close``
            running.cancel()

        def ended(result: Any) -> Any:
            self._running.discard(running)
            if isinstance(result, Failure) and isinstance(result.value, NotEnoughSharesError):
                self._explain(result.value)
            return result

        return running.addBoth(ended)


# Storing files.

# Modules that only one kind of transfer needs are imported when the first transfer of that kind begins.

_COUNTED_BYTES = 64 << 10
"""Files above this size let others start as their bytes are acknowledged; smaller ones, when the put ends."""

NOTES_NAME = "unfinished"
"""The directory with the random keys of interrupted puts, in the first of the client's cache directories."""


class StoringGrid(FileGrid):
    """The part of ``Grid`` that stores files: ``put`` and ``put_many``."""

    def put(
        self,
        source: SourceLike,
        *,
        params: Params | None = None,
        happy: int | None = None,
        convergence: bytes | None = None,
        random_key: bool = False,
        progress: Progress | None = None,
        found: Progress | None = None,
        hashing: Progress | None = None,
        cap_known: Callable[[ChkCap], None] | None = None,
        traffic: Traffic | None = None,
    ) -> Deferred[PutResult]:
        """
        Store one file; fires with its cap when enough servers hold it.

        Args:
            source: a path, bytes, an async iterator of bytes, an ``IBodyProducer``, an ``IResponse``, or a
                binary file object, which stays open (read from its beginning if it is a regular file, else
                from its position). A source that can be read only once is copied to temporary space.
            params: encoding parameters; by default the configured ones.
            happy: servers of happiness wanted; by default the configured number.
            convergence: the convergence secret; by default the configured one; ``b""`` for none.
            random_key: use a random key, so that the cap never equals another. If the put of a path with
                several segments is interrupted, the next put of this path with a random key resumes it.
            progress: called with acknowledged and total bytes of shares; existing shares count as
                acknowledged.
            found: called with the bytes of existing shares, and of all shares.
            hashing: called with the bytes hashed so far, for the key, and the file's size; not called for a
                file that is read with one call.
            cap_known: called with the cap as soon as the file is encoded. The file is not stored then, and
                the put may still fail. Not called for a literal file.
            traffic: called with a server's identity, the time when bytes of shares were sent, the time when
                the server had acknowledged them, and their number. Times are those of ``clock``.

        Raises (through the Deferred):
            SourceError: the source cannot be read, or changes during the put.
            UnhappyError: too few servers accepted shares.
            UsageError: the parameters are not valid.
        """
        options = (params, happy, convergence, random_key)
        reports = PutReports(progress, found, hashing, cap_known, traffic)
        return self._start(self._put(source, *options, reports))

    async def _put(
        self,
        source: SourceLike,
        params: Params | None,
        happy: int | None,
        convergence: bytes | None,
        random_key: bool,
        reports: PutReports,
    ) -> PutResult:
        for name in ("progress", "found", "hashing", "cap_known", "traffic"):
            check_callable(getattr(reports, name), name)
        params, happy = self._put_options(params, happy, convergence)
        if random_key:
            convergence = None
        elif convergence is None:
            convergence = self.config.convergence
        async with self._storing:
            await self._readiness.wait(happy, storing=True)
            result = await self._open_putter().put(source, params, happy, convergence, reports)
        if isinstance(result.cap, ChkCap):
            self._warn_of_shares(params)
        return result

    def _put_options(
        self,
        params: Params | None = None,
        happy: int | None = None,
        convergence: bytes | None = None,
    ) -> tuple[Params, int]:
        """
        Return the encoding parameters and the servers of happiness from the options of ``put``.

        Raises:
            UsageError: the options are not valid.
        """
        params = self.config.params if params is None else params
        check_kind(params, Params, "how a file is encoded", "a Params")
        check_kind(convergence, (bytes, type(None)), "a convergence secret", "bytes", secret=True)
        if happy is None:
            happy = min(self.config.happy, params.total_shares)
        check_happy(happy, params)
        return params, happy

    def _open_putter(self) -> Uploader:
        if self._putter is None:
            from pipegrid.transfer.put.uploader import Uploader

            caches, warn = self.config.caches, self._warnings.add
            notes = KeyNotes(caches[0] / NOTES_NAME, warn) if caches else None
            self._putter = Uploader(
                self._means,
                memory=self._upload_memory,
                settings=self._upload_settings,
                notes=notes,
                say=warn,
                history=open_placement_history(self.config.ask_first, caches),
            )
        return self._putter

    def put_many(
        self,
        sources: Sequence[SourceLike],
        *,
        params: Params | None = None,
        happy: int | None = None,
        convergence: bytes | None = None,
        random_key: bool = False,
        progress: Callable[[int, int, int], None] | None = None,
        found: Callable[[int, int, int], None] | None = None,
        hashing: Callable[[int, int, int], None] | None = None,
        ended: Callable[[int, PutResult | Failure], None] | None = None,
    ) -> Deferred[list[PutResult | Failure]]:
        """
        Store many files as one pipeline, the large ones first; fires with each file's outcome.

        A hundred small files take one round trip plus the time for their bytes. A file that fails does not
        stop the others. The numbers of files in flight and of open files are bounded.

        Args:
            sources: files, as for ``put``; the other options are also those of ``put``.
            progress, found, hashing: as for ``put``, with the file's number as the first argument.
            ended: called with the number of each file and its outcome.
        """
        from pipegrid.transfer.put.put_many import ManyPuts

        try:
            _check_list(sources)
            for name, call in (("ended", ended), ("progress", progress), ("found", found)):
                check_callable(call, name)
            check_callable(hashing, "hashing")
        except UsageError as error:
            return fail(error)
        outcomes: dict[int, PutResult | Failure] = {}
        sizes = [size_of(source) for source in sources]

        def start(number: int, pace: Progress) -> Deferred[PutResult]:
            def report(done: int, total: int) -> None:
                pace(done, total)
                if progress is not None:
                    progress(number, done, total)

            # Unless the caller wants it, a small file reports no progress: its bytes count when the put ends.
            size = sizes[number]
            counted = progress is not None or size is None or size > _COUNTED_BYTES
            reports = _numbered(number, report if counted else None, found, hashing)
            options = (params, happy, convergence, random_key)
            return start_cancellable(self._put(sources[number], *options, reports), self._reactor)

        def note(number: int, outcome: PutResult | Failure) -> None:
            outcomes[number] = outcome
            if ended is not None:
                ended(number, outcome)

        async def work() -> list[PutResult | Failure]:
            bounds = self._limits.jobs, self._reactor.seconds, lambda: self._small_file_capacity
            await ManyPuts(sizes, start, note, *bounds, self._expect).run()
            return [outcomes[number] for number in range(len(sources))]

        return self._start(work())


def _numbered(
    number: int,
    report: Progress | None,
    found: Callable[[int, int, int], None] | None,
    hashing: Callable[[int, int, int], None] | None,
) -> PutReports:
    """
    Return the callbacks of one file, which call the callbacks of ``put_many`` with the file's number first.
    """
    return PutReports(
        report,
        None if found is None else partial(found, number),
        None if hashing is None else partial(hashing, number),
    )


def _check_list(sources: object) -> None:
    if not isinstance(sources, Sequence) or isinstance(sources, (str, bytes, bytearray)):
        raise UsageError(f"the sources must be a list, not {shown(sources)}")


# Fetching files.

# Modules that only one kind of transfer needs are imported when the first transfer of that kind begins.


class FetchingGrid(FileGrid):
    """The part of ``Grid`` that fetches files: ``get``, ``read`` and ``size``."""

    @started
    async def get(
        self,
        cap: str | Cap,
        sink: SinkLike | str | os.PathLike[str],
        *,
        start: int = 0,
        length: int | None = None,
        progress: Progress | None = None,
        replace: bool = False,
        range_of: RangeOf | None = None,
        seen: Callable[[Version], object] | None = None,
        traffic: Traffic | None = None,
    ) -> GetResult:
        """
        Fetch a file, or a range of it; fires when the last verified byte is in the sink.

        Args:
            cap: a file's read cap.
            sink: a path, a binary file object (it stays open), or an ``IConsumer``, which may pause the get.
                Writes to a pipe, a device, or a file object other than a regular file's run in a thread, one
                at a time. The file appears at a path when it is complete and durable. An interrupted get
                leaves a hidden part file next to the path, and the next get to this path resumes from its
                good bytes.
            start, length: the range; by default the whole file. A range that exceeds the file ends with it.
            progress: called with bytes delivered and wanted; resumed bytes count as delivered.
            replace: whether an existing file at the path is replaced.
            range_of: a function that returns start and length. It is called with the size of the file before
                the first byte is delivered; and again if a mutable file is overwritten during the get.
            seen: called with the version of a mutable file before ``range_of``.
            traffic: called with a server's identity, the time when bytes of shares were asked for, the time
                when they had arrived, and their number. Not called for a mutable file.

        Raises (through the Deferred):
            CapError: the cap does not read a file.
            UsageError: the range begins beyond the end of the file.
            NotEnoughSharesError: too few good shares were found.
            CorruptionError: the shares do not decode to the cap's file.
            SinkError: writing failed, the reader has closed the sink, or the path has a file already or is
                written by another process.
        """
        with ExitStack() as stack:
            if isinstance(sink, str | os.PathLike):
                if mutable_file(cap) is None:
                    readable(cap)  # check the cap before anything is written
                path = _checked_path(sink)
                if is_pipe_or_device(path):
                    sink = await open_pipe_or_device(path, self._workers)
                    stack.callback(sink.close)
                else:
                    sink = stack.enter_context(PartFile(path, replace))
            result = await self._get(cap, sink, (start, length), progress, range_of, seen, traffic)
            if isinstance(sink, PartFile):
                await self._workers.run(sink.publish)
            return result

    async def _get(
        self,
        given: str | Cap,
        sink: SinkLike,
        place: tuple[int, int | None],
        progress: Progress | None,
        range_of: RangeOf | None = None,
        seen: Callable[[Version], object] | None = None,
        traffic: Traffic | None = None,
    ) -> GetResult:
        start, length = place
        for name, call in (("range_of", range_of), ("seen", seen), ("traffic", traffic)):
            check_callable(call, name)
        self.check_access(given)
        mutable = mutable_file(given)
        if mutable is not None:

            def range_in(version: Version) -> tuple[int, int | None]:
                if seen is not None:
                    seen(version)
                return (start, length) if range_of is None else range_of(version.size)

            return await self._open_mutables().get(
                mutable, sink, start, length, progress, range_of=range_in
            )
        cap = readable(given)
        check_callable(progress, "progress")
        if range_of is not None:
            start, length = range_of(cap.size)
        length = _checked_length(cap.size, start, length)
        if isinstance(cap, LitCap) or length == 0:
            data = cap.data[start : start + length] if isinstance(cap, LitCap) else b""
            await self._give(data, sink)
            return GetResult(length, {}, [])
        await self._readiness.wait(cap.required_shares)
        asks_lists = False
        # Only a ``Download`` can use the bytes of an existing part file.
        has_bytes = isinstance(sink, PartFile) and sink.found_bytes > 0
        if length == cap.size and not (has_bytes or self._earlier.guesses.needs_lists):
            try:
                getting = self._get_small(cap, traffic)
                found = None if getting is None else await getting
            except NotAsExpected:
                found, asks_lists = None, True
            if found is not None:
                data, result = found
                await self._give(data, sink)
                if progress is not None:
                    progress(length, length)
                return result
        return await self._download(cap, (start, length), sink, progress, asks_lists, traffic)

    async def _download(
        self,
        cap: ChkCap,
        span: tuple[int, int],
        sink: SinkLike,
        progress: Progress | None,
        asks_lists: bool,
        traffic: Traffic | None,
    ) -> GetResult:
        """
        Fetch a range. If too few shares are found, nothing was delivered yet, and introducers name further
        servers, try once more.
        """
        from pipegrid.transfer.get.download import Download
        from pipegrid.transfer.get.share_downloads import DownloadRequest

        delivered = False

        def note(done: int, total: int) -> None:
            nonlocal delivered
            delivered = delivered or done > 0
            if progress is not None:
                progress(done, total)

        def download() -> Download:
            request = DownloadRequest(cap, *span, asks_lists=asks_lists, traffic=traffic)
            settings = self._download_settings
            return Download(self._means, request, sink, settings, note, self._earlier)

        first = download()
        try:
            return await first.run()
        except NotEnoughSharesError:
            if delivered or first.handed_on or not await self._readiness.more_servers():
                raise
        return await download().run()

    def _get_small(self, cap: ChkCap, traffic: Traffic | None) -> Deferred[SmallFile] | None:
        """Fetch a small file as ``SmallFileGets.get`` does; None if this is not possible."""
        if self._small_gets is None:
            from pipegrid.transfer.get.small_file_download import SmallFileGets

            settings = self._download_settings
            deadlines = Deadlines(self._means.clock, settings.hedge_s)
            self._small_gets = SmallFileGets(self._means, settings, self._earlier, deadlines)
        return self._small_gets.get(cap, traffic)

    async def _give(self, data: bytes, sink: SinkLike) -> None:
        """Deliver the given data to a sink, and finish the sink."""
        if type(sink) is BytesIO:
            sink.write(data)
            return
        if isinstance(sink, PartFile):
            sink.begin(0)
        wanted = Wakeup(self._reactor)
        target = open_sink(sink, wanted.fire, self._workers)
        try:
            if data:
                target.write([data])
            while target.pending_bytes:
                await wanted.wait()
                target.check()
            await target.flushed()
        finally:
            target.finish()

    @contextmanager
    def reading_a_tree(self) -> Iterator[None]:
        """
        Return a context in which many small files are read: servers are asked early whether they accept
        several reads at once.
        """
        for peer in self._peers:
            asked = expect_small_reads(peer.server)
            asked.addErrback(lambda failure: failure.trap(ServerError, CancelledError))
        self._earlier.guesses.trees += 1
        try:
            yield
        finally:
            self._earlier.guesses.trees -= 1

    @started
    async def size(self, cap: str | Cap) -> int:
        """
        Return the size of a file in bytes; servers are asked only for a mutable file.

        Raises (through the Deferred):
            CapError: the cap does not read a file.
            NotEnoughSharesError: no version can be read.
        """
        mutable = mutable_file(cap)
        if mutable is not None:
            return await self._open_mutables().size(mutable)
        return readable(cap).size

    @started
    async def read(
        self,
        cap: str | Cap,
        start: int = 0,
        length: int | None = None,
        *,
        traffic: Traffic | None = None,
    ) -> bytes:
        """Fetch a file, or a range of it, into memory; see ``get``."""
        into = BytesIO()
        await self._get(cap, into, (start, length), None, traffic=traffic)
        return into.getvalue()


def _checked_path(path: str | os.PathLike[str]) -> str:
    """
    Return a path as text.

    Raises:
        SinkError: the text cannot be the name of a file.
    """
    name = os.fspath(path)
    if not name or "\0" in name:
        raise SinkError(f"{name!r} is not the path of a file; give another")
    return name


def _checked_length(size: int, start: int, length: int | None) -> int:
    """
    Return the number of bytes in a range of a file; a ``length`` of None means the rest of the file.

    Raises:
        UsageError: the range is not within the file.
    """
    check_whole(start, "the beginning of a range")
    if length is not None:
        check_whole(length, "the length of a range")
    if start < 0 or start > size:
        raise UsageError(f"the range begins at byte {start}, but the file has {size} bytes")
    if length is not None and length < 0:
        raise UsageError(f"a range cannot have {length} bytes")
    return size - start if length is None else min(length, size - start)


# Checking, repairing and renewing leases of one file or of many.

# Modules that only one kind of transfer needs are imported when the first transfer of that kind begins.


class KeepingGrid(FileGrid):
    """The part of ``Grid`` that checks and repairs files and renews leases, for one file or many."""

    @started
    async def check(
        self,
        cap: str | Cap,
        *,
        verify: bool = False,
        add_lease: bool = False,
        progress: Progress | None = None,
    ) -> CheckResult:
        """
        Return the health of a file: which servers have which of its shares.

        Args:
            cap: a read cap or verify cap of an immutable file or directory.
            verify: fetch and check every byte of every share.
            add_lease: add or renew leases on the good shares.
            progress: called with the numbers of shares verified and found.

        Raises (through the Deferred):
            CapError: the cap cannot be checked.
        """
        mutable = mutable_file(cap, directories=True)
        if mutable is not None:
            return await self._open_mutables().check(mutable, verify, add_lease)
        cap = checkable(cap)
        check_callable(progress, "progress")
        from pipegrid.transfer.upkeep import literal

        if isinstance(cap, LitCap):
            return literal(cap)
        await self._readiness.wait(cap.required_shares, all_reported=True)
        return await self._keeper().check(cap, verify, add_lease, progress)

    def check_many(
        self,
        caps: Sequence[str | Cap],
        *,
        verify: bool = False,
        add_lease: bool = False,
        repair: bool = False,
        bounds: UpkeepSettings | None = None,
        ended: Callable[[int, CheckResult | RepairResult | Failure], None] | None = None,
    ) -> Deferred[list[CheckResult | RepairResult | Failure]]:
        """
        Check many objects as one pipeline, each once; fires with each object's outcome.

        A thousand healthy objects take a few round trips, since one message asks a server about many objects.
        An object that fails does not stop the others.

        Args:
            caps, verify, add_lease: as for ``check``.
            repair: repair objects that are not healthy; the result of the repair is then the outcome.
                Unrecoverable objects stay as they are.
            bounds: how many objects and bytes are processed at the same time.
            ended: called with the number of each cap and its outcome as soon as it is known.
        """
        from pipegrid.transfer.upkeep import UpkeepRequest

        todo = UpkeepRequest(verify=verify, add_lease=add_lease, repair=repair)
        return self._maintain(caps, todo, bounds, ended)

    def renew_many(
        self,
        caps: Sequence[str | Cap],
        *,
        bounds: UpkeepSettings | None = None,
        ended: Callable[[int, RenewResult | Failure], None] | None = None,
    ) -> Deferred[list[RenewResult | Failure]]:
        """Add or renew leases on every share of many objects; see ``check_many`` and ``renew``."""
        from pipegrid.transfer.upkeep import UpkeepRequest

        return self._maintain(caps, UpkeepRequest(renew=True), bounds, ended)

    def _maintain(
        self,
        caps: Sequence[str | Cap],
        todo: UpkeepRequest,
        bounds: UpkeepSettings | None = None,
        ended: Callable[[int, Any], None] | None = None,
    ) -> Deferred[list[Any]]:
        """Process one request for many objects; see ``check_many`` and ``renew_many``."""
        from pipegrid.transfer.upkeep import maintain

        return self._start(maintain(self._open_upkeep(todo, bounds), caps, ended))

    def upkeep(self, todo: UpkeepRequest, bounds: UpkeepSettings | None = None) -> Deferred[Upkeep]:
        """
        Return an ``Upkeep``, to which the caller adds objects as they are found; the caller closes it.

        Args:
            todo: the operation for each object.
            bounds: how many objects and bytes are processed at the same time.

        Raises (through the Deferred):
            UnhappyError: there are no servers.
        """
        return self._start(self._open_upkeep(todo, bounds))

    async def _open_upkeep(self, todo: UpkeepRequest, bounds: UpkeepSettings | None) -> Upkeep:
        from pipegrid.transfer.upkeep import Upkeep

        kinds = UpkeepSettings, type(None)
        check_kind(bounds, kinds, "how much is maintained at once", "an UpkeepSettings")
        await self._readiness.wait(1, all_reported=True)
        bounds = bounds or UpkeepSettings()
        return Upkeep(self._keeper(), self._download_settings, bounds, todo)

    @started
    async def lease_releaser(self) -> LeaseReleaser:
        """
        Ask every server for its time, and return an object that releases this client's leases early.

        Raises (through the Deferred):
            ServerError: a server does not answer.
        """
        from pipegrid.transfer.lease_release import LeaseReleaser

        await self._readiness.wait(1, all_reported=True)
        releaser = LeaseReleaser(self._means, self._download_settings.silence_s)
        await releaser.begin()
        return releaser

    @property
    def storing_lock(self) -> StoringLock:
        """The lock between the processes of this client that store and the process that releases leases."""
        return self._storing

    def _keeper(self) -> ObjectUpkeep:
        from pipegrid.transfer.upkeep import ObjectUpkeep

        return ObjectUpkeep(self._means, self._download_settings.silence_s, self._open_mutables)

    @started
    async def renew(self, cap: str | Cap) -> RenewResult:
        """
        Add or renew a lease on every share of a file, without reading the shares.

        Args:
            cap: a read cap or verify cap of an immutable file or directory.

        Raises (through the Deferred):
            CapError: the cap is not of an immutable file.
        """
        mutable = mutable_file(cap, directories=True)
        if mutable is not None:
            return await self._open_mutables().renew(mutable)
        cap = checkable(cap)
        if isinstance(cap, LitCap):
            return RenewResult(cap, {}, 0, 0, [], [])
        await self._readiness.wait(cap.required_shares, all_reported=True)
        return await self._keeper().renewal(cap).everywhere(self._peers)

    @started
    async def repair(
        self, cap: str | Cap, *, progress: Progress | None = None, force: bool = False
    ) -> RepairResult:
        """
        Verify a file's shares, replace missing and damaged ones, and renew leases.

        Good shares stay where they are. If servers have no space for some shares, the others are placed; see
        the result.

        Args:
            cap: a read cap or verify cap of an immutable file or directory; or the write cap of a mutable
                one, whose best version is published again.
            progress: called with acknowledged and total bytes of the new shares.
            force: repair even if this destroys a newer unreadable version of a mutable file or another
                version with the same sequence number, or if a newer version was seen before.

        Raises (through the Deferred):
            CapError: the cap cannot be repaired.
            NotEnoughSharesError: too few good shares are left.
            CorruptionError: the shares do not decode to the file of the cap.
        """
        mutable = mutable_file(cap, directories=True)
        if mutable is not None:
            return await self._open_mutables().repair(mutable, force)
        cap = checkable(cap)
        check_callable(progress, "progress")
        if isinstance(cap, LitCap):
            from pipegrid.transfer.upkeep import literal

            healthy = literal(cap)
            return RepairResult(cap, healthy, healthy, {}, [], [], 0.0)
        from pipegrid.transfer.repair import Repair

        await self._readiness.wait(cap.required_shares, all_reported=True)
        return await Repair(self._means, cap, self._download_settings, progress).run()


# Mutable files. ``mutables`` does the work; it is imported with the first operation on a mutable file.


# Modules that only one kind of transfer needs are imported when the first transfer of that kind begins.


class ChangingGrid(FileGrid):
    """The part of ``Grid`` that creates and changes mutable files."""

    @started
    async def create_mutable(
        self,
        source: SourceLike | ContentOfKey,
        *,
        format: str | None = None,
        params: Params | None = None,
        progress: Progress | None = None,
        private_key: bytes | None = None,
    ) -> CreateResult:
        """
        Store a mutable file; fires with its write cap (``result.cap``; share ``result.cap.readonly()``).

        Args:
            source: as for ``put``, at most 128 MiB, which are kept in memory. Or a function that is called
                with the file's write key and returns the content, as a directory with children needs.
            format: ``"sdmf"`` (one segment) or ``"mdmf"`` (ranges can be changed); by default the configured
                format.
            params: encoding parameters, by default the configured ones; the format sets the segment size.
            progress: called once, when all bytes are stored.
            private_key: the RSA key (2048 bits, DER, PKCS#1 or PKCS#8), which determines the caps; by default
                a fresh key.

        Raises (through the Deferred):
            SourceError: the source cannot be read.
            UnhappyError: too few servers accepted shares.
            UncoordinatedWriteError: a file with this private key exists.
            UsageError: the source is too large, or the key is not valid.
        """
        async with self._storing:
            mutables = self._open_mutables()
            result = await mutables.create(source, format, params, progress, private_key)
        self._warn_of_shares(self.config.params if params is None else params)
        return result

    def overwrite(self, cap: str | Cap, source: SourceLike) -> Deferred[WriteResult]:
        """
        Replace the whole content of a mutable file.

        Raises (through the Deferred):
            CapError: the cap does not write.
            UncoordinatedWriteError: another client wrote at the same time, and its version is stored instead.
            NotEnoughSharesError: no version was found, or none can be read.
        """
        return self._start_writing(cap, lambda own, file: own.overwrite(file, source))

    def update(self, cap: str | Cap, offset: int, data: bytes) -> Deferred[WriteResult]:
        """
        Overwrite bytes of a mutable file from an offset on, or append bytes.

        For MDMF only the segments with changed bytes are transferred; SDMF is written whole.
        """
        return self._start_writing(cap, lambda own, file: own.update(file, offset, data))

    def modify(
        self,
        cap: str | Cap,
        function: ContentEdit,
        *,
        merge: Merge | None = None,
        remembered: bytes | None = None,
        redo: Redo | None = None,
    ) -> Deferred[WriteResult]:
        """
        Apply a function to the content of a mutable file; fires when the new content is stored.

        No writer's change is lost: if another client writes at the same time, the function is applied again
        to the other client's content. Changes requested at the same time are published as one version.

        Args:
            function: returns new bytes for old bytes. It may be called several times, even with content that
                it has changed already. If it raises an error, the call fails with this error, and nothing is
                written.
            merge: returns one content for several versions with the same sequence number; by default the
                version with the highest root hash is used.
            remembered: the content as this client last saw it, so that it need not be read again. It is used
                only if its hash is that of the version last seen.
            redo: recognises content that already has the change. It is called with the content that the
                function was applied to, the function's result, and the current content; it returns the
                current content, corrected if needed, or None if the function must be applied. Changes that
                are joined must all have the same ``redo``.
        """
        return self._start_writing(
            cap, lambda own, file: own.modify(file, function, merge, remembered, redo)
        )

    def look_ahead(self, cap: str | Cap) -> Deferred[None]:
        """
        Fetch the current version of a mutable file before a change, while the change is still unknown.

        The next ``modify`` of the file in this process then takes one round trip. Nothing is written; when
        the change is written, the servers test that their shares still have the fetched version.

        Raises (through the Deferred):
            CapError: the cap does not write.
            NotEnoughSharesError: no version can be read.
        """
        return self._start_writing(cap, lambda own, file: own.look_ahead(file))

    def known_content(self, cap: str | Cap) -> bytes | None:
        """
        Return the content of a mutable file if this process has written it or fetched it with ``look_ahead``,
        else None.

        Another client may have changed the file meanwhile; the next ``modify`` notices that. No server is
        queried.

        Raises:
            CapError: the cap does not write.
        """
        return self._open_mutables().known_content(writable(cap))

    def _start_writing(
        self, cap: str | Cap, write: Callable[[Mutables, MutableCap], Coroutine[Any, Any, T]]
    ) -> Deferred[T]:
        try:
            file = writable(cap)
        except UsageError as error:
            return fail(error)

        async def work() -> T:
            async with self._storing:
                return await write(self._open_mutables(), file)

        return self._start(work())


# ``Grid`` joins the classes above: ``StoringGrid``, ``FetchingGrid``, ``KeepingGrid`` and ``ChangingGrid``,
# all on ``FileGrid``. Cancelling an operation's Deferred releases everything that the operation uses.
# ``transfer`` carries out the transfers.


class Grid(StoringGrid, FetchingGrid, KeepingGrid, ChangingGrid):
    """
    A storage grid, as configured in one directory.

    Open it with ``Grid.open``; close it when done.

    Attributes:
        config: the settings of the directory.
        created: a sentence for the user if opening has created an embedded grid, else None.
    """
