"""The download of a tree: reading directories in advance, fetching files, retries, and a summary."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import attrs
from twisted.internet.defer import CancelledError, Deferred, DeferredList
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from pipegrid.core.caps import Cap, LitCap, immutable_size
from pipegrid.core.text import printable
from pipegrid.disk.atomic_write import current_umask, is_part_name, part_path
from pipegrid.disk.part_file import PartInUse, TargetExists
from pipegrid.errors import CapError, PipegridError, SinkError, UsageError, naming
from pipegrid.flow.concurrency_limits import Budget
from pipegrid.grid.file_grid import Grid
from pipegrid.reactor.deferreds import Waiters, start_cancellable
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.results import Progress
from pipegrid.transfer.settings import Limits
from pipegrid.tree import local_files
from pipegrid.tree.directory_reading import ListingLimits
from pipegrid.tree.extended_metadata import MetadataLosses
from pipegrid.tree.file_metadata import Modes, RestoredMetadata, restored
from pipegrid.tree.local_directory_descriptor import DirectoryFd, failed
from pipegrid.tree.local_files import NameCollisions, local_name
from pipegrid.tree.metadata_restore import ExtendedRestore, LinkedFiles, is_one_file, link_file
from pipegrid.tree.retry_queue import MOST, RetryQueue, wants_servers
from pipegrid.tree.small_file_writes import WholeFile, WriteGroups
from pipegrid.tree.walk import Found, TreePath, Unreadable, WalkLimits, walk

# The limits and results of fetching a tree.

SMALL_IN_FLIGHT_BYTES = 16 << 20
"""Maximum bytes of all small files in flight; they fill a link of 1 Gbit/s with a round trip of 100 ms."""

LARGE_AT_ONCE = 3
"""Maximum number of larger files fetched at once; each may use ``DownloadSettings.memory_bytes``."""


MAX_PATHS = 1_000_000
"""The default maximum of paths in one fetched tree."""


@attrs.define
class TreeGetResult:
    """
    The outcome of fetching a tree, in numbers.

    Attributes:
        files: fetched files.
        present: files that existed already.
        directories, links: those that exist now.
        size: bytes of files that were fetched or existed.
        fetched_bytes: bytes of fetched files.
        second_tries: files and directories whose retry succeeded when servers were reachable again.
        failed: objects that were left out; each was reported.
        part_files: part files of other downloads that the tree contains; they were skipped.
        not_kept: files, directories and links that did not get their mode or time.
        not_restored: extended metadata that could not be restored.
    """

    files: int = 0
    present: int = 0
    directories: int = 0
    links: int = 0
    size: int = 0
    fetched_bytes: int = 0
    second_tries: int = 0
    failed: int = 0
    part_files: int = 0
    not_kept: int = 0
    not_restored: MetadataLosses = attrs.Factory(MetadataLosses)


class GetTreeLimits(NamedTuple):
    """
    Limits of fetching a tree.

    Attributes:
        in_flight_bytes: maximum bytes of small files in flight.
        large_at_once: maximum number of larger files that are fetched at the same time.
        jobs: maximum number of files of any size that are fetched at the same time.
        walk, listing: see ``WalkLimits`` and ``ListingLimits``.
        paths: maximum number of files, directories and links; a small tree can have a billion paths.
    """

    in_flight_bytes: int = SMALL_IN_FLIGHT_BYTES
    large_at_once: int = LARGE_AT_ONCE
    jobs: int = 1 << 20
    walk: WalkLimits = WalkLimits()
    listing: ListingLimits = ListingLimits()
    paths: int = MAX_PATHS


def bounded(limits: Limits) -> GetTreeLimits:
    """
    Return the limits for fetching a tree on a grid with these limits. Small files in flight, and directories
    read in advance, may each take a quarter of the grid's memory.
    """
    bounds = GetTreeLimits()
    jobs = bounds.jobs if limits.jobs is None else limits.jobs
    in_flight_bytes, walk = bounds.in_flight_bytes, bounds.walk
    if limits.memory_bytes is not None:
        part = limits.memory_bytes // 4
        in_flight_bytes = min(in_flight_bytes, part)
        walk = walk._replace(ahead_bytes=min(walk.ahead_bytes, part))
    return GetTreeLimits(in_flight_bytes, min(bounds.large_at_once, jobs), jobs, walk)


# The state of a local directory while a tree is fetched into it.


@attrs.define(eq=False, repr=False)
class IncomingDirectory:
    """
    A local directory of the tree that is fetched.

    Attributes:
        home: the descriptor of the directory; None if the directory is left out with all its content.
        names: the path of the directory on the grid.
        unfinished: number of entries in it that have not ended, plus one while the walk is in it.
        links: symbolic links to be created in it.
    """

    home: DirectoryFd | None
    parent: IncomingDirectory | None
    names: TreePath
    kept: RestoredMetadata
    taken: NameCollisions
    mode_before: int | None = None
    existed: bool = False
    unfinished: int = 1
    links: list[tuple[TreePath, str, RestoredMetadata]] = attrs.Factory(list)

    @property
    def there(self) -> DirectoryFd:
        """The descriptor of the directory, which must not be one that is left out."""
        assert self.home is not None
        return self.home

    def claim(self, path: str, identity: tuple[int, int] | None = None) -> None:
        """Record that the file at a path belongs to the entry with its name; see ``NameCollisions``."""
        self.taken.claim(self.there, path, identity)


class Unread(NamedTuple):
    """A directory of the tree that could not be read, and its local directory."""

    met: Unreadable
    parent: IncomingDirectory


# The steps of fetching one file of a tree.

SMALL_BYTES = 1 << 20
"""Files up to this size are held in memory as a whole."""

LOOK_S = 0.1
WAIT_S = 60.0
"""Seconds to wait for another process that writes the same file, counted from its last progress."""

MAX_LOOKS = 5
"""The maximum number of retries for a file that another process has created meanwhile."""


class FileOutcome(NamedTuple):
    """
    How a file was obtained.

    Attributes:
        not_kept: a clause about its mode and time if they could not be set, otherwise empty.
        identity: the device and inode of the file, if they are known.
    """

    how: Literal["fetched", "present", "link"]
    size: int
    not_kept: str = ""
    identity: tuple[int, int] | None = None


class WantedFile(NamedTuple):
    """
    A file to be fetched.

    Attributes:
        path: the names from the root of the tree.
        size: the size of the file; None if only reading the file shows it.
        parent: the local directory.
        place: the local path.
        standing: what existed at the local path when the walk met the file.
        kept: the metadata of the file's entry.
        link_to: a complete file of which this is another name, or None.
    """

    path: TreePath
    cap: Cap
    size: int | None
    parent: IncomingDirectory
    place: str
    standing: local_files.Presence
    kept: RestoredMetadata
    link_to: WantedFile | None = None

    @property
    def link_key(self) -> tuple[Any, ...] | None:
        """What all names of one file have in common; None: the file has only one name."""
        extended, kept = self.kept.extended, self.kept
        if extended is None or extended.stored.hard_link is None:
            return None
        return extended.stored, self.cap, self.size, kept.mode, kept.mtime_ns

    def lose_link(self) -> None:
        """Record that this name could not be linked, so it is a separate file."""
        if self.kept.extended is not None:
            self.kept.extended.lost["hard link"] = "they are files with the same content"

    @property
    def is_small(self) -> bool:
        """Whether the file is held in memory as a whole."""
        return self.size is not None and self.size <= SMALL_BYTES


class OtherWriter:
    """
    Waits for another process that writes the same file, as long as that process makes progress.

    Args:
        grid: provides the clock.
    """

    def __init__(self, grid: Grid, file: WantedFile) -> None:
        self._clock = grid.clock
        self._place = file.place
        self._seen: tuple[int, ...] = ()
        self._changed_s = self._clock.seconds()
        self._looks = 0

    async def wait(self, error: SinkError) -> None:
        """
        Wait a moment before the file is tried again; return at once if the other process has created the
        file.

        Raises:
            SinkError: the given error, if the other process made no progress for ``WAIT_S``, or if another
                process has created the file more than ``MAX_LOOKS`` times.
        """
        if isinstance(error, TargetExists):  # the path now has a file, complete or different
            self._looks += 1
            if self._looks > MAX_LOOKS:
                raise error
            return
        seen: tuple[int, ...] = ()
        with suppress(OSError):
            found = os.lstat(part_path(self._place))
            seen = (found.st_ino, found.st_size, found.st_mtime_ns)
        now_s = self._clock.seconds()
        if seen != self._seen:
            self._seen, self._changed_s = seen, now_s
        elif now_s - self._changed_s > WAIT_S:
            raise error
        await deferLater(self._clock, LOOK_S, lambda: None)


class FileFetcher:
    """
    Fetches files of a tree.

    Args:
        workers: threads for disk operations.
        force: whether existing files that differ are replaced.
    """

    def __init__(self, grid: Grid, workers: CpuWorkers, force: bool) -> None:
        self._grid = grid
        self._workers = workers
        self._small = WriteGroups(workers)
        self._force = force

    async def fetch(self, file: WantedFile, progress: Progress | None) -> FileOutcome:
        """
        Fetch or link a file, unless it exists.

        If another process writes the same file, wait as long as that process makes progress.

        Args:
            progress: for a large file, called with the number of fetched bytes and of all bytes.

        Raises:
            PipegridError, OSError: the file could not be obtained.
        """
        other = OtherWriter(self._grid, file)
        while True:
            try:
                return await self._fetch(file, progress)
            except (PartInUse, TargetExists) as error:  # noqa: PERF203
                await other.wait(error)
                home, place = file.parent.there, file.place
                standing = local_files.standing(home, place, file.size, file.kept)
                if standing != "missing":
                    file.parent.claim(place)
                if standing == "same":
                    not_kept = local_files.restore_mode_and_time(home, place, file.kept)
                    return FileOutcome("present", file.size or 0, not_kept)
                replaces = self._force and local_files.may_be_replaced(home, place)
                if standing == "other" and not replaces:
                    raise local_files.in_the_way(place) from error
                file = file._replace(standing=standing)

    async def _fetch(self, file: WantedFile, progress: Progress | None) -> FileOutcome:
        """
        Fetch a file; fails if another process is writing it.

        Raises:
            PipegridError, OSError: the file could not be obtained.
        """
        home, cap, size = file.parent.there, file.cap, file.size
        # Check the directory before bytes are fetched for nothing. For small files, which are many, this is
        # only done after a failure, since writing the first file detects that the directory was moved.
        home.check_again() if file.is_small else home.check()
        if file.link_to is not None and await self._link(file, file.link_to):
            return FileOutcome("link", size or 0)
        if file.standing in ("same", "perhaps"):
            if await self._is_same(file):
                not_kept = local_files.restore_mode_and_time(home, file.place, file.kept)
                return FileOutcome("present", size or 0, not_kept)
            if not self._force:
                raise local_files.in_the_way(file.place)
        replace = file.standing != "missing"
        if file.is_small:
            data = cap.data if isinstance(cap, LitCap) else await self._grid.read(cap)
            whole = WholeFile(home, file.place, data, replace, file.kept)
            not_kept = await self._small.write(whole)
            return FileOutcome("fetched", size or 0, not_kept, whole.identity)
        if not local_files.is_sparse(file.kept):
            local_files.space_for(os.path.dirname(file.place), size or 0)
        part = local_files.tree_part(home, file.place, replace, file.kept)
        try:
            result = await self._grid.get(cap, part, progress=progress)
            # ``Grid.get`` may have published and closed the part already.
            if not part.closed:
                await self._workers.run(part.publish)
        finally:
            part.leave()  # an unfinished part stays for a later run
        return FileOutcome("fetched", result.size, part.not_kept)

    async def _link(self, file: WantedFile, first: WantedFile) -> bool:
        """Make a file another name of a complete one, if possible; return whether that succeeded."""
        names = (first.parent.there, first.place), (file.parent.there, file.place)
        if file.standing in ("missing", "other"):
            replace = file.standing == "other"
            size, mtime_ns = file.size or 0, file.kept.mtime_ns
            if await self._workers.run(link_file, *names, size, mtime_ns, replace):
                return True
        if not is_one_file(*names):
            file.lose_link()
        return False

    async def _is_same(self, file: WantedFile) -> bool:
        home, cap = file.parent.there, file.cap
        if isinstance(cap, LitCap):
            return local_files.holds(home, file.place, cap.data)
        there = local_files.ExistingFile(home, file.place)
        try:
            await self._grid.get(cap, there)
        except local_files.Differs:
            return False
        finally:
            there.close()
        return True


# Fetching a whole tree: directories and files in one pipeline.
#
# The walk reads directories in advance, and files are fetched as the walk meets them. Small files, up to a
# segment, are fetched into memory, many at the same time, as far as a limit on their bytes allows. A few
# large files are fetched at the same time, each into a part file next to its name. Everything else waits in
# the walk, which has limits as well.
#
# **A second run** fetches what is missing or differs. A file with the size and time of its entry counts as
# unchanged. A file with only the same size, and every file with ``paranoid``, is compared: the local file is
# encrypted again, segment by segment, and checked against the hashes of its cap. This takes a round trip and
# fetches only the hashes.
#
# **Failures** are reported with their paths, and the run continues. A failure due to unreachable servers is
# retried (``RetryPolicy``), for a directory at the end. Directories get their modes and times when all their
# content has ended. Symbolic links are created just before that, when no more files are written in the
# directory.

FILE_BYTES = 32 << 10
"""Bytes added to the size of a small file, for the objects of its download: at most 512 files at once."""


class TreeGetOptions(NamedTuple):
    """
    How a tree is fetched.

    Attributes:
        metadata_json: the metadata of the root's entry.
        force: whether existing files and links are replaced.
        paranoid: whether even files whose size and time match their entries are compared.
        limits: limits of memory and counts.
        into: see ``begin_tree``.
        modes: which mode bits are set.
        extended: how owners, attributes, hard links and holes are restored; None: they are not.
        wants: called with a path and whether it is a directory; returns whether it is fetched. A directory
            that is not wanted is skipped with all its content. None: everything is wanted.
    """

    metadata_json: bytes = b"{}"
    force: bool = False
    paranoid: bool = False
    limits: GetTreeLimits = GetTreeLimits()
    into: DirectoryFd | None = None
    modes: Modes = "umask"
    extended: ExtendedRestore | None = None
    wants: Callable[[TreePath, bool], bool] | None = None


class TreeGetReports(NamedTuple):
    """
    Callbacks of fetching a tree.

    Attributes:
        progress: called with the bytes that are complete, and the bytes of all files met so far.
        problem: called with the path of an entry that was left out, and the error.
        done: called with each file or link that exists now: its path, ``fetched``, ``present`` or ``link``,
            and its size.
        waiting: see ``TreeReports``.
        not_kept: called with the path of an entry that did not get its mode or time, and the reason.
        not_restored: called with a path, the kind of extended metadata that could not be restored, and the
            reason.
    """

    progress: Progress | None = None
    problem: Callable[[TreePath, Exception], None] | None = None
    done: Callable[[TreePath, str, int], None] | None = None
    waiting: Callable[[str | None], None] | None = None
    not_kept: Callable[[TreePath, str], None] | None = None
    not_restored: Callable[[TreePath, str, str], None] | None = None


class TreeGet:
    """
    Fetches one tree, once.

    Args:
        grid: an open grid.
        workers: threads for disk operations.
        cap: the cap of the root, a directory.
        directory: the target; created if missing.
    """

    def __init__(
        self,
        grid: Grid,
        workers: CpuWorkers,
        cap: Cap,
        directory: str,
        options: TreeGetOptions | None = None,
        reports: TreeGetReports | None = None,
    ) -> None:
        self._options = options = options or TreeGetOptions()
        self._reports = reports = reports or TreeGetReports()
        self._grid = grid
        self._workers = workers
        self._cap = cap
        self._directory = directory
        self._limits = options.limits
        self._umask = current_umask()
        self._linked: LinkedFiles[WantedFile] = LinkedFiles()
        self._paths = 0
        self._small = Budget(self._limits.in_flight_bytes)
        self._large = Budget(self._limits.large_at_once)
        self._jobs = Budget(self._limits.jobs)
        self._running: set[Deferred[None]] = set()
        self._woken: Waiters[None] = Waiters()
        waiting = reports.waiting or (lambda why: None)
        self._fetcher = FileFetcher(grid, workers, options.force)
        self._later: RetryQueue[TreePath, tuple[WantedFile, Exception]] = RetryQueue(
            grid.clock, lambda: self._woken.fire(None), waiting
        )
        self._unread: list[Unread] = []
        self._read_later: RetryQueue[TreePath, Unread] = RetryQueue(
            grid.clock, lambda: self._woken.fire(None), waiting
        )
        self._read_again: TreePath | None = None  # path of the directory being retried at the end
        self._bug: BaseException | None = None
        self._stack: list[IncomingDirectory] = []
        self._folds = False
        self._known_bytes = 0
        self._here_bytes = 0
        self.result = TreeGetResult()

    async def run(self) -> TreeGetResult:
        """
        Fetch the tree.

        Raises:
            CapError: the cap is not that of a directory.
            SinkError: the target cannot be created.
            PipegridError: the root cannot be read.
        """
        try:
            if self._options.extended is not None:
                await self._workers.run(self._options.extended.resolve)
            with self._grid.reading_a_tree():
                await self._walk(self._cap, self._options.metadata_json, ())
                self._leave_down_to(0)
                await self._catch_up(at_end=True)
                if self._bug is None:
                    await self._read_unread()
            if self._bug is not None:
                raise self._bug
        except BaseException:
            await self._stop()
            raise
        finally:
            self._later.close()
        return self.result

    async def _walk(self, cap: Cap, metadata_json: bytes, base: TreePath) -> None:
        """Walk through a directory, whose path is ``base``, and handle everything below it."""
        walking = self._limits.walk
        walking = walking._replace(objects=max(walking.objects, self._limits.paths + 1))
        bounds: Any = {"limits": walking, "listing": self._limits.listing}
        with walk(self._grid, cap, all_paths=True, metadata_json=metadata_json, **bounds) as tree:
            async for met in tree:
                if base:
                    met = met._replace(path=(*base, *met.path))
                self._leave_down_to(len(met.path))
                await self._meet(met)
                if met.path == self._read_again and isinstance(met, Found):
                    self.result.second_tries += self._read_later.succeeded(met.path)
                await self._catch_up()
                if self._bug is not None:
                    break

    # Retries.

    async def _catch_up(self, at_end: bool = False) -> None:
        """
        Begin the retries that are due; return when new files may begin or, with ``at_end``, when nothing is
        left.
        """
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

    async def _read_unread(self) -> None:
        """Retry the directories that could not be read because servers were unreachable."""
        for each in self._unread:
            self._keeps_unread(each)
        try:
            while True:
                again = self._read_later.next(at_end=True)
                for _, lost in self._read_later.take_lost():
                    self._fail(lost.met.path, lost.met.error)
                    self._ended_in(lost.parent)
                if again is not None:
                    self._read_again, one = again
                    self._stack = [one.parent]
                    assert one.met.cap is not None
                    await self._walk(one.met.cap, one.met.metadata_json, one.met.path)
                    self._leave_down_to(0)
                    await self._catch_up(at_end=True)
                    if self._bug is not None:
                        return
                    self._read_later.ended(one.met.path)
                elif self._read_later.tries.waiting:
                    await self._woken.wait()
                else:
                    return
        finally:
            self._read_later.close()

    def _could_not_read(self, one: Unread) -> None:
        """Keep an unreadable directory for a retry, or report it."""
        if self._read_again is not None:
            keeps = one.met.path == self._read_again and self._keeps_unread(one)
        else:
            keeps = wants_servers(one.met.error) and len(self._unread) < MOST
            if keeps:
                self._unread.append(one)
        if keeps:
            one.parent.unfinished += 1
        else:
            self._fail(one.met.path, one.met.error)

    def _keeps_unread(self, one: Unread) -> bool:
        # It is unknown when the failed read began. With -inf, any success so far counts as later than its
        # beginning.
        return self._read_later.keeps(one.met.path, one, one.met.error, -math.inf)

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
        if parent is not None and (parent.home is None or not self._is_wanted(met)):
            if isinstance(met, Found) and met.kind == "directory":
                self._enter(None, parent, met, RestoredMetadata(), None)
            return
        if isinstance(met, Unreadable):
            if parent is None:
                raise met.error
            self._could_not_read(Unread(met, parent))
            return
        if parent is None and met.kind != "directory":
            text = "this is the cap of a file, and this fetches directories; fetch it with Grid.get"
            raise naming(CapError(text), "fetch it with Grid.get")
        kept = restored(
            met.metadata,
            self._options.modes,
            self._options.extended,
            is_file=met.kind != "directory",
            umask=self._umask,
        )
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
                self._enter(None, parent, met, RestoredMetadata(), None)

    def _is_wanted(self, met: Found | Unreadable) -> bool:
        is_directory = isinstance(met, Unreadable) or met.kind == "directory"
        return self._options.wants is None or self._options.wants(met.path, is_directory)

    def _place(self, met: Found, parent: IncomingDirectory, kept: RestoredMetadata) -> str:
        name = local_name(met.path[-1], kept.name)
        parent.taken.take(name)
        return os.path.join(parent.there.path, name)

    def _make(
        self, path: str, parent: IncomingDirectory | None, met: Found, kept: RestoredMetadata
    ) -> None:
        existed = parent is None and os.path.isdir(path)
        if parent is None:
            home, mode_before = local_files.begin_tree(
                path, self._options.into, kept, self._options.force
            )
            self._folds = local_files.folds_names(home)
        else:
            parent.claim(path)  # check this first: a file of this name may be replaced
            home, mode_before = local_files.make_directory(
                parent.there, path, kept, self._options.force
            )
            parent.claim(path)
        self.result.directories += 1
        self._enter(home, parent, met, kept, mode_before)
        self._stack[-1].existed = existed or mode_before is not None

    def _enter(
        self,
        home: DirectoryFd | None,
        parent: IncomingDirectory | None,
        met: Found,
        kept: RestoredMetadata,
        mode_before: int | None,
    ) -> None:
        if parent is not None:
            parent.unfinished += 1
        taken = NameCollisions(self._folds)
        self._stack.append(IncomingDirectory(home, parent, met.path, kept, taken, mode_before))

    def _leave_down_to(self, depth: int) -> None:
        """Record that the walk has left all directories whose paths have at least ``depth`` names."""
        while self._stack and len(self._stack[-1].names) >= depth:
            self._ended_in(self._stack.pop())

    def _ended_in(self, local: IncomingDirectory | None) -> None:
        """Record that an entry of a directory has ended; the last entry finishes the directory."""
        while local is not None:
            local.unfinished -= 1
            if local.unfinished:
                return
            if local.home is not None:
                for path, place, kept in local.links:
                    self._make_link(local, path, place, kept)
                with suppress(PipegridError):  # the directory vanished; its content reported that
                    not_kept = local_files.finish_directory(
                        local.there, local.kept, local.mode_before, local.existed
                    )
                    self._note(local.names, not_kept, local.kept)
            local = local.parent

    def _make_link(
        self, local: IncomingDirectory, path: TreePath, place: str, kept: RestoredMetadata
    ) -> None:
        try:
            local.claim(place)
            not_kept = local_files.make_link(local.there, place, kept, self._options.force)
        except PipegridError as error:
            self._fail(path, error)
        else:
            self.result.links += 1
            self._note(path, not_kept, kept)
            self._report_done(path, "link", 0)

    # Files.

    async def _meet_file(
        self, met: Found, path: str, parent: IncomingDirectory, kept: RestoredMetadata
    ) -> None:
        cap = met.cap
        size = immutable_size(cap)
        if cap is None or met.kind != "file":
            raise UsageError(
                "this is neither a file nor a directory that PipeGrid knows, and was left out; "
                "a later version may fetch it"
            )
        self._known_bytes += size or 0
        standing: local_files.Presence = "missing"
        if parent.existed:  # in a new directory, files of other processes are detected later
            standing = local_files.standing(parent.there, path, size, kept)
        if standing != "missing":
            parent.claim(path)
        if standing == "other" and not (
            self._options.force and local_files.may_be_replaced(parent.there, path)
        ):
            raise local_files.in_the_way(path)
        file = WantedFile(met.path, cap, size, parent, path, standing, kept)
        if standing == "same" and not self._options.paranoid:
            not_kept = local_files.restore_mode_and_time(parent.there, path, kept)
            self._is_linked(file)
            self._note(met.path, not_kept, kept)
            self._is_here(met.path, "present", size or 0)
            return
        parent.unfinished += 1
        await self._begin_or_link(file)

    # The methods below are for files with several names.

    async def _begin_or_link(self, file: WantedFile) -> None:
        """
        Begin to fetch a file. But if another name of the same file is being fetched, wait until the file is
        complete.
        """
        key = file.link_key
        first = file if key is None else self._linked.add(key, file)
        if key is not None and self._linked.left_out:
            file.lose_link()
        if first is not None:
            await self._begin(file if first is file else file._replace(link_to=first))

    def _is_linked(self, file: WantedFile) -> None:
        """
        Record a file that exists already; if it is not the same local file as its first name, count a lost
        link.
        """
        key = file.link_key
        if key is None:
            return
        first = self._linked.exists(key, file)
        is_one = first is not None and is_one_file(
            (first.parent.there, first.place), (file.parent.there, file.place)
        )
        if not is_one:
            file.lose_link()

    def _first_ended(self, file: WantedFile, succeeded: bool) -> None:
        """Begin the names that have waited for this name of the file."""
        key = file.link_key
        for each in [] if key is None else self._linked.ended(key, file, succeeded):
            one = each._replace(link_to=file) if succeeded else each
            beginning = start_cancellable(self._begin(one), self._grid.clock)
            self._running.add(beginning)
            beginning.addBoth(self._has_begun, beginning)

    def _has_begun(self, outcome: Any, beginning: Deferred[None]) -> None:
        if isinstance(outcome, Failure) and not outcome.check(CancelledError):
            self._bug = self._bug or outcome.value
        self._running.discard(beginning)
        self._woken.fire(None)

    async def _begin(self, file: WantedFile) -> None:
        """Begin to fetch a file; return when the limits have allowed it to begin."""
        budget = self._small if file.is_small else self._large
        units = FILE_BYTES + (file.size or 0) if file.is_small else 1
        lent = budget.lend(units)
        if lent is None:
            lent = await budget.borrow(units)
        if self._jobs.lend(1) is None:
            await self._jobs.borrow(1)
        began_s = self._grid.clock.seconds()
        running = start_cancellable(self._fetch(file), self._grid.clock)
        self._running.add(running)

        def ended(outcome: Failure | None) -> None:
            try:
                self._fetched(file, began_s, outcome)
            except BaseException as error:  # raised by a callback; this is the only report
                self._bug = self._bug or error
            self._running.discard(running)
            budget.give_back(lent)
            self._jobs.give_back(1)
            self._woken.fire(None)

        running.addBoth(ended)

    async def _fetch(self, file: WantedFile) -> None:
        got = await self._fetcher.fetch(file, self._counting())
        file.parent.claim(file.place, got.identity)
        self._note(file.path, got.not_kept, file.kept)
        self.result.fetched_bytes += got.size if got.how == "fetched" else 0
        if isinstance(file.cap, LitCap):
            self._later.ended(file.path)  # no server was asked
        else:
            self.result.second_tries += self._later.succeeded(file.path)
        self._is_here(file.path, got.how, got.size)

    def _fetched(self, file: WantedFile, began_s: float, outcome: Failure | None) -> None:
        """
        Handle the outcome of a file; raises a cancellation or an unexpected error, which ends the whole run.
        """
        if outcome is None:
            self._first_ended(file, True)
            self._ended_in(file.parent)
            return
        error = outcome.value
        assert error is not None
        if isinstance(error, OSError):
            error = failed("write", file.place, error)
        if not isinstance(error, PipegridError):
            raise error
        try:
            file.parent.claim(file.place)
        except PipegridError as other:  # a name collision is the real reason
            error = other
        is_last_try = self._read_again is not None
        if is_last_try or not self._later.keeps(file.path, (file, error), error, began_s):
            self._give_up(file, error)

    def _give_up(self, file: WantedFile, error: Exception) -> None:
        self._later.ended(file.path)
        self._fail(file.path, error)
        self._first_ended(file, False)
        self._ended_in(file.parent)

    def _counting(self) -> Progress | None:
        report = self._reports.progress
        if report is None:
            return None
        return lambda done, total: report(self._here_bytes + done, self._known_bytes)

    # Reports.

    def _is_here(self, path: TreePath, how: str, size: int) -> None:
        if how == "present":
            self.result.present += 1
        else:
            self.result.files += 1
        self.result.size += size
        self._here_bytes += size
        if self._reports.progress is not None:
            self._reports.progress(self._here_bytes, max(self._known_bytes, self._here_bytes))
        self._report_done(path, how, size)

    def _report_done(self, path: TreePath, how: str, size: int) -> None:
        if self._reports.done is not None:
            self._reports.done(path, how, size)

    def _note(self, path: TreePath, not_kept: str, kept: RestoredMetadata) -> None:
        """Count and report mode, time or extended metadata that an entry did not get."""
        for kind, why in () if kept.extended is None else kept.extended.lost.items():
            self.result.not_restored.add(printable("/".join(path)) or ".", kind, why)
            if self._reports.not_restored is not None:
                self._reports.not_restored(path, kind, why)
        if not_kept:
            self.result.not_kept += 1
            if self._reports.not_kept is not None:
                self._reports.not_kept(path, not_kept)

    def _fail(self, path: TreePath, error: Exception) -> None:
        if self._bug is None and local_files.stops_all(error):
            self._bug = SinkError(
                f"{error}; nothing more is fetched: free space on the disk or make it writable, and "
                "run the same command again"
            )
            self._bug.__cause__ = error
            return
        self.result.failed += 1
        if self._reports.problem is not None:
            self._reports.problem(path, error)


def _is_part(met: Found, kept: RestoredMetadata) -> bool:
    """
    Return whether an entry is the part file of an unfinished download, which was stored with its directory.
    """
    return is_part_name(met.path[-1] if kept.name is None else os.fsdecode(kept.name))
