"""Writing the small files of a fetched tree to the local disk, in groups."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.python.failure import Failure

from pipegrid.disk.atomic_write import sync_directory, unnamed_sync
from pipegrid.disk.file_system_calls import begin_writing
from pipegrid.errors import PipegridError
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.tree.file_metadata import RestoredMetadata
from pipegrid.tree.local_directory_descriptor import DirectoryFd, failed
from pipegrid.tree.local_files import TreePart, UnnamedFile, is_sparse, tree_part
from pipegrid.tree.metadata_restore import gives_lists

# Writing a small file mostly means waiting for the disk. Syncing a group of files takes the disk little
# longer than syncing one file, and one call syncs all new names in a directory. While some groups are
# written, the next one gathers files. So on an idle disk no file waits for others, and on a busy disk the
# groups grow.

GROUP_FILES = 16
"""The maximum number of files of a group; each is an open file until it has its name."""

GROUP_BYTES = 2 << 20
"""A group ends when it reaches this size. A group that has begun is completed, even after a cancellation."""

GROUPS_AT_ONCE = 2

_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
_NO_UNNAMED = frozenset(
    {
        errno.EACCES,
        errno.EINVAL,
        errno.EISDIR,
        errno.ENOENT,
        errno.ENOSYS,
        errno.EOPNOTSUPP,
        errno.EPERM,
        errno.EXDEV,
    }
)
"""If creating or naming an unnamed file fails with one of these errors, a part file is used instead."""


class WholeFile:
    """
    A small file to be written, with all its bytes.

    Attributes:
        home: the directory of the file.
        path: the path of the file.
        replace: whether an existing file or link is replaced.
        kept: the metadata of the file's entry.
        identity: the device and inode of the file when it has its name; None if unknown.
    """

    __slots__ = ("data", "home", "identity", "kept", "path", "replace")

    def __init__(
        self,
        home: DirectoryFd,
        path: str,
        data: bytes,
        replace: bool,
        kept: RestoredMetadata,
    ) -> None:
        self.home = home
        self.path = path
        self.data = data
        self.replace = replace
        self.kept = kept
        self.identity: tuple[int, int] | None = None


WriteOutcome = str | Exception
"""The outcome of writing one file: a clause about metadata that could not be set, or empty; or the error."""


def write_group(files: Sequence[WholeFile]) -> list[WriteOutcome]:
    """
    Write files without names or under hidden ones, sync them, and give them their names. This blocks on the
    disk, and may be called in any thread.

    Returns:
        the outcome of each file; if a file fails, the others are still written.
    """
    group = _Group()
    try:
        for file in files:
            group.begin(file, len(files) > 1)
        group.publish()
    finally:
        group.close()
    outcomes = [group.outcomes[file] for file in files]
    if len(files) > 1:
        # If a file failed for lack of descriptors, it is written again alone.
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, Exception) and _errno(outcome) in _NO_DESCRIPTORS:
                outcomes[number] = write_group(files[number : number + 1])[0]
    return outcomes


class _Place:
    """
    The directory of some files of a group, and what applies to all of them.

    Attributes:
        inside: a descriptor of the directory.
        unnamed: how unnamed files become durable in the directory; ``never``: unnamed files are not used.
        inherits: whether files in the directory may inherit an access control list.
        is_checked: whether it was checked that the path still leads to the directory; this is done before the
            first unnamed file gets its name.

    Raises:
        SinkError: the directory was moved, removed or replaced.
    """

    __slots__ = ("inherits", "inside", "is_checked", "unnamed")

    def __init__(self, home: DirectoryFd) -> None:
        self.inside = home.open()
        self.unnamed = unnamed_sync(self.inside) if home.is_new else "never"
        self.inherits = self.unnamed == "never" or gives_lists(self.inside)
        self.is_checked = False


class _Group:
    """
    Files that are written and synced together.

    In a directory that this run has created, a file has no name until it is complete. In other directories a
    part file is used, since an earlier run may have left one, or another process may be writing the same
    file.

    Attributes:
        outcomes: the outcomes of files that are finished.
    """

    def __init__(self) -> None:
        self.outcomes: dict[WholeFile, WriteOutcome] = {}
        self._parts: dict[WholeFile, TreePart | UnnamedFile] = {}
        self._places: dict[DirectoryFd, _Place] = {}

    def begin(self, file: WholeFile, has_others: bool) -> None:
        """Write a file; if the group has others, make the disk start writing it."""
        with self._noting([file]):
            place = self._places.get(file.home)
            if place is None:
                place = self._places[file.home] = _Place(file.home)
            part = self._unnamed(file, place) or self._part(file, place)
            if has_others:
                begin_writing(part.fileno())

    def _unnamed(self, file: WholeFile, place: _Place) -> UnnamedFile | None:
        """Write a file without a name; return None if that is not possible."""
        if place.unnamed == "never" or not file.home.is_new:
            return None
        if file.replace or is_sparse(file.kept):
            return None
        try:
            part = UnnamedFile(file.path, place.inside, file.data, file.kept, place.inherits)
        except OSError as error:
            if error.errno not in _NO_UNNAMED:
                raise
            return None  # from now on, the directory gets part files
        self._parts[file] = part
        return part

    def _part(self, file: WholeFile, place: _Place) -> TreePart:
        file.home.is_new = False  # from now on, the directory may contain part files
        part = tree_part(file.home, file.path, file.replace, file.kept, place.inside)
        self._parts[file] = part
        part.begin(len(file.data))
        part.write_pieces([file.data])
        return part

    def publish(self) -> None:
        """Sync all files and give them their names, durably."""
        for file, part in self._parts.items():
            if isinstance(part, UnnamedFile):
                # All files are synced before the first one gets its name, so that the first sync can already
                # write the data of the others.
                with self._noting([file]):
                    part.sync()
        named: dict[DirectoryFd, list[WholeFile]] = {}
        for file in list(self._parts):
            if file not in self.outcomes:
                with self._noting([file]):
                    part = self._give_name(file)
                    file.identity = part.identity
                    self.outcomes[file] = part.not_kept
                    named.setdefault(file.home, []).append(file)
        for home, files in named.items():
            with self._noting(files):
                self._sync_names(home, files)

    def _give_name(self, file: WholeFile) -> TreePart | UnnamedFile:
        part, place = self._parts[file], self._places[file.home]
        if isinstance(part, UnnamedFile):
            if not place.is_checked:
                file.home.check()
                place.is_checked = True
            try:
                part.publish()
                return part
            except OSError as error:
                if error.errno not in _NO_UNNAMED:
                    raise
                part.leave()
                part = self._part(file, place)
        part.publish(syncs_name=False)
        return part

    def _sync_names(self, home: DirectoryFd, files: Sequence[WholeFile]) -> None:
        place = self._places[home]
        if place.unnamed == "twice":
            for file in files:
                part = self._parts[file]
                if isinstance(part, UnnamedFile):
                    part.sync()
        sync_directory(place.inside)
        if place.is_checked:  # once for all unnamed files; each part file has its own check
            home.check()

    def close(self) -> None:
        """Drop files that have no name yet, and close all descriptors."""
        for part in self._parts.values():
            part.leave()
        for place in self._places.values():
            with suppress(OSError):
                os.close(place.inside)

    @contextmanager
    def _noting(self, files: Sequence[WholeFile]) -> Iterator[None]:
        """Record an expected error of the block as the outcome of these files."""
        try:
            yield
        except PipegridError as error:
            self.outcomes.update(dict.fromkeys(files, error))
        except OSError as error:
            for file in files:
                self.outcomes[file] = failed("write", file.path, error)
                self.outcomes[file].__cause__ = error  # type: ignore[union-attr]


def _errno(error: BaseException | None) -> int | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return None if error is None else error.errno


class WriteGroups:
    """
    Writes the small files of one tree, several with each call in a worker thread.

    The caller limits the total bytes of the files that are being written.
    """

    def __init__(self, workers: CpuWorkers) -> None:
        self._workers = workers
        self._held: dict[WholeFile, Deferred[str]] = {}  # in order
        self._running = 0

    def write(self, file: WholeFile) -> Deferred[str]:
        """
        Write a file; the Deferred fires when it is durable, with a clause about metadata that could not be
        set.

        If the Deferred is cancelled after the group of the file has begun, the file is still written.

        Raises (through the Deferred):
            SinkError: the file cannot be written.
        """

        def forget(_: object) -> None:
            self._held.pop(file, None)

        waiting: Deferred[str] = Deferred(forget)
        self._held[file] = waiting
        self._begin()
        return waiting

    def _begin(self) -> None:
        while self._held and self._running < GROUPS_AT_ONCE:
            group: dict[WholeFile, Deferred[str]] = {}
            size = 0
            for file in list(self._held)[:GROUP_FILES]:
                if size < GROUP_BYTES:
                    group[file] = self._held.pop(file)
                    size += len(file.data)
            self._running += 1
            writing = maybeDeferred(self._workers.run, write_group, list(group))
            writing.addBoth(self._ended, list(group.values()))

    def _ended(
        self, outcomes: list[WriteOutcome] | Failure, waiting: Sequence[Deferred[str]]
    ) -> None:
        self._running -= 1
        self._begin()
        if isinstance(outcomes, Failure):
            for each in waiting:
                _fire(each, outcomes)
        else:
            for each, outcome in zip(waiting, outcomes, strict=True):
                _fire(each, Failure(outcome) if isinstance(outcome, Exception) else outcome)


def _fire(waiting: Deferred[str], outcome: str | Failure) -> None:
    if not waiting.called:  # a cancelled Deferred has already fired
        waiting.callback(outcome)
