"""
Fetching a whole tree: directories and files as one pipeline.

The walk reads directories far ahead; files leave as they are met. Small ones, up to a segment, are fetched
into memory, many at once, bounded by their bytes; of large ones a few are on their way at a time, each into
a part beside its name. What lies ahead waits in the walk, which is bounded as well.

**A rerun** fetches what is missing or differs. A file that has size and time of its entry is taken for that
file; one that has its size alone, or all of them with ``paranoid``, is compared: it is encrypted again,
segment for segment, and checked against the hashes to which the cap leads, for which a round trip and the
hashes are fetched.

**What fails** is told with its path, and stops nothing else; for want of servers it is tried once more
(``secondtry``). Directories get their modes and times when all in them has ended; links are made just before,
since no file is then written there any more.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import attrs
from twisted.internet.defer import Deferred, DeferredList
from twisted.python.failure import Failure

from pipegrid.core.caps import Cap, ChkCap, LitCap
from pipegrid.disk.partname import is_part_name
from pipegrid.errors import CapError, PipegridError, SinkError, UsageError, naming
from pipegrid.flow.budget import Budget
from pipegrid.reactor.together import Waiters, begun
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.progress import Progress
from pipegrid.tree import folding, target
from pipegrid.tree.claimed import ClaimedNames
from pipegrid.tree.downloading import FetchesFiles, GetTreeLimits, TreeGetResult
from pipegrid.tree.home import Home, failed
from pipegrid.tree.incoming import IncomingDirectory, Unread
from pipegrid.tree.incomingfile import FileFetcher, WantedFile
from pipegrid.tree.later import KeptForLater
from pipegrid.tree.metadata import Kept, Modes, restored
from pipegrid.tree.names import local_name
from pipegrid.tree.unread import UnreadDirectories
from pipegrid.tree.walk import Found, TreePath, Unreadable, walk

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
        modes: what files and directories get of the modes that their entries say.
        not_kept: told of what has not the mode or time that it should, and why.
        waiting: see ``TreeReports``.
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
        problem: Callable[[TreePath, Exception], None] | None = None,
        done: Callable[[TreePath, str, int], None] | None = None,
        limits: GetTreeLimits | None = None,
        into: Home | None = None,
        waiting: Callable[[str | None], None] | None = None,
        modes: Modes = "umask",
        not_kept: Callable[[TreePath, str], None] | None = None,
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
        self._modes = modes
        self._not_kept = not_kept
        self._paths = 0
        self._small = Budget(self._limits.in_flight_bytes)
        self._large = Budget(self._limits.large_at_once)
        self._jobs = Budget(self._limits.jobs)
        self._running: set[Deferred[None]] = set()
        self._woken: Waiters[None] = Waiters()
        waiting = waiting or (lambda why: None)
        self._fetcher = FileFetcher(grid, workers, force)
        self._later: KeptForLater[TreePath, tuple[WantedFile, Exception]] = KeptForLater(
            grid.clock, lambda: self._woken.fire(None), waiting
        )
        self._unread = UnreadDirectories(grid.clock, self._woken, waiting)
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
        try:
            await self._walk(self._cap, self._metadata_json, ())
            self._leave_down_to(0)
            await self._catch_up(at_end=True)
            if self._bug is None:
                await self._unread.read(self._walk_again, self._stays_unread)
            if self._bug is not None:
                raise self._bug
        except BaseException:
            await self._stop()
            raise
        finally:
            self._later.close()
        return self.result

    async def _walk(self, cap: Cap, metadata_json: bytes, base: TreePath) -> None:
        """Meet a directory, whose path is ``base``, and all that is below."""
        walking = self._limits.walk
        walking = attrs.evolve(walking, objects=max(walking.objects, self._limits.paths + 1))
        bounds: Any = {"limits": walking, "listing": self._limits.listing}
        with walk(self._grid, cap, all_paths=True, metadata_json=metadata_json, **bounds) as tree:
            async for met in tree:
                if base:
                    met = attrs.evolve(met, path=(*base, *met.path))
                self._leave_down_to(len(met.path))
                await self._meet(met)
                if base and isinstance(met, Found):
                    self.result.second_tries += self._unread.is_read(met.path)
                await self._catch_up()
                if self._bug is not None:
                    break

    # What is tried a second time.

    async def _catch_up(self, at_end: bool = False) -> None:
        """Begin what is to be tried again now; return when something new may begin, or nothing is left."""
        later = self._later
        while self._bug is None and (at_end or later.has_any):
            again = later.next(at_end and not self._running)
            for _, (file, error) in later.take_lost():
                self._give_up(file, error)
            if again is not None:
                await self._begin(again[1][0])
            elif later.tries.waiting or (at_end and self._running):
                await self._woken.wait()
            else:
                return

    async def _walk_again(self, one: Unread) -> bool:
        """Walk through a directory that could not be read before; returns whether nobody made a mistake."""
        self._stack = [one.parent]
        assert one.met.cap is not None
        await self._walk(one.met.cap, one.met.metadata_json, one.met.path)
        self._leave_down_to(0)
        await self._catch_up(at_end=True)
        return self._bug is None

    def _could_not_read(self, one: Unread) -> None:
        """A directory could not be read; perhaps it can later."""
        if self._unread.keeps(one):
            one.parent.unfinished += 1
        else:
            self._fail(one.met.path, one.met.error)

    def _stays_unread(self, one: Unread) -> None:
        self._fail(one.met.path, one.met.error)
        self._ended_in(one.parent)

    async def _stop(self) -> None:
        running = list(self._running)
        for each in running:
            each.cancel()
        await DeferredList(running, consumeErrors=True)

    # Directories.

    async def _meet(self, met: Found | Unreadable) -> None:
        self._paths += 1
        if self._paths > self._limits.paths:
            text = (
                f"the tree has more than {self._limits.paths} paths, and the rest is not fetched; fetch "
                "parts of it by their own paths, or give max_paths"
            )
            raise naming(SinkError(text), "give max_paths")
        parent = self._stack[-1] if self._stack else None
        if isinstance(met, Unreadable):
            if parent is None:
                raise met.error
            if parent.path is not None:
                self._could_not_read(Unread(met, parent))
            return
        if parent is None and met.kind != "directory":
            text = "this is the cap of a file, and this fetches directories; fetch it with Grid.get"
            raise naming(CapError(text), "fetch it with Grid.get")
        if parent is not None and parent.path is None:
            if met.kind == "directory":
                self._enter(None, parent, met, Kept(), None)
            return
        kept = restored(met.metadata, self._modes)
        if parent is not None and met.kind != "directory" and _is_part(met, kept):
            self.result.part_files += 1
            return
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
            self._folds = folding.folds_names(home)
        else:
            parent.claim(path)  # a file there may go
            home, mode_before = target.make_directory(parent.there, path, kept, self._force)
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
            IncomingDirectory(path, home, parent, met.path, kept, taken, mode_before)
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
                    not_kept = target.finish_directory(local.there, local.kept, local.mode_before)
                    self._note(local.names, not_kept)
            local = local.parent

    def _make_link(self, local: IncomingDirectory, path: TreePath, place: str, kept: Kept) -> None:
        try:
            local.claim(place)
            not_kept = target.make_link(local.there, place, kept, self._force)
        except PipegridError as error:
            self._fail(path, error)
        else:
            self.result.links += 1
            self._note(path, not_kept)
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
            self._note(met.path, target.restore_mode_and_time(parent.there, path, kept))
            self._is_here(met.path, "present", size or 0)
            return
        parent.unfinished += 1
        await self._begin(WantedFile(met.path, cap, size, parent, path, standing, kept))

    async def _begin(self, file: WantedFile) -> None:
        """Begin to fetch a file when there is room for it."""
        budget = self._small if file.is_small else self._large
        lent = await budget.borrow(FILE_BYTES + (file.size or 0) if file.is_small else 1)
        await self._jobs.borrow(1)
        began_s = self._grid.clock.seconds()
        running = begun(self._fetch(file), self._grid.clock)
        self._running.add(running)

        def ended(outcome: Failure | None) -> None:
            try:
                self._fetched(file, began_s, outcome)
            except BaseException as error:  # of whoever is told; nobody else would hear of it
                self._bug = self._bug or error
            self._running.discard(running)
            budget.give_back(lent)
            self._jobs.give_back(1)
            self._woken.fire(None)

        running.addBoth(ended)

    async def _fetch(self, file: WantedFile) -> None:
        how, size, not_kept = await self._fetcher.fetch(file, self._counting())
        self._note(file.path, not_kept)
        self.result.fetched_bytes += size if how == "fetched" else 0
        if isinstance(file.cap, LitCap):
            self._later.ended(file.path)  # no server was asked
        else:
            self.result.second_tries += self._later.succeeded(file.path)
        self._is_here(file.path, how, size)

    def _fetched(self, file: WantedFile, began_s: float, outcome: Failure | None) -> None:
        """A file has come to its end; what is cut off, or nobody foresaw, ends all."""
        error = None if outcome is None else outcome.value
        if isinstance(error, OSError):
            error = failed("write", file.place, error)
        if error is not None and not isinstance(error, PipegridError):
            raise error
        try:
            file.parent.claim(file.place)
        except PipegridError as other:  # which is why
            error = other
        again = error is not None and not self._unread.is_reading
        if error is None:
            self._ended_in(file.parent)
        elif not again or not self._later.keeps(file.path, (file, error), error, began_s):
            self._give_up(file, error)

    def _give_up(self, file: WantedFile, error: Exception) -> None:
        self._later.ended(file.path)
        self._fail(file.path, error)
        self._ended_in(file.parent)

    def _counting(self) -> Progress | None:
        if self._progress is None:
            return None
        report = self._progress

        def progress(done: int, total: int) -> None:
            report(self._here_bytes + done, self._known_bytes)

        return progress

    # Telling.

    def _is_here(self, path: TreePath, how: str, size: int) -> None:
        if how == "fetched":
            self.result.files += 1
        else:
            self.result.present += 1
        self.result.size += size
        self._here_bytes += size
        if self._progress is not None:
            self._progress(self._here_bytes, max(self._known_bytes, self._here_bytes))
        self._tell(path, how, size)

    def _tell(self, path: TreePath, how: str, size: int) -> None:
        if self._done is not None:
            self._done(path, how, size)

    def _note(self, path: TreePath, not_kept: str) -> None:
        """Something is there, but perhaps without its mode or time."""
        if not_kept:
            self.result.not_kept += 1
            if self._not_kept is not None:
                self._not_kept(path, not_kept)

    def _fail(self, path: TreePath, error: Exception) -> None:
        if self._bug is None and target.stops_all(error):
            self._bug = SinkError(
                f"{error}; nothing more is fetched: see that the disk has space and may be written to, and "
                "run the same command again"
            )
            self._bug.__cause__ = error
            return
        self.result.failed += 1
        if self._problem is not None:
            self._problem(path, error)


def _is_part(met: Found, kept: Kept) -> bool:
    """Return whether an entry is the part of an unfinished download, which was stored with its directory."""
    return is_part_name(met.path[-1] if kept.name is None else os.fsdecode(kept.name))
