"""Small files of a fetched tree on the local disk, written in groups."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.python.failure import Failure

from pipegrid.disk.atomic_write import sync_directory
from pipegrid.disk.file_system_calls import begin_writing
from pipegrid.errors import PipegridError
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.tree.directory_descriptor import DirectoryFd, failed
from pipegrid.tree.file_metadata import RestoredMetadata
from pipegrid.tree.local_files import TreePart, tree_part

# Of a small file, waiting for the disk takes most of the time: it syncs a group of files in little more than
# the time of one, and the names in a directory with one call. While groups are written, the next one gathers;
# so on an idle disk no file waits for others, and on a busy one the groups grow.

GROUP_FILES = 16
"""Each is an open file until it has its name."""

GROUP_BYTES = 2 << 20
"""A group ends with the file that reaches this; it is written to its end, even after a cancellation."""

GROUPS_AT_ONCE = 2

_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})


class WholeFile:
    """
    A small file to be written, with all its bytes.

    Attributes:
        home: its directory.
        path: of the file.
        replace: replace an existing file or link.
        kept: the metadata of its entry.
        identity: its device and inode when it has its name; None if they are not known.
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
"""Of one file: a clause about metadata that could not be set, empty if all was set; or why it failed."""


def write_group(files: Sequence[WholeFile]) -> list[WriteOutcome]:
    """
    Write files under hidden names, sync them, and rename them; takes as long as the disk does; in any thread.

    Returns:
        the outcome of each file; a file that fails does not stop the others.
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
        # With few descriptors left, files are written one after another.
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, Exception) and _errno(outcome) in _NO_DESCRIPTORS:
                outcomes[number] = write_group(files[number : number + 1])[0]
    return outcomes


class _Group:
    """
    Files that are written and synced together.

    Attributes:
        outcomes: of the files that have ended.
    """

    def __init__(self) -> None:
        self.outcomes: dict[WholeFile, WriteOutcome] = {}
        self._parts: dict[WholeFile, TreePart] = {}
        self._inside: dict[DirectoryFd, int] = {}

    def begin(self, file: WholeFile, has_others: bool) -> None:
        """Write a file; with others, the disk starts to write it, too."""
        with self._noting([file]):
            home = file.home
            if home not in self._inside:
                self._inside[home] = home.open()
            part = tree_part(home, file.path, file.replace, file.kept, self._inside[home])
            self._parts[file] = part
            part.begin(len(file.data))
            part.write_pieces([file.data])
            if has_others:
                begin_writing(part.fileno())

    def publish(self) -> None:
        """Sync all files and give them their names, which become durable."""
        named: dict[DirectoryFd, list[WholeFile]] = {}
        for file, part in self._parts.items():
            if file not in self.outcomes:
                with self._noting([file]):
                    part.publish(syncs_name=False)
                    file.identity = part.identity
                    self.outcomes[file] = part.not_kept
                    named.setdefault(file.home, []).append(file)
        for home, files in named.items():
            with self._noting(files):
                sync_directory(self._inside[home])

    def close(self) -> None:
        """Release what has not got its name, and all descriptors."""
        for part in self._parts.values():
            part.leave()
        for fd in self._inside.values():
            with suppress(OSError):
                os.close(fd)

    @contextmanager
    def _noting(self, files: Sequence[WholeFile]) -> Iterator[None]:
        """Record an expected error as the outcome of these files."""
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
    Writes the small files of one tree, several by one call in a worker thread.

    The caller bounds the bytes of all files that it passes.
    """

    def __init__(self, workers: CpuWorkers) -> None:
        self._workers = workers
        self._held: dict[WholeFile, Deferred[str]] = {}  # in order
        self._running = 0

    def write(self, file: WholeFile) -> Deferred[str]:
        """
        Write a file; fires when it is durable, with a clause about metadata that could not be set.

        A file whose group has begun is written even if this is cancelled.

        Raises (through the Deferred):
            SinkError: it cannot be written.
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
    if not waiting.called:  # it may have been cancelled
        waiting.callback(outcome)
