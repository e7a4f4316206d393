"""`FileGrid`: put, get, check, mutable files."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from io import BytesIO
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import attrs
from twisted.internet.defer import Deferred, DeferredList, fail, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from pipegrid.arguments import check_callable, check_kind, check_whole, shown
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
from pipegrid.core.lease_secrets import ClientSecrets
from pipegrid.disk.part_file import PartFile
from pipegrid.errors import NotEnoughSharesError, ServerError, SinkError, UsageError
from pipegrid.flow.concurrency import MANY, Budget, SmallFileCapacity
from pipegrid.grid.client_cache import open_elsewhere
from pipegrid.grid.client_config import GridConfig, check_happy
from pipegrid.grid.open_grid import open_grid
from pipegrid.grid.server_registry import STATUS_SILENCE_S, Readiness, ServerRegistry, Warnings
from pipegrid.reactor.deferreds import (
    Waiters,
    Wakeup,
    as_deferred,
    check_own_thread,
    gather,
    start_cancellable,
    tell_deferred,
)
from pipegrid.reactor.trace import Tracing
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.get.blocking_sink import is_pipe_or_device, open_pipe_or_device
from pipegrid.transfer.get.get_history import GetHistory
from pipegrid.transfer.get.sink import SinkLike, open_sink
from pipegrid.transfer.peers import CallTimeout, Peer, TransferContext
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
)
from pipegrid.transfer.settings import (
    DownloadSettings,
    Limits,
    UpkeepSettings,
    UploadSettings,
    limited,
)

if TYPE_CHECKING:
    from pipegrid.grid.introducer_client import IntroducerStatus
    from pipegrid.grid.introducer_discovery import Discovery
    from pipegrid.grid.mutables import Mutables
    from pipegrid.reactor.preconnect import Preconnector
    from pipegrid.transfer.mutable.base_version import Redo
    from pipegrid.transfer.mutable.modify import ContentEdit
    from pipegrid.transfer.mutable.mutable_files import ContentOfKey, RangeOf
    from pipegrid.transfer.mutable.publish import CreateResult, WriteResult
    from pipegrid.transfer.mutable.write_queue import Merge
    from pipegrid.transfer.put.uploader import Uploader
    from pipegrid.transfer.upkeep import ObjectUpkeep, Upkeep, UpkeepRequest
    from pipegrid.wire.messages import ServerIdentity


# What all operations of a grid share: servers with their windows, workers, memory; beginning and end.
#
# Public methods of grids answer with Deferreds that have started and can be cancelled; ``_start`` keeps them,
# and ``close`` ends them.

# What only one kind of transfer needs is imported when the first of that kind begins.

P = ParamSpec("P")
T = TypeVar("T")
G = TypeVar("G", bound="FileGrid")

_ONLY_HERE = (
    "only storage directories of this machine are known here: if the cap is from another grid, its servers "
    "are missing, and 'pipegrid init NURL...' joins it"
)

UPLOAD_MEMORY_BYTES = 32 << 20
"""
What all uploads together may hold while they code, beyond the windows: large files go one behind
the other, small ones side by side. With the windows it keeps a client under 64 MiB.
"""


def started(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], Deferred[T]]:
    """Have a method begin when it is called, as ``_start`` of its object does it."""
    tell_deferred(method)

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
        config: what the directory says.
        created: what to tell the user if opening has just made an embedded grid, or None.
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
    ) -> None:
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
        self._running: set[Deferred[Any]] = set()
        self._beginning = 0  # how many have not come back from their first steps yet
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
    ) -> G:
        """
        Open the grid that a directory configures; nothing is waited for.

        Args:
            reactor: the running reactor.
            directory: a client's directory; None for the user's own, where an embedded grid of
                ten storage directories is made if nothing is configured (see ``make``).
            tracer: gets a span for each request and each job of the CPU; closing it is up to you.
            wait_for: how many servers must answer before the first operation begins; by default
                it begins when as many are known as it needs.
            window_bytes: how much may be unacknowledged by each server, always; by default it is
                measured all the time what the way to a server needs.
            max_segment_bytes: files with larger segments are not fetched; by default 16 MiB, or the
                configured segment size if that is more.
            limits: how much of the machine and of its line to take.
            ahead: makes connections to servers already; what is left of them is closed with the grid.
            make: whether a grid may be made; one that is new has nothing of what any cap names.

        Raises (through the Deferred):
            UsageError: the directory is not configured, or says something impossible.
        """
        check_own_thread("a grid")
        check_whole(wait_for, "wait_for", least=0)
        check_kind(limits, (Limits, type(None)), "what a grid may take", "a Limits")
        if max_segment_bytes is not None:
            check_whole(max_segment_bytes, "max_segment_bytes", least=1)
        opened = open_grid(reactor, directory, tracer, window_bytes, limits, ahead, make)
        if max_segment_bytes is None:
            max_segment_bytes = max(MAX_SEGMENT_BYTES, opened.config.params.max_segment_bytes)
        return cls(
            reactor,
            **attrs.asdict(opened, recurse=False),
            wait_for=wait_for,
            limits=limits,
            download_settings=DownloadSettings(max_segment_bytes=max_segment_bytes),
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to tell the user of servers and introducers that were skipped, or are out of reach."""
        return (*self._warnings(), *self._means.shortfall.sentences())

    def _warn_of_shares(self, params: Params) -> None:
        """Warn if a file that was stored has more shares than there are servers."""
        if warning := too_many_shares(params.total_shares, len(self._peers)):
            self._warnings.add(warning)

    @property
    def workers(self) -> CpuWorkers:
        """Threads for what takes long; they end with the grid."""
        return self._workers

    @property
    def clock(self) -> IReactorTime:
        """The reactor, as far as it tells the time."""
        return self._reactor

    @property
    def limits(self) -> Limits:
        """How much of the machine and of its line this grid may take."""
        return self._limits

    def _open_mutables(self) -> Mutables:
        if self._mutables is None:
            from pipegrid.grid.mutables import Mutables

            self._mutables = Mutables(
                self._means, self.config, self._readiness, self._download_settings.silence_s
            )
        return self._mutables

    @property
    def _appetite(self) -> SmallFileCapacity:
        """How many small files all servers bear, as far as is known."""
        return min((peer.server.appetite for peer in self._peers), default=SmallFileCapacity.ANY)

    def _expect(self, objects: int) -> None:
        """So many small objects are about to be stored: have the servers prepare if these are many."""
        for peer in self._peers if objects >= MANY else ():
            peer.server.expect(objects)

    @started
    async def status(self) -> list[ServerStatus]:
        """
        Ask every server how it is; those that do not answer say why.

        Of a grid that was opened with ``wait_for``, when so many have answered, or after a minute.
        """

        await self._readiness.up_or_late()
        if self._discovery is not None:
            await self._discovery.wait_settled()
        asked = [Deferred.fromCoroutine(status_of(peer, self._reactor)) for peer in self._peers]
        unusable = [] if self._members is None else list(self._members.unusable.values())
        return await gather(asked) + unusable

    @property
    def servers(self) -> list[ServerIdentity]:
        """The servers that are known at this moment, in reach or not."""
        return [peer.identity for peer in self._peers]

    @started
    async def ask_servers(self, told: Callable[[ServerStatus], None]) -> None:
        """
        Ask every server that is known now how it is; fires when all have answered, or not in time.

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
        """How the introducers are, at this moment; none if none are configured."""
        return [] if self._discovery is None else self._discovery.statuses

    def close(self) -> Deferred[None]:
        """
        End all that is running, let go of the servers, and fire when nothing is left.

        Whoever calls it again is told at the same time. Who gives up waiting does not keep it from ending.
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
            # What has called us ends in the next turn, while all that it uses is still there.
            await deferLater(self._reactor, 0)
        if self._mutables is not None:
            self._mutables.close()
        if self._discovery is not None:
            self._discovery.stop()
        leaving = [peer.server.disconnect() for peer in self._peers]
        leaving += [] if self._members is None else self._members.leaving
        await DeferredList(leaving, consumeErrors=True)  # one that fails is gone as well
        await self._workers.stop()
        if self._on_close is not None:
            await self._on_close()

    def _check_open(self) -> None:
        check_own_thread("a grid")
        if self._closed:
            raise UsageError("this grid is closed; open it again")

    def _explain(self, error: NotEnoughSharesError) -> None:
        """Say what is missing if a file is probably another grid's: no server has anything of it."""
        if error.found or error.absent or not self._peers:
            return
        hint = (
            _ONLY_HERE
            if self.config.is_on_this_machine
            else "if the cap is from another grid, its servers are missing here"
        )
        if hint not in str(error):  # what one operation told another
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
        if self._closed:  # by what it has called already
            running.cancel()

        def ended(result: Any) -> Any:
            self._running.discard(running)
            if isinstance(result, Failure) and isinstance(result.value, NotEnoughSharesError):
                self._explain(result.value)
            return result

        return running.addBoth(ended)


# Files on their way to a grid.

# What only one kind of transfer needs is imported when the first of that kind begins.

_COUNTED_BYTES = 64 << 10
"""Of larger files in a put of many, what is acknowledged makes room for others before all of it is."""

NOTES_NAME = "unfinished"
"""Below the directory in which a client keeps what it remembers."""


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
    ) -> Deferred[PutResult]:
        """
        Store one file; fires when enough servers hold it, with its cap.

        Args:
            source: a path, bytes, or a binary file object (read from its beginning if it is a
                regular file, else to its end; it stays open); or an async iterator of bytes, an
                ``IBodyProducer``, or an ``IResponse``. What comes once is copied to temporary space.
            params: other than configured.
            happy: servers of happiness wanted, other than configured.
            convergence: the convergence secret, other than configured; ``b""`` for none.
            random_key: use a fresh key, so that the cap never equals another. If the put of a file (named by
                its path, of more than one segment) is cut off, the next put of it with a random key goes on.
            progress: called with acknowledged and total bytes of shares; what was there already counts.
            found: called with bytes of shares that turned out to be there already, and the total.
            hashing: called before that, with the bytes of the file that its key was made from so far,
                and its size; not for a file that is read in one go.
            cap_known: called with the file's cap as soon as all of it is coded, long before it is stored,
                and perhaps in vain; not for a file that lives in its cap.

        Raises (through the Deferred):
            SourceError: the source cannot be read, or changes meanwhile.
            UnhappyError: too few servers took it.
            UsageError: the parameters are impossible.
        """
        options = (params, happy, convergence, random_key)
        reports = PutReports(progress, found, hashing, cap_known)
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
        for name in ("progress", "found", "hashing", "cap_known"):
            check_callable(getattr(reports, name), name)
        params, happy = self._put_options(params, happy, convergence)
        if random_key:
            convergence = None
        elif convergence is None:
            convergence = self.config.convergence
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
        Return how a file is encoded, and how many servers of happiness are wanted, with options of ``put``.

        Raises:
            UsageError: they are impossible.
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

            self._putter = Uploader(
                self._means,
                memory=self._upload_memory,
                settings=self._upload_settings,
                notes=_key_notes(self.config, self._warnings),
                say=self._warnings.add,
                elsewhere=open_elsewhere(self.config.ask_first, self.config.caches),
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
        Store many files as one pipeline, the large ones first; fires with each one's outcome.

        A hundred small files take a round trip and their bytes. A file that fails does not stop the
        others. How many files are under way, and open, is bounded.

        Args:
            sources: see ``put``; so are the other options.
            progress, found, hashing: called as those of ``put`` are, with the number of the file in front.
            ended: called with the number of each file, and its outcome, as it ends.
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

            # What is left of a small file counts as a whole until it ends.
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
            bounds = self._limits.jobs, self._reactor.seconds, lambda: self._appetite
            await ManyPuts(sizes, start, note, *bounds, self._expect).run()
            return [outcomes[number] for number in range(len(sources))]

        return self._start(work())


def _numbered(
    number: int,
    report: Progress | None,
    found: Callable[[int, int, int], None] | None,
    hashing: Callable[[int, int, int], None] | None,
) -> PutReports:
    """Return the reports of one of many files; the others are told its number in front."""
    return PutReports(
        report,
        None if found is None else partial(found, number),
        None if hashing is None else partial(hashing, number),
    )


def _check_list(sources: object) -> None:
    if not isinstance(sources, Sequence) or isinstance(sources, (str, bytes, bytearray)):
        raise UsageError(f"many files are stored from a list of sources, not {shown(sources)}")


def _key_notes(config: GridConfig, warnings: Warnings) -> KeyNotes | None:
    """Return where puts with random keys are noted: where a client may write, if it may anywhere."""
    return KeyNotes(config.caches[0] / NOTES_NAME, warnings.add) if config.caches else None


# Files on their way back from a grid.

# What only one kind of transfer needs is imported when the first of that kind begins.


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
    ) -> GetResult:
        """
        Fetch a file, or a range of it; fires when the last verified byte is in the sink.

        Args:
            cap: a file's read cap.
            sink: a path, a binary file object (it stays open), or an ``IConsumer``, which may pause us. A
                pipe, a device, or a file object of another kind than a regular file's is written to in a
                thread, one write at a time. At a path the file appears when it is whole, and durable. If
                that is interrupted, a hidden part stays beside it, and the next get to the same path goes
                on with what of it is good.
            start, length: the range; by default all. A length beyond the end stops there.
            progress: called with bytes delivered and wanted; what was there already is delivered.
            replace: a file that is at the path already.
            range_of: instead of ``start`` and ``length``: called with the size of the file, before the first
                byte is delivered, it returns both. For a mutable file that is written over meanwhile it is
                called again.

        Raises (through the Deferred):
            CapError: not a cap that reads a file.
            UsageError: the range begins beyond the end of the file.
            NotEnoughSharesError: too few good shares could be had.
            CorruptionError: the shares do not make up the file of the cap.
            SinkError: the sink could not take it, its reader has gone, there is a file at the path, or
                somebody writes to it.
        """
        with ExitStack() as stack:
            if isinstance(sink, str | os.PathLike):
                if mutable_file(cap) is None:
                    readable(cap)  # before anything is done on the disk
                path = _checked_path(sink)
                if is_pipe_or_device(path):
                    sink = await open_pipe_or_device(path, self._workers)
                    stack.callback(sink.close)
                else:
                    sink = stack.enter_context(PartFile(path, replace))
            result = await self._get(cap, sink, start, length, progress, range_of)
            if isinstance(sink, PartFile):
                await self._workers.run(sink.publish)
            return result

    async def _get(
        self,
        given: str | Cap,
        sink: SinkLike,
        start: int,
        length: int | None,
        progress: Progress | None,
        range_of: RangeOf | None = None,
    ) -> GetResult:
        check_callable(range_of, "range_of")
        mutable = mutable_file(given)
        if mutable is not None:
            return await self._open_mutables().get(
                mutable, sink, start, length, progress, range_of=range_of
            )
        cap = readable(given)
        check_callable(progress, "progress")
        if range_of is not None:
            start, length = range_of(cap.size)
        length = _checked_length(cap.size, start, length)
        if isinstance(cap, LitCap) or length == 0:
            return await self._give(cap, sink, start, length)
        await self._readiness.wait(cap.required_shares)
        from pipegrid.transfer.get.download import Download
        from pipegrid.transfer.get.share_readers import DownloadRequest

        delivered = False

        def note(done: int, total: int) -> None:
            nonlocal delivered
            delivered = delivered or done > 0
            if progress is not None:
                progress(done, total)

        def download() -> Download:
            request = DownloadRequest(cap, start, length)
            settings = self._download_settings
            return Download(self._means, request, sink, settings, note, self._earlier)

        first = download()
        try:
            return await first.run()
        except NotEnoughSharesError:
            if delivered or first.handed_on or not await self._readiness.more_servers():
                raise
        return await download().run()

    async def _give(
        self, cap: ChkCap | LitCap, sink: SinkLike, start: int, length: int
    ) -> GetResult:
        """Hand on a part of what the cap itself holds, or of nothing: no server is asked."""
        if isinstance(sink, PartFile):
            sink.begin(0)
        wanted = Wakeup(self._reactor)
        target = open_sink(sink, wanted.fire, self._workers)
        try:
            if isinstance(cap, LitCap):
                target.write([cap.data[start : start + length]])
            while target.pending_bytes:
                await wanted.wait()
                target.check()
            await target.flushed()
        finally:
            target.finish()
        return GetResult(length, {}, [])

    @started
    async def size(self, cap: str | Cap) -> int:
        """
        Find out how many bytes a file has; servers are asked only for one that can change.

        Raises (through the Deferred):
            CapError: not a cap that reads a file.
            NotEnoughSharesError: no version can be read.
        """
        mutable = mutable_file(cap)
        if mutable is not None:
            return await self._open_mutables().size(mutable)
        return readable(cap).size

    @started
    async def read(self, cap: str | Cap, start: int = 0, length: int | None = None) -> bytes:
        """Fetch a file, or a range of it, into memory; see ``get``."""
        into = BytesIO()
        await self._get(cap, into, start, length, None)
        return into.getvalue()


def _checked_path(path: str | os.PathLike[str]) -> str:
    """
    Raises:
        SinkError: no file can have this name.
    """
    name = os.fspath(path)
    if not name or "\0" in name:
        raise SinkError(f"{name!r} is not the path of a file; give another")
    return name


def _checked_length(size: int, start: int, length: int | None) -> int:
    """
    Return how many bytes of a file a range has; ``length``: that were asked for.

    Raises:
        UsageError: it is no range of it.
    """
    check_whole(start, "the beginning of a range")
    if length is not None:
        check_whole(length, "the length of a range")
    if start < 0 or start > size:
        raise UsageError(f"the range begins at byte {start}, but the file has {size} bytes")
    if length is not None and length < 0:
        raise UsageError(f"a range cannot have {length} bytes")
    return size - start if length is None else min(length, size - start)


# What keeps files on a grid: checks, repairs, leases; of one, or of many.

# What only one kind of transfer needs is imported when the first of that kind begins.


class KeepingGrid(FileGrid):
    """The part of ``Grid`` that looks after files: checks, repairs and leases, of one or of many."""

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
        Find out how many shares of a file are where.

        Args:
            cap: a read cap or verify cap of an immutable file or directory.
            verify: fetch every share and check every byte of it.
            add_lease: add a lease, or renew it, where a good share was found.
            progress: called with shares verified and shares found.

        Raises (through the Deferred):
            CapError: not the cap of an immutable file.
        """
        mutable = mutable_file(cap, directories=True)
        if mutable is not None:
            return await self._open_mutables().check(mutable, verify, add_lease)
        cap = checkable(cap)
        check_callable(progress, "progress")
        from pipegrid.transfer.upkeep import literal

        if isinstance(cap, LitCap):
            return literal(cap)
        await self._readiness.wait(cap.required_shares, all_told=True)
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
        Check many objects as one pipeline, each once; fires with each one's outcome.

        A thousand healthy objects take a few round trips: servers are asked about many in one message. An
        object that fails does not stop the others.

        Args:
            caps: read caps or verify caps of immutable files and directories.
            verify: fetch every share and check every byte of it; holds memory, and takes its time.
            add_lease: add a lease, or renew it, where a share was found.
            repair: make again what is missing of objects that are not healthy; what came of it is then the
                outcome. Those that cannot be restored stay as they are.
            bounds: how much at once.
            ended: called with the number of each cap, and its outcome, in the order of ending.
        """
        from pipegrid.transfer.upkeep import UpkeepRequest

        todo = UpkeepRequest(verify=verify, add_lease=add_lease, repair=repair)
        return self._look_after(caps, todo, bounds, ended)

    def renew_many(
        self,
        caps: Sequence[str | Cap],
        *,
        bounds: UpkeepSettings | None = None,
        ended: Callable[[int, RenewResult | Failure], None] | None = None,
    ) -> Deferred[list[RenewResult | Failure]]:
        """Add leases to every share of many objects, or renew them; see ``check_many`` and ``renew``."""
        from pipegrid.transfer.upkeep import UpkeepRequest

        return self._look_after(caps, UpkeepRequest(renew=True), bounds, ended)

    def _look_after(
        self,
        caps: Sequence[str | Cap],
        todo: UpkeepRequest,
        bounds: UpkeepSettings | None = None,
        ended: Callable[[int, Any], None] | None = None,
    ) -> Deferred[list[Any]]:
        """Do with many objects what is to be done; see ``check_many`` and ``renew_many``."""
        from pipegrid.transfer.upkeep import look_after

        return self._start(look_after(self._open_upkeep(todo, bounds), caps, ended))

    def upkeep(self, todo: UpkeepRequest, bounds: UpkeepSettings | None = None) -> Deferred[Upkeep]:
        """
        Open what looks after objects that are not all known yet; whoever has it closes it.

        Args:
            todo: what is to be done with each.
            bounds: how much at once.

        Raises (through the Deferred):
            UnhappyError: there are no servers.
        """
        return self._start(self._open_upkeep(todo, bounds))

    async def _open_upkeep(self, todo: UpkeepRequest, bounds: UpkeepSettings | None) -> Upkeep:
        from pipegrid.transfer.upkeep import Upkeep

        kinds = UpkeepSettings, type(None)
        check_kind(bounds, kinds, "how much is maintained at once", "an UpkeepSettings")
        await self._readiness.wait(1, all_told=True)
        bounds = bounds or UpkeepSettings()
        return Upkeep(self._keeper(), self._download_settings, bounds, todo)

    def _keeper(self) -> ObjectUpkeep:
        from pipegrid.transfer.upkeep import ObjectUpkeep

        return ObjectUpkeep(self._means, self._download_settings.silence_s, self._open_mutables)

    @started
    async def renew(self, cap: str | Cap) -> RenewResult:
        """
        Add a lease to every share of a file, or renew it; not a byte of them is read.

        Args:
            cap: a read cap or verify cap of an immutable file or directory.

        Raises (through the Deferred):
            CapError: not the cap of an immutable file.
        """
        mutable = mutable_file(cap, directories=True)
        if mutable is not None:
            return await self._open_mutables().renew(mutable)
        cap = checkable(cap)
        if isinstance(cap, LitCap):
            return RenewResult(cap, {}, 0, 0, [], [])
        await self._readiness.wait(cap.required_shares, all_told=True)
        return await self._keeper().renewal(cap).everywhere(self._peers)

    @started
    async def repair(
        self, cap: str | Cap, *, progress: Progress | None = None, force: bool = False
    ) -> RepairResult:
        """
        Check every byte of a file's shares, make those again that are missing or damaged, and renew leases.

        Good shares stay where they are. As many shares as can be found room for are made: ask the result.

        Args:
            cap: a read cap or verify cap of an immutable file or directory; the write cap of a mutable one,
                which is written anew, as the version that is best now.
            progress: called with acknowledged and total bytes of the shares that are made.
            force: of a mutable file, also where a newer version that cannot be read, or another one with the
                same number, is lost by it, or a newer one was seen before.

        Raises (through the Deferred):
            CapError: not the cap of an immutable file.
            NotEnoughSharesError: too few good shares are left.
            CorruptionError: the shares do not make up the file of the cap.
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

        await self._readiness.wait(cap.required_shares, all_told=True)
        return await Repair(self._means, cap, self._download_settings, progress).run()


# Files of a grid that can change.
#
# What is done with them is in ``mutables``, which is loaded with the first of them.


# What only one kind of transfer needs is imported when the first of that kind begins.


class ChangingGrid(FileGrid):
    """Makes and changes mutable files."""

    def create_mutable(
        self,
        source: SourceLike | ContentOfKey,
        *,
        format: str | None = None,
        params: Params | None = None,
        progress: Progress | None = None,
        private_key: bytes | None = None,
    ) -> Deferred[CreateResult]:
        """
        Store a mutable file; fires with its write cap (``result.cap``; ``.readonly()`` is to be given away).

        Args:
            source: as for ``put``; at most 128 MiB, which are held in memory. Or a function that returns
                the content, given the file's write key, as a directory with children needs it.
            format: ``"sdmf"``, one segment; or ``"mdmf"``, of which ranges can be changed; by
                default, as configured.
            params: other than configured; the segment size is the format's.
            progress: called once, with all bytes stored.
            private_key: DER (PKCS#1 or PKCS#8) of the RSA key of 2048 bits that the file gets, from which
                its caps follow; by default a fresh one.

        Raises (through the Deferred):
            SourceError: the source cannot be read.
            UnhappyError: too few servers took it.
            UncoordinatedWriteError: there is a file of this private key.
            UsageError: it is too large, or that is no such key.
        """
        return self._start(self._create(source, format, params, progress, private_key))

    async def _create(
        self,
        source: SourceLike | ContentOfKey,
        format: str | None,
        params: Params | None,
        progress: Progress | None,
        private_key: bytes | None,
    ) -> CreateResult:
        result = await self._open_mutables().create(source, format, params, progress, private_key)
        self._warn_of_shares(self.config.params if params is None else params)
        return result

    def overwrite(self, cap: str | Cap, source: SourceLike) -> Deferred[WriteResult]:
        """
        Replace the content of a mutable file, whatever it was.

        Raises (through the Deferred):
            CapError: the cap does not write.
            UncoordinatedWriteError: somebody else wrote at the same time, and theirs is there now.
            NotEnoughSharesError: nothing is known of its versions, or none can be read.
        """
        return self._start_writing(cap, lambda own, file: own.overwrite(file, source))

    def update(self, cap: str | Cap, offset: int, data: bytes) -> Deferred[WriteResult]:
        """
        Write bytes into a mutable file, from an offset within it or at its end; the others stay.

        Of MDMF only the segments that are touched travel; SDMF is written whole.
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
        Apply a function to the content of a mutable file; fires when the result is what is there.

        Other writers' changes are never lost by it, nor is this one: it is applied again to what they made
        of the file. Changes that are asked for at the same time are written as one version.

        Args:
            function: from old bytes to new bytes. It may be called several times, also with content that has
                its change already; what it raises fails the call, and nothing is written.
            merge: makes one content of several versions with the same number; by default the highest counts.
            remembered: what the content was when this client saw it last, if the caller has kept it; then it
                need not be read again. It is held against the version that was seen.
            redo: finds the change in content that has it already. It is given content that the function was
                applied to, what became of it, and what is there now, and returns the latter, perhaps put
                right, or None: then the function is applied to it. Of changes that are joined all must have
                the same.
        """
        return self._start_writing(
            cap, lambda own, file: own.modify(file, function, merge, remembered, redo)
        )

    def look_ahead(self, cap: str | Cap) -> Deferred[None]:
        """
        Find out what a change of a mutable file needs to know, while the change itself is not known yet.

        The next ``modify`` of the file in this process then takes one round trip. Nothing is written, and
        nothing is taken for granted: servers test what was found when the change is written.

        Raises (through the Deferred):
            CapError: the cap does not write.
            NotEnoughSharesError: no version can be read.
        """
        return self._start_writing(cap, lambda own, file: own.look_ahead(file))

    def _start_writing(
        self, cap: str | Cap, write: Callable[[Mutables, MutableCap], Coroutine[Any, Any, T]]
    ) -> Deferred[T]:
        try:
            file = writable(cap)
        except UsageError as error:
            return fail(error)
        return self._start(write(self._open_mutables(), file))


# Grid: what applications and commands use to store files and get them back.
#
# Public methods answer with Deferreds that have started and can be cancelled; cancelling one lets go
# of all that it held. Each idea has a room: ``storing``, ``fetching``, ``keeping``, ``changing``; everything
# that they share is made in ``base``. What a transfer does is in ``transfer``.


class Grid(StoringGrid, FetchingGrid, KeepingGrid, ChangingGrid):
    """
    A storage grid, as configured in one directory.

    Open it with ``Grid.open``; close it when done.

    Attributes:
        config: what the directory says.
        created: what to tell the user if opening has just made an embedded grid, or None.
    """


# How one server is, at this moment.


async def status_of(peer: Peer, clock: IReactorTime) -> ServerStatus:
    """Ask a server how it is; one that does not answer has a reason."""
    reason, rtt_s, application, available_bytes = None, None, None, None
    started = clock.seconds()
    try:
        version = await CallTimeout(clock, STATUS_SILENCE_S).answer(peer.server.version(), peer)
        if peer.protocol in ("https", "foolscap"):
            # That was a connection; how long does an answer take?
            started = clock.seconds()
            version = await CallTimeout(clock, STATUS_SILENCE_S).answer(peer.server.version(), peer)
    except ServerError as error:
        reason = str(error)
    else:
        rtt_s = clock.seconds() - started
        application, available_bytes = version.application, version.available_bytes
    return ServerStatus(
        nickname=peer.name,
        server_id=peer.identity.server_id,
        protocol=peer.protocol,
        address=peer.address,
        reachable=reason is None,
        reason=reason,
        rtt_s=rtt_s,
        version=application,
        available_bytes=available_bytes,
        no_uploads=peer.no_uploads(),
    )
