"""Restore of a mirrored archive from the storage grid."""

from __future__ import annotations

import os
import unicodedata
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import islice
from tempfile import TemporaryFile, gettempdir
from typing import Any, BinaryIO, Protocol, TypeVar

from twisted.internet.defer import Deferred

from pipegrid.core.caps import Cap, ChkCap, DirectoryCap, LitCap, parse_cap
from pipegrid.core.packed_directory import (
    unpack_immutable,
)
from pipegrid.errors import CapError, PipegridError
from pipegrid.mirror.archive_file import (
    HIDDEN,
    ArchiveFile,
    BadEntry,
    MirrorError,
    PathCollisions,
    kept_first,
    quoted,
)
from pipegrid.mirror.archive_to_grid import is_index
from pipegrid.mirror.debian_release_files import remove_in_order
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.fetch_run import LOOKED_AT_ONCE
from pipegrid.mirror.file_list_format import lines_of, read_list
from pipegrid.mirror.file_scheduler import MAX_SHOWN, Report
from pipegrid.mirror.manifest import add_to_manifest
from pipegrid.mirror.mirror_api import Mirror
from pipegrid.reactor.deferreds import gather

T = TypeVar("T")

# Restoring a mirror from a storage grid, with the one cap that ``GridStore`` returns.
#
# The list in the root directory names all files with their hashes; the directories only give the files' caps.
# Paths in the list are checked like those of any index. Only directories with a file of the list are read, so
# anything else in the tree is ignored. Indexes are published when all other files exist, in the order of the
# list.

FETCHED_AT_ONCE = 16


MAX_LIST_BYTES = 256 << 20


MAX_DIRECTORY_BYTES = 64 << 20


def _stored_as(name: str) -> str:
    return unicodedata.normalize("NFC", name)


_LIST = "the list of the mirror"


_CHECKED_AT_ONCE = 100_000


def _check_bytes(cap: ChkCap | LitCap, most_bytes: int, what: str) -> None:
    if cap.size > most_bytes:
        raise MirrorError(f"{what} has {cap.size} bytes, more than {most_bytes}; no mirror's has")


class FileOfEntries:
    """
    The list of a mirror's files, read from a file repeatedly; the list is never in memory as a whole.

    Args:
        file: in the format of ``file_list_format``; no other object may use it at the same time.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def __iter__(self) -> Iterator[ArchiveFile]:
        return read_list(self._lines(), _LIST)

    def _lines(self) -> Iterator[bytes]:
        at = 0
        while True:
            self._file.seek(at)  # another iterator may have moved the file position
            lines = list(islice(lines_of(self._file), LOOKED_AT_ONCE))
            at = self._file.tell()
            if not lines:
                return
            yield from lines

    def check(self) -> None:
        """
        Check all lines of the list.

        Raises:
            BadEntry: a line is invalid, or repeats a path.
        """
        # Only eight bytes of each path's hash are kept. They are compared in several passes, so that the set
        # of each pass stays small.
        keys = array("q", (hash(each.path) for each in self))
        parts = len(keys) // _CHECKED_AT_ONCE + 1
        for part in range(parts):
            seen: set[int] = set()
            for place, key in enumerate(keys):
                if key % parts != part:
                    continue
                if key in seen:
                    (again,) = islice(self, place, place + 1)
                    raise BadEntry(f"{_LIST} names {quoted(again.path)} twice")
                seen.add(key)


class HasFiles(Protocol):
    """The part of ``Grid`` that a restore uses: it reads files."""

    def get(self, cap: Any, sink: Any) -> Deferred[Any]:
        """Write a file to a binary file object."""

    def read(self, cap: Any) -> Deferred[bytes]:
        """Fetch a whole file; fires with its bytes."""


FurtherNames = Callable[[Destination, Iterable[ArchiveFile]], Iterable[tuple[str, str]]]


class GridFetch:
    """
    Restores a mirror from a grid.

    Args:
        mirror: the mirror to restore; it needs no URL.
        grid: the grid that has the files.
        cap: of the root directory.
        further_names: returns pairs of an index's path and another name of the same index; called in the
            thread of the destination.

    Raises:
        CapError: ``cap`` is not the cap of an immutable directory.
    """

    def __init__(
        self, mirror: Mirror, grid: HasFiles, cap: str, further_names: FurtherNames | None = None
    ) -> None:
        parsed = parse_cap(cap)
        if not isinstance(parsed, DirectoryCap) or not isinstance(parsed.file, (ChkCap, LitCap)):
            raise CapError("this is not the cap of a mirror; give the one that --to-grid printed")
        self._mirror = mirror
        self._destination = mirror.destination
        self._grid = grid
        self._root = parsed
        self._further_names = further_names
        self.report = Report()

    async def fetch(
        self,
        delete: bool = False,
        dry_run: bool = False,
        progress: Callable[[Report], None] | None = None,
    ) -> list[str]:
        """
        Restore all missing files; return the removed paths, or in a dry run those that would be removed.

        Files that could not be fetched are in ``report``; if there are any, the indexes stay unchanged.

        Args:
            delete: remove files that do not belong to the mirror, if nothing failed.
            progress: called with the report as files arrive.

        Raises:
            MirrorError: the cap is not a mirror's, or the disk is full.
            BadEntry: the mirror's list has a refused entry.
        """
        top = await self._children(self._root)
        with TemporaryFile("w+b") as file:
            entries = await self._list(top.get(HIDDEN), file)
            return await self._bring(top, entries, delete, dry_run, progress)

    async def _bring(
        self,
        top: dict[str, Cap],
        entries: FileOfEntries,
        delete: bool,
        dry_run: bool,
        progress: Callable[[Report], None] | None,
    ) -> list[str]:
        missing: list[ArchiveFile] = []
        report = self.report
        async for chunk in self._missing(entries):
            if dry_run:
                report.fetched_files += len(chunk)
                report.fetched_bytes += sum(each.size or 0 for each in chunk)
                space = MAX_SHOWN - len(report.fetched)
                report.fetched += [each.path for each in chunk[:space]]
            else:
                missing += chunk
        if not dry_run:
            caps = await self._find(top, missing)
            await self._mirror.run(add_to_manifest, self._destination, ())
            for staged in (False, True):
                part = [each for each in missing if is_index(each.path) == staged]
                await self._each(part, lambda each, s=staged: self._keep(each, caps, s, progress))  # type: ignore[misc]
                if report.failed_files:
                    return []
            await self._mirror.run(self._publish, entries)
            await self._mirror.complete(entries)
        if not delete:
            return []
        kept = {each.path for each in entries}
        if not dry_run:
            kept.update(other for _, other in await self._mirror.run(self._others, entries))
        others = await self._mirror.delete_others(kept, dry_run=True)
        if not dry_run:
            await self._mirror.run(remove_in_order, self._destination, others)
        return others

    def _others(self, entries: Iterable[ArchiveFile]) -> list[tuple[str, str]]:
        """Return the ``further_names`` of some existing files. Runs in the destination's thread."""
        names = self._further_names
        return [] if names is None else list(names(self._destination, entries))

    def _publish(self, entries: Iterable[ArchiveFile]) -> None:
        """Publish the indexes, their further names first. Runs in the destination's thread."""
        for path, other in self._others(entries):
            self._destination.link(path, other)
        indexes = [each.path for each in entries if is_index(each.path)]
        self._destination.release(indexes)

    # Which wanted files exist already.

    async def _list(self, cap: Cap | None, file: BinaryIO) -> FileOfEntries:
        if not isinstance(cap, (ChkCap, LitCap)):
            raise MirrorError(
                "the directory of this cap is not a mirror; give the cap that --to-grid printed"
            )
        _check_bytes(cap, MAX_LIST_BYTES, _LIST)
        entries = FileOfEntries(file)
        try:
            await self._grid.get(cap, file)
            await self._mirror.run(entries.check)
        except OSError as error:
            raise MirrorError(
                f"{_LIST} could not be kept in {gettempdir()} ({os.strerror(error.errno or 0)}); free some "
                "space, or name another directory in TMPDIR"
            ) from error
        return entries

    async def _missing(self, entries: Iterable[ArchiveFile]) -> AsyncIterator[list[ArchiveFile]]:
        """Yield the missing files as lists, one for every ``LOOKED_AT_ONCE`` entries."""
        report = self.report
        folds, is_right = self._destination.folds, self._destination.is_there
        ahead = kept_first(entries, folds, is_right)
        places = PathCollisions(folds)
        while chunk := await self._mirror.run(list, islice(ahead, LOOKED_AT_ONCE)):
            missing = []
            there = await self._mirror.run(list, map(is_right, chunk))
            for each, is_there in zip(chunk, there, strict=True):
                report.wanted_files += 1
                report.wanted_bytes += each.size or 0
                why = places.refusal(each)
                if why is not None:
                    report.fail(each.path, why)
                elif is_there:
                    report.present_files += 1
                    report.present_bytes += each.size or 0
                else:
                    missing.append(each)
            yield missing

    # Directories.

    async def _find(self, top: dict[str, Cap], missing: Iterable[ArchiveFile]) -> dict[str, Cap]:
        """Return the caps of the missing files by path; files that the directories lack are left out."""
        tree: dict[str, Any] = {}
        for each in missing:
            *above, name = each.path.split("/")
            at = tree
            for part in above:
                found = at.setdefault(part, {})
                if not isinstance(found, dict):
                    raise BadEntry(f"the list of the mirror has files below {quoted(each.path)}")
                at = found
            at[name] = None
        caps: dict[str, Cap] = {}
        level = [("", tree, top)]
        while level:
            ahead: dict[Cap, list[tuple[str, dict[str, Any]]]] = {}
            for path, wanted, children in level:
                for name, below in wanted.items():
                    cap = children.get(_stored_as(name))
                    if cap is not None and below is None:
                        caps[path + name] = cap
                    elif cap is not None:
                        ahead.setdefault(cap, []).append((f"{path}{name}/", below))
            read = await self._each(list(ahead.items()), lambda each: self._below(*each))
            level = [place for places in read for place in places]
        return caps

    async def _below(
        self, cap: Cap, places: Sequence[tuple[str, dict[str, Any]]]
    ) -> list[tuple[str, dict[str, Any], dict[str, Cap]]]:
        """
        Read a directory once, however many paths lead to it, and return its wanted children for each path.

        An untrusted tree may have one long directory under a thousand names.
        """
        children = await self._children(cap)
        return [
            (
                path,
                wanted,
                {key: children[key] for key in map(_stored_as, wanted) if key in children},
            )
            for path, wanted in places
        ]

    async def _children(self, cap: Cap) -> dict[str, Cap]:
        if not isinstance(cap, DirectoryCap) or not isinstance(cap.file, (ChkCap, LitCap)):
            raise MirrorError(
                "a directory of the mirror is a file; the tree in the grid is not one"
            )
        _check_bytes(cap.file, MAX_DIRECTORY_BYTES, "a directory of the mirror")
        data = await self._grid.read(cap.file)
        return {child.name: child.cap for child in unpack_immutable(data)}

    # Files.

    async def _keep(
        self,
        each: ArchiveFile,
        caps: dict[str, Cap],
        staged: bool,
        progress: Callable[[Report], None] | None,
    ) -> None:
        cap = caps.get(each.path)
        report = self.report
        if not isinstance(cap, (ChkCap, LitCap)):
            report.fail(each.path, "no directory in the grid has it")
            return
        if cap.size != each.size:
            report.fail(each.path, f"it has {cap.size} bytes, and {each.size} by the list")
            return
        with self._destination.reporting("hold the files"):
            fd, name = await self._mirror.run(self._destination.open_incoming, each)
        file = os.fdopen(fd, "r+b")
        try:
            await self._grid.get(cap, file)
            right = await self._mirror.run(self._finish, each, file, name, staged)
        except PipegridError as error:
            if isinstance(error, (MirrorError, BadEntry)):
                raise
            report.fail(each.path, str(error))
        else:
            if right:
                report.fetched_files += 1
                report.fetched_bytes += each.size
                if len(report.fetched) < MAX_SHOWN:
                    report.fetched.append(each.path)
            else:
                report.fail(each.path, f"its {each.algorithm} is another one")
        finally:
            await self._mirror.run(self._release, file, name)
        if progress is not None:
            progress(report)

    def _finish(self, each: ArchiveFile, file: BinaryIO, name: str, staged: bool) -> bool:
        """Publish the file if it is right. Runs in the destination's thread."""
        with self._destination.reporting("hold the files"):
            file.flush()
            return self._destination.accept(file.fileno(), name, each, staged)

    def _release(self, file: BinaryIO, name: str) -> None:
        """Close and remove an unpublished file. Runs in the destination's thread."""
        file.close()
        self._destination.discard(name)

    async def _each(self, items: Sequence[Any], work: Callable[[Any], Awaitable[T]]) -> list[T]:
        """
        Run ``work`` for all items, ``FETCHED_AT_ONCE`` at a time; the first error ends the remaining work.
        """

        found: dict[int, T] = {}
        ahead = iter(enumerate(items))

        async def take() -> None:
            for number, item in ahead:
                found[number] = await work(item)

        running = [Deferred.fromCoroutine(take()) for _ in items[:FETCHED_AT_ONCE]]
        await gather(running)
        return [found[number] for number in range(len(items))]
