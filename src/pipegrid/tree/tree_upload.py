"""The upload of a local directory, with its counts and reports."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import attrs
from twisted.internet.defer import CancelledError, Deferred, DeferredList
from twisted.python.failure import Failure

from pipegrid.core.caps import ChkCap, DirectoryCap, LitCap, is_literal_size
from pipegrid.core.packed_directory import PackedChild, directory_cap, pack_immutable
from pipegrid.core.text import printable
from pipegrid.errors import GridError, PipegridError, SourceError
from pipegrid.grid.file_grid import Grid
from pipegrid.reactor.deferreds import Waiters
from pipegrid.transfer.put.put_many import MAX_BYTES
from pipegrid.tree import local_walk
from pipegrid.tree.extended_metadata import HARD_LINK, LEFT_OUT, OwnerNames
from pipegrid.tree.file_metadata import entry_metadata, entry_name
from pipegrid.tree.file_selection import TreeSelection
from pipegrid.tree.local_walk import (
    DirectoryBegun,
    DirectoryEnded,
    EntryWalk,
    FileMet,
    LocalWalk,
    Skipped,
    Thing,
    WalkOptions,
    own_directories,
)
from pipegrid.tree.retry_queue import RetryQueue
from pipegrid.tree.tree_plan import MAX_ENTRIES, DirectoryNode, TreeNode, TreePlan
from pipegrid.tree.upload_queue import UploadQueue
from pipegrid.tree.upload_store import (
    Content,
    GridFiles,
    KnownObject,
    KnownObjects,
    TreeStore,
    unreadable_root,
)

# The counts, reports and results of the upload of a tree.

SubtreeCounts = tuple[int, int, int, int]
"""Numbers of files, directories and links, and bytes of files."""


@attrs.define
class TreeCounts:
    """
    Progress of the upload of a tree.

    Attributes:
        files, directories, links: number met so far, without those that were left out.
        bytes: bytes of those files.
        sent_files, sent_directories, sent_bytes: newly stored by this run; literal objects are not counted.
        already_stored: how many of the sent objects already had their shares on servers.
        unchanged_bytes: bytes of files that an earlier run has stored, and that were not sent again.
        checked: known objects that were checked on the grid, and were healthy or stored again.
        unleased: how many of the checked objects are healthy, but got leases from too few servers.
        second_tries: objects whose retry succeeded when servers were reachable again.
        left_out: files, directories and other entries that the tree lacks, at least in part.
        excluded: entries that the selection leaves out; an excluded directory counts as one.
        skipped: named pipes, sockets and devices, which are never stored.
        part_files: part files of unfinished downloads, which are also skipped.
    """

    files: int = 0
    directories: int = 0
    links: int = 0
    bytes: int = 0
    sent_files: int = 0
    sent_directories: int = 0
    sent_bytes: int = 0
    already_stored: int = 0
    unchanged_bytes: int = 0
    checked: int = 0
    unleased: int = 0
    second_tries: int = 0
    left_out: int = 0
    excluded: int = 0
    skipped: int = 0
    part_files: int = 0


class TreeTally:
    """
    Counts the entries that are met, and subtracts those that are left out later.

    A directory that cannot be stored is lost with all its content. So each node has the counts of its
    content, which are added to the directory above when the walk leaves the node.
    """

    def __init__(self, counts: TreeCounts) -> None:
        self._counts = counts

    def met(
        self, place: TreeNode, files: int = 0, directories: int = 0, links: int = 0, size: int = 0
    ) -> None:
        """Count one entry; ``size`` is in bytes."""
        place.held = amounts = (files, directories, links, size)
        self._count(amounts, 1)
        if not isinstance(place, DirectoryNode) and place.parent is not None:
            _hold(place.parent, amounts, 1)

    def grown(self, place: TreeNode, more: int) -> None:
        """Count more bytes for a file that turned out to be longer than its file system reported."""
        amounts = (0, 0, 0, more)
        _hold(place, amounts, 1)
        self._count_above(place, amounts, 1)

    def left(self, directory: DirectoryNode) -> None:
        """Record that everything in a directory was met; call this before ``TreePlan.leave``."""
        if directory.parent is not None:
            _hold(directory.parent, directory.held, 1)

    def lost(self, place: TreeNode) -> None:
        """
        Subtract a lost node, unless a directory above it is lost already; call this before
        ``TreePlan.failed``.
        """
        if place.parent is None or not place.parent.is_lost:
            self._count_above(place, place.held, -1)

    def _count_above(self, at: TreeNode, amounts: SubtreeCounts, sign: int) -> None:
        """
        Add the amounts to the total, and to each directory above whose counts already include this node.
        """
        self._count(amounts, sign)
        while at.parent is not None and (not isinstance(at, DirectoryNode) or at.left):
            at = at.parent
            _hold(at, amounts, sign)

    def _count(self, amounts: SubtreeCounts, sign: int) -> None:
        files, directories, links, size = amounts
        counts = self._counts
        counts.files += sign * files
        counts.directories += sign * directories
        counts.links += sign * links
        counts.bytes += sign * size


def _hold(place: TreeNode, amounts: SubtreeCounts, sign: int) -> None:
    files, directories, links, size = place.held
    place.held = (
        files + sign * amounts[0],
        directories + sign * amounts[1],
        links + sign * amounts[2],
        size + sign * amounts[3],
    )


@attrs.frozen
class TreeResult:
    """
    The result of storing a tree.

    Attributes:
        cap: the cap of the root; everything below it is stored.
        metadata: the metadata of the root, for which no entry exists.
        counts: what the tree contains, what was sent, and how much was left out.
        elapsed_s: duration from the start until everything was stored.
        owners: the owners of everything that the walk has met.
    """

    cap: DirectoryCap
    metadata: dict[str, Any]
    counts: TreeCounts
    elapsed_s: float
    owners: OwnerNames = attrs.field(factory=OwnerNames, eq=False, repr=False)


class TreeReports(NamedTuple):
    """
    Callbacks of storing a tree.

    Attributes:
        left_out: called with a path (from the root; the root is ``.``) and a sentence.
        progress: called when an object is stored, and when the walk has met more.
        sending: called with the change of the number of acknowledged bytes of unfinished files; negative when
            a file is stored or has failed.
        waiting: called with a sentence when too few servers are reachable and no new object begins, and with
            None when the run continues.
        skipped: called with a path and a phrase: a named pipe, a socket, a device, or the part file of an
            unfinished download.
        not_stored: called with a path, a kind of extended metadata that could not be stored, and the reason.
    """

    left_out: Callable[[str, str], None] = lambda path, why: None
    progress: Callable[[TreeCounts], None] = lambda counts: None
    sending: Callable[[TreeCounts, int], None] = lambda counts, more: None
    waiting: Callable[[str | None], None] = lambda why: None
    skipped: Callable[[str, str], None] = lambda path, what: None
    not_stored: Callable[[str, str, str], None] = lambda path, kind, why: None


class FileProgress:
    """Reports the progress of one large file until it is stored and counted."""

    def __init__(self, reports: TreeReports, counts: TreeCounts, size: int) -> None:
        self._reports = reports
        self._counts = counts
        self._size = size
        self._reported_bytes = 0

    def is_at(self, done: int, total: int) -> None:
        """Report that this part of the file's shares is acknowledged."""
        self._report_bytes(self._size * done // max(1, total))

    def end(self) -> None:
        """End the report, whether the file is stored or has failed."""
        self._report_bytes(0)

    def _report_bytes(self, now: int) -> None:
        if now != self._reported_bytes:
            more, self._reported_bytes = now - self._reported_bytes, now
            self._reports.sending(self._counts, more)


def path_of(directory: DirectoryNode) -> str:
    """Return the path of a directory from the root; empty for the root."""
    *names, _root = (each.name for each in directory.upwards())
    return "/".join(reversed(names))


# This part has what is needed to retry objects that could not be stored.


class FailedObject(NamedTuple):
    """
    An object that could not be stored.

    Attributes:
        path: the path from the root.
        error: the error of the last attempt.
        met: for a file or link, what the walk met, without the content, which is read again.
    """

    path: str
    error: PipegridError
    met: FileMet | None = None


def reopened(walk: EntryWalk, path: str, why: str) -> io.FileIO:
    """
    Open again a file that the walk has met.

    Args:
        why: why the file is needed, for the error.

    Raises:
        SourceError: the file no longer exists, or cannot be read.
    """
    try:
        return walk.open(path)
    except OSError as error:
        reason = "it vanished" if error.errno == 2 else f"it cannot be read: {error.strerror}"
        raise SourceError(f"{reason}, {why}") from error


# The upload of a local directory is one pipeline:
#
#     local walk (thread) ─ files, in batches → puts, in parallel ─ caps known → plan ─ directories → puts
#
# A file is read when the limits allow storing it. A directory is stored as soon as the caps of its children
# are known, which is after their encoding. So a tree of any depth takes one round trip and the time for its
# bytes. The result counts what is *stored*; ``TreePlan`` knows when everything is. What cannot be read or
# stored is reported and left out, and the run continues.
#
# ``UploadQueue`` limits how much runs at the same time. ``RetryPolicy`` retries objects that failed because
# servers were unreachable.

GIVE_UP = 10
"""
The run ends with an error after this many failures in succession, if it has stored no object yet, or if its
last wait for servers was without success: then the grid is at fault, not the files.
"""

_LARGE_DIRECTORY = 1000
"""Directories with at least this many entries are packed in a thread; packing 50 entries takes about 1 ms."""


class TreeUpload:
    """
    The upload of one tree.

    Args:
        grid: provides workers, clock and limits.
        walk: a walk through the directory; closed at the end.
        store: stores the files; closed at the end.
        root: the name of the directory in messages.
        memory: the objects that earlier runs have stored.
    """

    def __init__(
        self,
        grid: Grid,
        walk: EntryWalk,
        store: TreeStore,
        root: str,
        reports: TreeReports | None = None,
        memory: KnownObjects | None = None,
    ) -> None:
        self._workers = grid.workers
        self._clock = clock = grid.clock
        self._walk = walk
        self._store = store
        self._root = root
        self._reports = reports or TreeReports()
        self._memory = memory or KnownObjects()
        self._plan = TreePlan()
        self.counts = TreeCounts()
        self._tally = TreeTally(self.counts)
        self._directories: dict[int, DirectoryNode] = {}
        self._root_metadata: dict[str, Any] = {}
        self._batch: Deferred[Any] | None = None
        self._walked = False
        self._in_flight: UploadQueue[TreeNode] = UploadQueue(
            self._ended, grid.limits, clock.seconds, lambda: store.small_file_capacity, store.expect
        )
        self._later: RetryQueue[TreeNode, FailedObject] = RetryQueue(
            clock, self._wake, self._reports.waiting
        )
        self._owners = OwnerNames()
        self._stored = self._failures = 0
        self._error: BaseException | None = None
        self._woken: Waiters[None] = Waiters()

    async def run(self) -> TreeResult:
        """
        Store the tree.

        Raises:
            SourceError: the root cannot be read.
            GridError: the grid accepts no objects.
        """
        began_s = self._clock.seconds()
        try:
            while not (self._plan.done and not self._in_flight.running):
                if self._error is not None:
                    raise self._error
                if not self._go_on():
                    await self._woken.wait()
            if self._error is not None:
                raise self._error
        except BaseException:
            await self._stop()
            raise
        finally:
            self._later.close()
            self._walk.close()
        self._store.close()
        if not isinstance(self._plan.root_cap, DirectoryCap):
            raise GridError(
                f"cannot store the directory {printable(self._root)} itself, though perhaps everything in "
                "it; earlier messages say why"
            )
        elapsed_s = self._clock.seconds() - began_s
        return TreeResult(
            self._plan.root_cap, self._root_metadata, self.counts, elapsed_s, self._owners
        )

    async def _stop(self) -> None:
        ending = self._in_flight.forget_waiting()
        ending.append(self._store.close())
        if self._batch is not None:
            ending.append(self._batch)
        for each in ending:
            each.cancel()
        await DeferredList(ending, consumeErrors=True)

    def _go_on(self) -> bool:
        """
        Begin one retry, directory or batch of the walk that can begin now; return whether there was one.
        """
        waiting = self._later.tries.waiting
        has_space = self._in_flight.has_space
        if self._later.has_any and (waiting or has_space) and self._begin_again(False):
            return True
        self._in_flight.hold(self._later.tries.waiting)
        if self._in_flight.held or not has_space:
            return False
        ready = self._plan.take_ready()
        if ready is not None:
            directory = ready[0]
            self._in_flight.begin(directory.bytes, self._store_directory(*ready), directory)
            return True
        if self._batch is None and not self._walked:
            self._batch = self._workers.run(self._walk.batch)
            self._batch.addCallbacks(self._take, self._walk_failed)
            return True
        return self._walked and self._in_flight.is_idle and self._begin_again(True)

    def _begin_again(self, at_end: bool) -> bool:
        """
        Begin a retry, or report objects that are given up; return whether there was a retry or such an
        object.
        """
        again = self._later.next(at_end)
        lost = self._later.take_lost()
        for each, why in lost:
            self._lose(each, why.path, why.error)
            self._failures = 0  # count failures from zero
        if again is None:
            return bool(lost)
        place, kept = again
        if place.is_lost:
            self._later.ended(place)
            return True
        if isinstance(place, DirectoryNode):
            size, work = place.bytes, self._store_directory(place, self._plan.again(place))
        else:
            met = kept.met
            assert met is not None
            size = met.found.st_size if met.link is None else len(met.link)
            work = self._store_once_more(place, met)
        self._in_flight.begin(size, work, place, at_once=True)
        return True

    # The methods below handle what the walk yields.

    def _take(self, batch: Sequence[Thing]) -> None:
        self._batch = None
        self._walked = not batch
        self.counts.excluded = self._walk.excluded
        if self._walked:
            self._in_flight.all_met()
        try:
            for thing in batch:
                if isinstance(thing, FileMet):
                    self._meet(thing)
                elif isinstance(thing, DirectoryBegun):
                    self._enter(thing)
                elif isinstance(thing, DirectoryEnded):
                    directory = self._directories.pop(thing.number, None)
                    if directory is not None:
                        self._tally.left(directory)
                        self._plan.leave(directory)
                elif isinstance(thing, Skipped):
                    self._skip(thing)
                else:
                    self._leave_out(thing.path, thing.why)
            self._reports.progress(self.counts)  # for unchanged files, this is the only report
        except Exception as error:  # this is the only place that reports it
            self._error = error
        self._wake()

    def _walk_failed(self, failure: Failure) -> None:
        self._batch = None
        error = failure.value
        if isinstance(error, OSError):
            error = unreadable_root(self._root, error)
        self._error = error
        self._wake()

    def _enter(self, thing: DirectoryBegun) -> None:
        if thing.parent < 0:
            self._note_extended(thing)
            self._root_metadata = entry_metadata(thing.found, extended=thing.extended)
            directory = self._plan.enter(None, "", {})
        else:
            entry = self._entry(thing)
            if entry is None:
                return
            directory = self._plan.enter(*entry)
        self._directories[thing.number] = directory
        self._tally.met(directory, directories=1)

    def _entry(
        self, thing: FileMet | DirectoryBegun
    ) -> tuple[DirectoryNode, str, dict[str, Any]] | None:
        """Return the parent, name and metadata of a new entry in the tree; None: the entry is left out."""
        parent = self._directories.get(thing.parent)
        if parent is None:
            return None  # its directory was left out and reported
        if not self._plan.has_space(parent):
            self._leave_out(thing.path, "its directory is larger than a directory may be; split it")
            return None
        self._note_extended(thing)
        name, exact = entry_name(thing.name)
        unique = self._plan.free_name(parent, name)
        if unique != name:  # an entry with the same normalized name exists
            exact = thing.name
        link, extended = None, thing.extended
        if isinstance(thing, FileMet):
            link = thing.link
            if thing.hard_link is not None:
                extended = {**(extended or {}), HARD_LINK: thing.hard_link}
        return parent, unique, entry_metadata(thing.found, link=link, name=exact, extended=extended)

    def _note_extended(self, thing: FileMet | DirectoryBegun) -> None:
        """Record the owner of an entry, and report attributes that cannot be stored."""
        self._owners.add(thing.found, thing.extended)
        if thing.extended and LEFT_OUT in thing.extended:
            why = "they are too large, or cannot be read"
            self._reports.not_stored(thing.path or ".", "extended attribute", why)

    def _meet(self, met: FileMet) -> None:
        entry = self._entry(met)
        if entry is None:
            if isinstance(met.content, io.FileIO):
                met.content.close()
            return
        place = self._plan.expect(*entry)
        size = len(met.content) if isinstance(met.content, bytes) else met.found.st_size
        if met.link is None:
            self._tally.met(place, files=1, size=size)
        else:
            self._tally.met(place, links=1)
        known: KnownObject | None = met.known
        if known is not None:
            self._plan.known(place, known.cap)
            if met.extended is not known.extended:
                self._memory.extended_read(met)
            if known.due:
                self._in_flight.begin(0, self._check_file(place, met, known), place, stores=False)
            else:
                self.counts.unchanged_bytes += met.found.st_size
                self._plan.stored(place, known.cap)
        elif isinstance(met.content, bytes) and is_literal_size(len(met.content)):
            cap = LitCap(met.content)
            if met.link is None:
                self._remember(met, cap)
            self._plan.stored(place, cap)
        else:
            self._in_flight.begin(size, self._store_file(place, met, met.content, size), place)

    # Storing.

    async def _store_file(self, place: TreeNode, met: FileMet, source: Content, size: int) -> None:
        began_s = self._clock.seconds()
        try:
            cap = await self._put(place, source, size, partial(self._plan.known, place))
            if isinstance(source, io.FileIO) and not met.is_same(os.fstat(source.fileno())):
                raise SourceError(local_walk.CHANGED)
        except PipegridError as error:
            self._failed(place, FailedObject(met.path, error, met._replace(content=None)), began_s)
            return
        finally:
            if isinstance(source, io.FileIO):
                source.close()
        self.counts.sent_files += met.link is None and not isinstance(cap, LitCap)
        if met.link is None:
            self._remember(met, cap)
            if cap.size != size:
                self._tally.grown(place, cap.size - size)
        self._came_through(place)
        self._plan.stored(place, cap)

    def _remember(self, met: FileMet, cap: ChkCap | LitCap) -> None:
        """
        Record a stored file, unless its size differs from the reported one, since then later changes could
        not be detected.
        """
        if cap.size == met.found.st_size:
            self._memory.file_stored(met, cap)

    async def _check_file(self, place: TreeNode, met: FileMet, known: KnownObject) -> None:
        self.counts.checked += 1
        if await self._is_whole(known):
            self.counts.unchanged_bytes += met.found.st_size
            self._came_through(place, stored=False)
            self._plan.stored(place, known.cap)
            return
        await self._store_once_more(place, met, "and its shares are missing")

    async def _store_once_more(
        self, place: TreeNode, met: FileMet, why: str = "and too few servers were reachable before"
    ) -> None:
        """
        Store a file or link that the walk has met before. If the file no longer exists, the error says
        ``why`` it was needed again.
        """
        if met.link is not None:
            await self._store_file(place, met, met.link, len(met.link))
            return
        try:
            file = await self._workers.run(reopened, self._walk, met.path, why)
        except SourceError as error:
            self._lose(place, met.path, error)
            return
        await self._store_file(place, met, file, met.found.st_size)

    async def _store_directory(self, directory: DirectoryNode, children: list[PackedChild]) -> None:
        path = path_of(directory)
        began_s = self._clock.seconds()
        try:
            if len(children) < _LARGE_DIRECTORY:
                packed = pack_immutable(children)
            else:
                packed = await self._workers.run(pack_immutable, children)
            del children
            if is_literal_size(len(packed)):
                self._plan.stored(directory, directory_cap(LitCap(packed)))
                return

            known = self._memory.directory(packed)
            if known is not None:
                self._plan.bytes_known(directory, known.cap)
                self.counts.checked += known.due
                if not known.due or await self._is_whole(known):
                    if known.due:  # an object that is not due was not checked on servers
                        self._came_through(directory, stored=False)
                    self._later.ended(directory)
                    self._plan.stored(directory, directory_cap(known.cap))
                    return
            tell = partial(self._plan.bytes_known, directory)
            cap = await self._put(directory, packed, len(packed), tell)
        except PipegridError as error:
            self._failed(directory, FailedObject(path, error), began_s)
            return
        self.counts.sent_directories += 1
        assert isinstance(cap, ChkCap)
        self._memory.directory_stored(packed, cap)
        self._came_through(directory)
        self._plan.stored(directory, directory_cap(cap))

    async def _put(
        self, place: TreeNode, source: Content, size: int, cap_known: Callable[[ChkCap], None]
    ) -> ChkCap | LitCap:
        """Store an object and count it; return its cap. Raises the same errors as ``GridFiles.put``."""
        sending = FileProgress(self._reports, self.counts, size)

        def progress(done: int, total: int) -> None:
            sending.is_at(done, total)
            if self._in_flight.weigh(place, size * (total - done) // max(1, total)):
                self._wake()

        def known(cap: ChkCap) -> None:
            self._memory.sending(cap)
            cap_known(cap)
            self._wake()

        report = progress if size > MAX_BYTES // 8 else None
        try:
            cap, was_there = await self._store.put(source, size, known, report)
        finally:
            sending.end()
        self.counts.sent_bytes += 0 if isinstance(cap, LitCap) else size
        self.counts.already_stored += was_there
        return cap

    async def _is_whole(self, known: KnownObject) -> bool:
        """
        Check a known object on the grid; return False if the object must be stored again, or the check
        failed.
        """
        try:
            health = await self._store.check(known.cap)
        except PipegridError:
            return False
        if health.whole and health.leased:
            self._memory.checked(known.cap)
        self.counts.unleased += health.whole and not health.leased
        return health.whole

    def _came_through(self, place: TreeNode, stored: bool = True) -> None:
        """
        Record the success of an object: servers have accepted it or, without ``stored``, had it already.
        """
        self._stored += stored
        self._failures = 0
        self.counts.second_tries += self._later.succeeded(place)

    def _failed(self, place: TreeNode, kept: FailedObject, began_s: float) -> None:
        """Record a failed attempt to store an object; keep the object for a retry, or leave it out."""
        is_probe = self._later.tries.is_probe(place)
        has_space = self._plan.held_entries <= MAX_ENTRIES
        if has_space and self._later.keeps(place, kept, kept.error, began_s):
            if not is_probe:
                self._count_failure(kept.error)
            self._in_flight.hold(self._later.tries.waiting)
        else:
            self._lose(place, kept.path, kept.error)

    def _lose(self, place: TreeNode, path: str, error: PipegridError) -> None:
        """Leave out and report an object that could not be stored."""
        self._later.ended(place)
        self._leave_out(path, str(error))
        self._count_failure(error)
        self._tally.lost(place)
        self._plan.failed(place)

    def _count_failure(self, error: PipegridError) -> None:
        self._failures += isinstance(error, GridError)
        if self._failures >= GIVE_UP and (not self._stored or self._later.tries.given_up):
            self._error = error

    def _skip(self, thing: Skipped) -> None:
        self.counts.part_files += thing.is_part
        self.counts.skipped += not thing.is_part
        self._reports.skipped(thing.path, thing.what)

    def _leave_out(self, path: str, why: str) -> None:
        self.counts.left_out += 1
        self._reports.left_out(path or ".", why)

    def _ended(self, outcome: Any) -> None:
        if isinstance(outcome, Failure) and not outcome.check(CancelledError):
            self._error = outcome.value
        try:
            self._reports.progress(self.counts)
        except Exception as error:  # this is the only place that reports it
            self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        self._woken.fire(None)


# Construction of the upload of a directory.

NOTES_NAME = "unfinished-trees"
"""The name of the directory of upload journals in a client's state; see ``upload_journal``."""


def tree_upload(
    grid: Grid,
    path: str | os.PathLike[str],
    selection: TreeSelection | None = None,
    one_file_system: bool = False,
    reports: TreeReports | None = None,
    options: Mapping[str, Any] | None = None,
    memory: KnownObjects | None = None,
) -> TreeUpload:
    """Return the upload of a directory with all its content; ``options`` are those of ``Grid.put``."""
    root = os.fspath(path)
    local = grid.config.local
    walk = LocalWalk(
        root,
        selection=selection or TreeSelection(),
        options=WalkOptions(
            one_file_system,
            own_directories(
                *([] if local is None else [local.directory]),
                *(cache / NOTES_NAME for cache in grid.config.caches[:1]),
            ),
        ),
        know=(memory or KnownObjects()).file,
    )
    store = GridFiles(grid, **(options or {}))
    return TreeUpload(grid, walk, store, root, reports, memory)
