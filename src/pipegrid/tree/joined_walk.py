"""One walk through several directories, each of which appears at its absolute path."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from threading import Lock

from pipegrid.tree.local_walk import (
    DirectoryBegun,
    DirectoryEnded,
    EntryWalk,
    FileMet,
    LeftOut,
    LocalWalk,
    Thing,
    reason_of,
)

MakesWalk = Callable[[str, str, int], LocalWalk]
"""
Called with a directory, its path in the joined tree, and the number of levels above it; returns a walk
through it.
"""


class JoinedWalk(EntryWalk):
    """
    A walk through several directories as one tree, whose root is that of the file system.

    Directories above them appear with their own metadata and nothing else; they are not listed, so the user
    need not be permitted to read them. A directory that cannot be read is reported, and the others follow; if
    none can be read, the walk fails. See ``LocalWalk``.

    Args:
        directories: absolute paths without links, none below another.
        walk_of: makes the walk through one.
    """

    def __init__(self, directories: Sequence[str], walk_of: MakesWalk) -> None:
        self._directories = sorted(directories, key=lambda each: each.split("/"))
        self._walk_of = walk_of
        self._numbers = 0
        self._above: list[tuple[str, int]] = []
        self._walks: dict[str, LocalWalk] = {}
        self._batches = self._all_batches()
        self._busy = Lock()

    def batch(self) -> list[Thing]:
        with self._busy:
            return next(self._batches, [])

    def close(self) -> None:
        with self._busy:
            self._batches.close()
            for walk in self._walks.values():
                walk.close()

    @property
    def excluded(self) -> int:
        return sum(walk.excluded for walk in self._walks.values())

    def open(self, path: str) -> io.FileIO:
        for prefix, walk in list(self._walks.items()):  # the thread of the walk may add one
            if path.startswith(f"{prefix}/"):
                return walk.open(path[len(prefix) + 1 :])
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _all_batches(self) -> Generator[list[Thing], None, None]:
        lost: OSError | None = None
        have_some = False
        yield [self._enter("", os.stat("/"))]
        for directory in self._directories:
            prefix = directory.lstrip("/")
            walk = self._walk_of(directory, prefix, prefix.count("/") + 1)
            self._walks[prefix] = walk
            try:
                missing = self._missing(prefix)
                met = walk.batch()
            except OSError as error:
                lost = error
                yield [LeftOut(prefix, _why_missing(error))]
                continue
            have_some = True
            above = [*self._leave_to(prefix), *(self._enter(*each) for each in missing)]
            parent = self._above[-1][1]
            base = self._numbers
            while met:
                yield [*above, *(self._placed(thing, prefix, base, parent) for thing in met)]
                above = []
                met = walk.batch()
        if lost is not None and not have_some:
            raise lost
        yield [DirectoryEnded(number) for _, number in reversed(self._above)]

    def _missing(self, prefix: str) -> list[tuple[str, os.stat_result]]:
        """Return directories above a path that have not begun, with their status."""
        begun = {path for path, _ in self._above}
        ends = [at for at, char in enumerate(prefix) if char == "/"]
        paths = [prefix[:end] for end in ends if prefix[:end] not in begun]
        return [(path, os.stat(f"/{path}", follow_symlinks=False)) for path in paths]

    def _leave_to(self, prefix: str) -> Iterator[Thing]:
        """Leave directories that are not above a path."""
        while self._above[-1][0] and not prefix.startswith(f"{self._above[-1][0]}/"):
            yield DirectoryEnded(self._above.pop()[1])

    def _enter(self, path: str, found: os.stat_result) -> DirectoryBegun:
        number, self._numbers = self._numbers, self._numbers + 1
        parent = self._above[-1][1] if self._above else -1
        self._above.append((path, number))
        return DirectoryBegun(number, parent, os.fsencode(path.rpartition("/")[2]), path, found)

    def _placed(self, thing: Thing, prefix: str, base: int, parent: int) -> Thing:
        """Return something that a walk has met, at its place in the joined tree."""
        if isinstance(thing, DirectoryEnded):
            return DirectoryEnded(base + thing.number)
        path = f"{prefix}/{thing.path}" if thing.path else prefix
        if isinstance(thing, FileMet):
            return thing._replace(parent=base + thing.parent, path=path)
        if not isinstance(thing, DirectoryBegun):
            return thing._replace(path=path)
        self._numbers = base + thing.number + 1
        number = base + thing.number
        if thing.parent < 0:
            name = os.fsencode(prefix.rpartition("/")[2])
            return thing._replace(number=number, parent=parent, name=name, path=path)
        return thing._replace(number=number, parent=base + thing.parent, path=path)


def _why_missing(error: OSError) -> str:
    """Return why a directory that was given could not be read, as a sentence."""
    if error.errno == errno.ENOENT:
        return "it does not exist"
    if error.errno == errno.ENOTDIR:
        return "it is not a directory"
    return reason_of(error)
