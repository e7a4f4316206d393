"""
Fetching a whole tree: directories and files as one pipeline.

The walk reads directories far ahead; files leave as they are met. Small ones, up to a segment, are fetched
into memory, many at once, bounded by their bytes; of large ones a few are on their way at a time, each into
a part beside its name. What lies ahead waits in the walk, which is bounded as well.

**A rerun** fetches what is missing or differs. A file that has size and time of its entry is taken for that
file; one that has its size alone, or all of them with ``paranoid``, is compared: it is encrypted again,
segment for segment, and checked against the hashes to which the cap leads, for which a round trip and the
hashes are fetched.

**What fails** is told with its path, and stops nothing else. Directories get their modes and times when all
in them has ended; links are made just before, since no file is then written there any more.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from twisted.internet.defer import Deferred, DeferredList
from twisted.python.failure import Failure

from pipegrid.core.caps import Cap, ChkCap, LitCap
from pipegrid.errors import CapError, PipegridError, UsageError, naming
from pipegrid.flow.budget import Budget
from pipegrid.reactor.together import Waiters, begun
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.progress import Progress
from pipegrid.tree import target
from pipegrid.tree.claimed import ClaimedNames
from pipegrid.tree.downloading import FetchesFiles, GetTreeLimits, TreeGetResult
from pipegrid.tree.home import Home, failed
from pipegrid.tree.incoming import IncomingDirectory
from pipegrid.tree.metadata import Kept, restored
from pipegrid.tree.names import local_name
from pipegrid.tree.walk import Found, Path, Unreadable, walk

SMALL_BYTES = 1 << 20
"""Files up to this are held in memory whole."""


FILE_BYTES = 32 << 10
"""What even an empty file counts as: objects of its download. So at most 512 are on their way."""


class TreeGet:
    """
    Fetches one tree, once.

    Args:
        grid: an open one.
        workers: for what takes as long as the disk does.
        cap: of the root, a directory.
        directory: where it goes; made if missing.
        force: replace files and links that are in the way.
        paranoid: compare also files that have size and time of their entries.
        progress: called with bytes that are there, or were fetched, and those known so far.
        problem: told what was left out, and why.
        done: told of each file or link that is there now: path, ``fetched``, ``present`` or ``link``, bytes.
        into: see ``target.begin_tree``.
    """

    def __init__(
        self,
        grid: FetchesFiles,
        workers: CpuWorkers,
        cap: Cap,
        directory: str,
        *,
        metadata_json: bytes = b"{}",
        force: bool = False,
        paranoid: bool = False,
        progress: Progress | None = None,
        problem: Callable[[Path, Exception], None] | None = None,
        done: Callable[[Path, str, int], None] | None = None,
        limits: GetTreeLimits | None = None,
        into: Home | None = None,
    ) -> None:
        self._grid = grid
        self._workers = workers
        self._cap = cap
        self._directory = directory
        self._metadata_json = metadata_json
        self._force = force
        self._paranoid = paranoid
        self._progress = progress
        self._problem = problem
        self._done = done
        self._limits = limits or GetTreeLimits()
        self._into = into
        self._small = Budget(self._limits.in_flight_bytes)
        self._large = Budget(self._limits.large_at_once)
        self._jobs = Budget(self._limits.jobs)
        self._running: set[Deferred[None]] = set()
        self._one_ended: Waiters[None] = Waiters()
        self._bug: BaseException | None = None
        self._stack: list[IncomingDirectory] = []
        self._folds = False
        self._known_bytes = 0
        self._here_bytes = 0
        self.result = TreeGetResult()

    async def run(self) -> TreeGetResult:
        """
        Fetch it.

        Raises:
            CapError: it is not the cap of a directory.
            SinkError: the target cannot be made.
            PipegridError: the root cannot be read.
        """
        tree = walk(
            self._grid,
            self._cap,
            all_paths=True,
            metadata_json=self._metadata_json,
            limits=self._limits.walk,
            listing=self._limits.listing,
        )
        try:
            with tree:
                async for met in tree:
                    self._leave_down_to(len(met.path))
                    await self._meet(met)
                    if self._bug is not None:
                        break
            while self._running and self._bug is None:
                await self._one_ended.wait()
            if self._bug is not None:
                raise self._bug
        except BaseException:
            await self._stop()
            raise
        self._leave_down_to(0)
        return self.result

    async def _stop(self) -> None:
        running = list(self._running)
        for each in running:
            each.cancel()
        await DeferredList(running, consumeErrors=True)

    # Directories.

    async def _meet(self, met: Found | Unreadable) -> None:
        parent = self._stack[-1] if self._stack else None
        if isinstance(met, Unreadable):
            if parent is None:
                raise met.error
            if parent.path is not None:
                self._fail(met.path, met.error)
            return
        if parent is None and met.kind != "directory":
            text = "this is the cap of a file, and this fetches directories; fetch it with Grid.get"
            raise naming(CapError(text), "fetch it with Grid.get")
        if parent is not None and parent.path is None:
            if met.kind == "directory":
                self._enter(None, parent, met, Kept(), None)
            return
        kept = restored(met.metadata)
        try:
            path = self._directory if parent is None else self._place(met, parent, kept)
            if met.kind == "directory":
                self._make(path, parent, met, kept)
                return
            assert parent is not None
            if kept.link is not None:
                parent.links.append((met.path, path, kept))
                return
            await self._meet_file(met, path, parent, kept)
        except PipegridError as error:
            if parent is None:
                raise
            self._fail(met.path, error)
            if met.kind == "directory":
                self._enter(None, parent, met, Kept(), None)

    def _place(self, met: Found, parent: IncomingDirectory, kept: Kept) -> str:
        name = local_name(met.path[-1], kept.name)
        parent.taken.take(name)
        assert parent.path is not None
        return os.path.join(parent.path, name)

    def _make(self, path: str, parent: IncomingDirectory | None, met: Found, kept: Kept) -> None:
        if parent is None:
            home, mode_before = target.begin_tree(path, self._into, kept, self._force)
            self._folds = target.folds_names(home)
        else:
            parent.claim(path)  # a file there may go
            home, mode_before = target.make_directory(parent.there, path, self._force)
            parent.claim(path)
        self.result.directories += 1
        self._enter(home, parent, met, kept, mode_before)

    def _enter(
        self,
        home: Home | None,
        parent: IncomingDirectory | None,
        met: Found,
        kept: Kept,
        mode_before: int | None,
    ) -> None:
        if parent is not None:
            parent.unfinished += 1
        taken = ClaimedNames(self._folds)
        path = None if home is None else home.path
        self._stack.append(
            IncomingDirectory(path, home, parent, len(met.path), kept, taken, mode_before)
        )

    def _leave_down_to(self, depth: int) -> None:
        """The walk is in no directory any more whose path is so long."""
        while self._stack and self._stack[-1].depth >= depth:
            self._ended_in(self._stack.pop())

    def _ended_in(self, local: IncomingDirectory | None) -> None:
        """Something in a directory has ended; the last one finishes it."""
        while local is not None:
            local.unfinished -= 1
            if local.unfinished:
                return
            if local.path is not None:
                for path, place, kept in local.links:
                    self._make_link(local, path, place, kept)
                with suppress(PipegridError):  # it is gone, as was told of what is in it
                    target.finish_directory(local.there, local.kept, local.mode_before)
            local = local.parent

    def _make_link(self, local: IncomingDirectory, path: Path, place: str, kept: Kept) -> None:
        try:
            local.claim(place)
            target.make_link(local.there, place, kept, self._force)
        except PipegridError as error:
            self._fail(path, error)
        else:
            self.result.links += 1
            self._tell(path, "link", 0)

    # Files.

    async def _meet_file(
        self, met: Found, path: str, parent: IncomingDirectory, kept: Kept
    ) -> None:
        cap = met.cap
        size = cap.size if isinstance(cap, (ChkCap, LitCap)) else None
        if cap is None or met.kind != "file":
            raise UsageError(
                "this is neither a file nor a directory that PipeGrid knows, and was left out; "
                "a later version may fetch it"
            )
        self._known_bytes += size or 0
        standing = target.standing(parent.there, path, size, kept)
        if standing != "missing":
            parent.claim(path)
        if standing == "other" and not (self._force and target.may_be_replaced(parent.there, path)):
            raise target.in_the_way(path)
        if standing == "same" and not self._paranoid:
            target.restore_mode_and_time(parent.there, path, kept)
            self._is_here(met.path, "present", size or 0)
            return
        small = size is not None and size <= SMALL_BYTES
        budget = self._small if small else self._large
        lent = await budget.borrow(FILE_BYTES + (size or 0) if small else 1)
        await self._jobs.borrow(1)
        parent.unfinished += 1
        fetching = self._fetch(met.path, cap, size, parent.there, path, standing, kept)
        running = begun(fetching, self._grid.clock)
        self._running.add(running)

        def ended(outcome: Failure | None) -> None:
            try:
                self._fetched(met.path, path, parent, outcome)
            except BaseException as error:  # of whoever is told; nobody else would hear of it
                self._bug = self._bug or error
            self._running.discard(running)
            budget.give_back(lent)
            self._jobs.give_back(1)
            self._one_ended.fire(None)

        running.addBoth(ended)

    def _fetched(
        self, path: Path, place: str, parent: IncomingDirectory, outcome: Failure | None
    ) -> None:
        """A file has come to its end; what is cut off, or nobody foresaw, ends all."""
        error = None if outcome is None else outcome.value
        if isinstance(error, OSError):
            error = failed("write", place, error)
        if error is not None and not isinstance(error, PipegridError):
            raise error
        try:
            parent.claim(place)
        except PipegridError as other:  # which is why
            error = other
        if error is not None:
            self._fail(path, error)
        self._ended_in(parent)

    async def _fetch(
        self,
        path: Path,
        cap: Cap,
        size: int | None,
        home: Home,
        place: str,
        standing: target.Standing,
        kept: Kept,
    ) -> None:
        home.check()  # before bytes are fetched for nothing
        if standing in ("same", "perhaps"):
            if await self._is_same(cap, home, place):
                target.restore_mode_and_time(home, place, kept)
                self._is_here(path, "present", size or 0)
                return
            if not self._force:
                raise target.in_the_way(place)
        replace = standing != "missing"
        got = size
        if size is not None and size <= SMALL_BYTES:
            data = cap.data if isinstance(cap, LitCap) else await self._grid.read(cap)
            await self._workers.run(target.write_whole, home, place, data, replace, kept)
        else:
            target.room_for(os.path.dirname(place), size or 0)
            part = target.TreePart(home, place, replace, kept)
            try:
                result = await self._grid.get(cap, part, progress=self._counting())
                got = result.size
                # ``Grid.get`` publishes parts that it has opened, and those it is given.
                if not part.closed:
                    await self._workers.run(part.publish)
            finally:
                part.leave()  # and keep what is in it for another time
        assert got is not None
        self.result.fetched_bytes += got
        self._is_here(path, "fetched", got)

    async def _is_same(self, cap: Cap, home: Home, place: str) -> bool:
        if isinstance(cap, LitCap):
            return target.holds(home, place, cap.data)
        there = target.FileThere(home, place)
        try:
            await self._grid.get(cap, there)
        except target.Differs:
            return False
        finally:
            there.close()
        return True

    def _counting(self) -> Progress | None:
        if self._progress is None:
            return None
        report = self._progress

        def progress(done: int, total: int) -> None:
            report(self._here_bytes + done, self._known_bytes)

        return progress

    # Telling.

    def _is_here(self, path: Path, how: str, size: int) -> None:
        if how == "fetched":
            self.result.files += 1
        else:
            self.result.present += 1
        self.result.size += size
        self._here_bytes += size
        if self._progress is not None:
            self._progress(self._here_bytes, max(self._known_bytes, self._here_bytes))
        self._tell(path, how, size)

    def _tell(self, path: Path, how: str, size: int) -> None:
        if self._done is not None:
            self._done(path, how, size)

    def _fail(self, path: Path, error: Exception) -> None:
        self.result.failed += 1
        if self._problem is not None:
            self._problem(path, error)
