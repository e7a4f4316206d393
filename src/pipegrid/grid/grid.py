"""
Grid: what applications and commands use to store files and get them back.

Public methods answer with Deferreds that have started and can be cancelled; cancelling one lets go
of all that it held. Everything that transfers share is made here: workers, servers with their
windows, and the memory budget. What a transfer does is in ``transfer``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any, TypeVar

from twisted.internet.defer import Deferred, DeferredList, fail
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.arguments import check_callable, check_kind, check_whole, shown
from pipegrid.core.caps import Cap, ChkCap, LitCap, MutableCap
from pipegrid.core.filecaps import checkable, mutable_file, readable, writable
from pipegrid.core.leases import ClientSecrets
from pipegrid.core.params import MAX_SEGMENT_BYTES, Params
from pipegrid.disk.partfile import PartFile
from pipegrid.errors import NotEnoughSharesError, UsageError
from pipegrid.flow.budget import Budget
from pipegrid.grid.config import GridConfig, check_happy
from pipegrid.grid.members import Members, Warnings
from pipegrid.grid.opening import open_grid
from pipegrid.grid.readiness import Readiness
from pipegrid.grid.remembered import open_elsewhere
from pipegrid.reactor.together import together
from pipegrid.reactor.trace import Tracing
from pipegrid.reactor.wakeup import Wakeup
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.get.earlier import Earlier
from pipegrid.transfer.get.sink import SinkLike, open_sink
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.progress import Progress, PutReports
from pipegrid.transfer.put.keynotes import KeyNotes
from pipegrid.transfer.put.source import SourceLike, size_of
from pipegrid.transfer.results import (
    CheckResult,
    GetResult,
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
    from pipegrid.grid.discovery import Discovery
    from pipegrid.grid.introducer import IntroducerStatus
    from pipegrid.grid.mutables import Mutables
    from pipegrid.transfer.mutable.files import CreateResult, Merge
    from pipegrid.transfer.mutable.modifying import Edit, WriteResult
    from pipegrid.transfer.put.putter import Putter
    from pipegrid.transfer.upkeep.one import Keeper
    from pipegrid.transfer.upkeep.upkeep import Todo, Upkeep

# What only one kind of transfer needs is imported when the first of that kind begins.

T = TypeVar("T")
G = TypeVar("G", bound="Grid")

UPLOAD_MEMORY_BYTES = 32 << 20
"""
What all uploads together may hold while they code, beyond the windows: large files go one behind
the other, small ones side by side. With the windows it keeps a client under 64 MiB.
"""

_COUNTED_BYTES = 64 << 10
"""Of larger files in a put of many, what is acknowledged makes room for others before all of it is."""

NOTES_NAME = "unfinished"
"""Below the directory in which a client keeps what it remembers."""


class Grid:
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
        members: Members | None = None,
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
        limits = self._limits = limits or Limits()
        self._download_settings = limited(download_settings or DownloadSettings(), limits)
        self._on_close = on_close
        self._upload_settings = upload_settings or UploadSettings()
        memory = limits.memory_bytes
        self._upload_memory = Budget(UPLOAD_MEMORY_BYTES if memory is None else memory // 2)
        self._putter: Putter | None = None
        self._mutables: Mutables | None = None
        self._earlier = Earlier()
        self._running: set[Deferred[Any]] = set()
        self._closed = False

    @classmethod
    def open(
        cls: type[G],
        reactor: IReactorTime,
        directory: str | os.PathLike[str] | None = None,
        *,
        tracer: Tracing | None = None,
        wait_for: int = 0,
        window_bytes: int | None = None,
        max_segment_bytes: int | None = None,
        limits: Limits | None = None,
    ) -> Deferred[G]:
        """
        Open the grid that a directory configures; nothing is waited for.

        Args:
            reactor: the running reactor.
            directory: a client's directory; None for the user's own, where an embedded grid of
                ten storage directories is made if nothing is configured.
            tracer: gets a span for each request and each job of the CPU; closing it is up to you.
            wait_for: how many servers must answer before the first operation begins; by default
                it begins when as many are known as it needs.
            window_bytes: how much may be unacknowledged by each server, always; by default it is
                measured all the time what the way to a server needs.
            max_segment_bytes: files with larger segments are not fetched; by default 16 MiB, or the
                configured segment size if that is more.
            limits: how much of the machine and of its line to take.

        Raises (through the Deferred):
            UsageError: the directory is not configured, or says something impossible.
        """
        return Deferred.fromCoroutine(
            cls._open(reactor, directory, tracer, wait_for, window_bytes, max_segment_bytes, limits)
        )

    @classmethod
    async def _open(
        cls: type[G],
        reactor: IReactorTime,
        directory: str | os.PathLike[str] | None,
        tracer: Tracing | None,
        wait_for: int,
        fixed_window_bytes: int | None,
        max_segment_bytes: int | None,
        limits: Limits | None,
    ) -> G:
        check_whole(wait_for, "wait_for", least=0)
        check_kind(limits, (Limits, type(None)), "what a grid may take", "a Limits")
        opened = open_grid(reactor, directory, tracer, fixed_window_bytes, limits)
        if max_segment_bytes is None:
            max_segment_bytes = max(MAX_SEGMENT_BYTES, opened.config.params.max_segment_bytes)
        return cls(
            reactor,
            opened.config,
            opened.peers,
            opened.workers,
            created=opened.created,
            on_close=opened.on_close,
            members=opened.members,
            discovery=opened.discovery,
            warnings=opened.warnings,
            wait_for=wait_for,
            limits=limits,
            download_settings=DownloadSettings(max_segment_bytes=max_segment_bytes),
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to tell the user of servers and introducers that were skipped, or are out of reach."""
        return self._warnings()

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
                regular file, else to its end; it stays open).
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
        params = self.config.params if params is None else params
        check_kind(params, Params, "how a file is encoded", "a Params")
        check_kind(convergence, (bytes, type(None)), "a convergence secret", "bytes")
        for name in ("progress", "found", "hashing", "cap_known"):
            check_callable(getattr(reports, name), name)
        if happy is None:
            happy = min(self.config.happy, params.total_shares)
        check_happy(happy, params)
        if random_key:
            convergence = None
        elif convergence is None:
            convergence = self.config.convergence
        await self._readiness.wait(happy)
        return await self._open_putter().put(source, params, happy, convergence, reports)

    def _open_putter(self) -> Putter:
        if self._putter is None:
            from pipegrid.transfer.put.putter import Putter

            self._putter = Putter(
                clock=self._reactor,
                workers=self._workers,
                peers=self._peers,
                client_secrets=ClientSecrets(self.config.lease_secret),
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
        from pipegrid.transfer.put.many import ManyPuts

        try:
            if not isinstance(sources, Sequence) or isinstance(sources, (str, bytes, bytearray)):
                raise UsageError(
                    f"many files are stored from a list of sources, not {shown(sources)}"
                )
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

            # What is left of a small file is not worth counting: it counts as a whole until it ends.
            size = sizes[number]
            counted = progress is not None or size is None or size > _COUNTED_BYTES
            reports = PutReports(
                report if counted else None,
                None if found is None else partial(found, number),
                None if hashing is None else partial(hashing, number),
            )
            options = (params, happy, convergence, random_key)
            return Deferred.fromCoroutine(self._put(sources[number], *options, reports))

        def note(number: int, outcome: PutResult | Failure) -> None:
            outcomes[number] = outcome
            if ended is not None:
                ended(number, outcome)

        async def work() -> list[PutResult | Failure]:
            await ManyPuts(sizes, start, note, self._limits.jobs).run()
            return [outcomes[number] for number in range(len(sources))]

        return self._start(work())

    def get(
        self,
        cap: str | Cap,
        sink: SinkLike | str | os.PathLike[str],
        *,
        start: int = 0,
        length: int | None = None,
        progress: Progress | None = None,
        replace: bool = False,
    ) -> Deferred[GetResult]:
        """
        Fetch a file, or a range of it; fires when the last verified byte is in the sink.

        Args:
            cap: a file's read cap.
            sink: a path, a binary file object (it stays open), or an ``IConsumer``, which may pause us. At
                a path the file appears when it is whole, and durable. If that is interrupted, a hidden part
                stays beside it, and the next get to the same path goes on with what of it is good.
            start, length: the range; by default all. A length beyond the end stops there.
            progress: called with bytes delivered and wanted; what was there already is delivered.
            replace: a file that is at the path already.

        Raises (through the Deferred):
            CapError: not a cap that reads a file.
            UsageError: the range begins beyond the end of the file.
            NotEnoughSharesError: too few good shares could be had.
            CorruptionError: the shares do not make up the file of the cap.
            SinkError: the sink could not take it, there is a file at the path, or somebody writes to it.
        """
        return self._start(self._get_to(cap, sink, start, length, progress, replace))

    async def _get_to(
        self,
        given: str | Cap,
        sink: SinkLike | str | os.PathLike[str],
        start: int,
        length: int | None,
        progress: Progress | None,
        replace: bool,
    ) -> GetResult:
        if isinstance(sink, str | os.PathLike):
            if mutable_file(given) is None:
                readable(given)  # before anything is done on the disk
            with PartFile(os.fspath(sink), replace) as part:
                return await self._get_to(given, part, start, length, progress, replace)
        result = await self._get(given, sink, start, length, progress)
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
    ) -> GetResult:
        mutable = mutable_file(given)
        if mutable is not None:
            return await self._open_mutables().get(mutable, sink, start, length, progress)
        cap = readable(given)
        check_whole(start, "the beginning of a range")
        if length is not None:
            check_whole(length, "the length of a range")
        check_callable(progress, "progress")
        if start < 0 or start > cap.size:
            raise UsageError(f"the range begins at byte {start}, but the file has {cap.size} bytes")
        if length is not None and length < 0:
            raise UsageError(f"a range cannot have {length} bytes")
        length = cap.size - start if length is None else min(length, cap.size - start)
        if isinstance(cap, LitCap) or length == 0:
            if isinstance(sink, PartFile):
                sink.begin(0)
            wanted = Wakeup(self._reactor)
            target = open_sink(sink, wanted.fire)
            try:
                if isinstance(cap, LitCap):
                    target.write([cap.data[start : start + length]])
                while target.pending_bytes:
                    await wanted.wait()
                    target.check()
            finally:
                target.finish()
            return GetResult(length, {}, [])
        await self._readiness.wait(cap.required_shares)
        from pipegrid.transfer.get.download import Download

        delivered = False

        def note(done: int, total: int) -> None:
            nonlocal delivered
            delivered = delivered or done > 0
            if progress is not None:
                progress(done, total)

        def download() -> Download:
            return Download(
                clock=self._reactor,
                workers=self._workers,
                peers=self._peers,
                cap=cap,
                sink=sink,
                start=start,
                length=length,
                settings=self._download_settings,
                progress=note,
                earlier=self._earlier,
            )

        try:
            return await download().run()
        except NotEnoughSharesError:
            if delivered or not await self._readiness.more_servers():
                raise
        return await download().run()

    def read(self, cap: str | Cap, start: int = 0, length: int | None = None) -> Deferred[bytes]:
        """Fetch a file, or a range of it, into memory; see ``get``."""
        return self._start(self._read(cap, start, length))

    async def _read(self, cap: str | Cap, start: int, length: int | None) -> bytes:
        into = BytesIO()
        await self._get(cap, into, start, length, None)
        return into.getvalue()

    def check(
        self,
        cap: str | Cap,
        *,
        verify: bool = False,
        add_lease: bool = False,
        progress: Progress | None = None,
    ) -> Deferred[CheckResult]:
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
        return self._start(self._check(cap, verify, progress, add_lease))

    async def _check(
        self, given: str | Cap, verify: bool, progress: Progress | None, add_lease: bool = False
    ) -> CheckResult:
        mutable = mutable_file(given, directories=True)
        if mutable is not None:
            return await self._open_mutables().check(mutable, verify, add_lease)
        cap = checkable(given)
        check_callable(progress, "progress")
        from pipegrid.transfer.upkeep.one import literal

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
        from pipegrid.transfer.upkeep.upkeep import Todo

        todo = Todo(verify=verify, add_lease=add_lease, repair=repair)
        return self.look_after(caps, todo, bounds, ended)

    def renew_many(
        self,
        caps: Sequence[str | Cap],
        *,
        bounds: UpkeepSettings | None = None,
        ended: Callable[[int, RenewResult | Failure], None] | None = None,
    ) -> Deferred[list[RenewResult | Failure]]:
        """Add leases to every share of many objects, or renew them; see ``check_many`` and ``renew``."""
        from pipegrid.transfer.upkeep.upkeep import Todo

        return self.look_after(caps, Todo(renew=True), bounds, ended)

    def look_after(
        self,
        caps: Sequence[str | Cap],
        todo: Todo,
        bounds: UpkeepSettings | None = None,
        ended: Callable[[int, Any], None] | None = None,
    ) -> Deferred[list[Any]]:
        """Do with many objects what is to be done; see ``check_many`` and ``renew_many``."""
        from pipegrid.grid.upkeep import look_after

        return self._start(look_after(self._open_upkeep(todo, bounds), caps, ended))

    def upkeep(self, todo: Todo, bounds: UpkeepSettings | None = None) -> Deferred[Upkeep]:
        """
        Open what looks after objects that are not all known yet; whoever has it closes it.

        Args:
            todo: what is to be done with each.
            bounds: how much at once.

        Raises (through the Deferred):
            UnhappyError: there are no servers.
        """
        return self._start(self._open_upkeep(todo, bounds))

    async def _open_upkeep(self, todo: Todo, bounds: UpkeepSettings | None) -> Upkeep:
        from pipegrid.transfer.upkeep.upkeep import Upkeep

        await self._readiness.wait(1, all_told=True)
        bounds = bounds or UpkeepSettings()
        return Upkeep(self._keeper(), self._download_settings, bounds, todo)

    def _keeper(self) -> Keeper:
        from pipegrid.transfer.upkeep.one import Keeper

        return Keeper(
            clock=self._reactor,
            workers=self._workers,
            peers=self._peers,
            client_secrets=ClientSecrets(self.config.lease_secret),
            silence_s=self._download_settings.silence_s,
            mutables=self._open_mutables,
        )

    def renew(self, cap: str | Cap) -> Deferred[RenewResult]:
        """
        Add a lease to every share of a file, or renew it; not a byte of them is read.

        Args:
            cap: a read cap or verify cap of an immutable file or directory.

        Raises (through the Deferred):
            CapError: not the cap of an immutable file.
        """
        return self._start(self._renew(cap))

    async def _renew(self, given: str | Cap) -> RenewResult:
        mutable = mutable_file(given, directories=True)
        if mutable is not None:
            return await self._open_mutables().renew(mutable)
        cap = checkable(given)
        if isinstance(cap, LitCap):
            return RenewResult(cap, {}, 0, 0, [], [])
        await self._readiness.wait(cap.required_shares, all_told=True)
        return await self._keeper().renewal(cap).everywhere(self._peers)

    def repair(
        self, cap: str | Cap, *, progress: Progress | None = None, force: bool = False
    ) -> Deferred[RepairResult]:
        """
        Check every byte of a file's shares, make those again that are missing or damaged, and renew leases.

        Good shares stay where they are. As many shares as can be found room for are made: ask the result.

        Args:
            cap: a read cap or verify cap of an immutable file or directory; the write cap of a mutable one,
                which is written anew, as the version that is best now.
            progress: called with acknowledged and total bytes of the shares that are made.
            force: of a mutable file, also where a newer version that cannot be read is lost by it.

        Raises (through the Deferred):
            CapError: not the cap of an immutable file.
            NotEnoughSharesError: too few good shares are left.
            CorruptionError: the shares do not make up the file of the cap.
        """
        return self._start(self._repair(cap, progress, force))

    async def _repair(
        self, given: str | Cap, progress: Progress | None, force: bool
    ) -> RepairResult:
        mutable = mutable_file(given, directories=True)
        if mutable is not None:
            return await self._open_mutables().repair(mutable, force)
        cap = checkable(given)
        check_callable(progress, "progress")
        if isinstance(cap, LitCap):
            healthy = await self._check(cap, True, None)
            return RepairResult(cap, healthy, healthy, {}, [], [], 0.0)
        from pipegrid.transfer.repair import Repair

        await self._readiness.wait(cap.required_shares, all_told=True)
        repair = Repair(
            clock=self._reactor,
            workers=self._workers,
            peers=self._peers,
            cap=cap,
            client_secrets=ClientSecrets(self.config.lease_secret),
            settings=self._download_settings,
            progress=progress,
        )
        return await repair.run()

    # Mutable files.

    def create_mutable(
        self,
        source: SourceLike,
        *,
        format: str = "sdmf",
        params: Params | None = None,
        progress: Progress | None = None,
    ) -> Deferred[CreateResult]:
        """
        Store a mutable file; fires with its write cap (``result.cap``; ``.readonly()`` is to be given away).

        Args:
            source: as for ``put``; at most 128 MiB, which are held in memory.
            format: ``"sdmf"``, one segment; or ``"mdmf"``, of which ranges can be changed.
            params: other than configured; the segment size is the format's.
            progress: called once, with all bytes stored.

        Raises (through the Deferred):
            SourceError: the source cannot be read.
            UnhappyError: too few servers took it.
            UsageError: it is too large.
        """
        return self._start(self._open_mutables().create(source, format, params, progress))

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
        function: Edit,
        *,
        merge: Merge | None = None,
        remembered: bytes | None = None,
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
        """
        return self._start_writing(
            cap, lambda own, file: own.modify(file, function, merge, remembered)
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

    def _open_mutables(self) -> Mutables:
        if self._mutables is None:
            from pipegrid.grid.mutables import Mutables

            self._mutables = Mutables(
                self._reactor,
                self.config,
                self._peers,
                self._workers,
                self._readiness,
                self._download_settings.silence_s,
            )
        return self._mutables

    def status(self) -> Deferred[list[ServerStatus]]:
        """Ask every server how it is; those that do not answer say why."""
        return self._start(self._status())

    async def _status(self) -> list[ServerStatus]:
        from pipegrid.grid.status import status_of

        if self._discovery is not None:
            await self._discovery.wait_settled()
        asked = [Deferred.fromCoroutine(status_of(peer, self._reactor)) for peer in self._peers]
        unusable = [] if self._members is None else list(self._members.unusable.values())
        return await together(asked) + unusable

    @property
    def introducers(self) -> list[IntroducerStatus]:
        """How the introducers are, at this moment; none if none are configured."""
        return [] if self._discovery is None else self._discovery.statuses

    def close(self) -> Deferred[None]:
        """End all that is running, let go of the servers, and fire when nothing is left."""
        return Deferred.fromCoroutine(self._close())

    async def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for running in list(self._running):
            running.cancel()
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

    def _start(self, work: Coroutine[Any, Any, T]) -> Deferred[T]:
        if self._closed:
            work.close()
            return fail(UsageError("this grid is closed; open it again"))
        running = Deferred.fromCoroutine(work)
        self._running.add(running)

        def ended(result: Any) -> Any:
            self._running.discard(running)
            return result

        return running.addBoth(ended)


def _key_notes(config: GridConfig, warnings: Warnings) -> KeyNotes | None:
    """Return where puts with random keys are noted: where a client may write, if it may anywhere."""
    return KeyNotes(config.caches[0] / NOTES_NAME, warnings.add) if config.caches else None
