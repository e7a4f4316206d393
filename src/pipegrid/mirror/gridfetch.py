"""
A mirror brought back from a storage grid, from the one cap that ``gridstore`` gave.

The list in the root says what there should be, with hashes; directories say only where a file is. Paths of
the list are checked like those of any index, and directories are looked into only on the way to one of them,
so whatever else stands in the tree is not seen. Indexes get their names when all else is there, in the
order of the list.
"""

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
from pipegrid.core.directory import unpack_immutable
from pipegrid.errors import CapError, PipegridError
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.directories import hash_file
from pipegrid.mirror.folding import HeldPlaces, kept_first
from pipegrid.mirror.lists import lines_of, read_list
from pipegrid.mirror.manifest import begin_manifest
from pipegrid.mirror.mirror import Mirror
from pipegrid.mirror.report import Report
from pipegrid.mirror.selecting import base_of
from pipegrid.mirror.suites import OWN, remove_in_order
from pipegrid.mirror.sync import LOOKED_AT_ONCE
from pipegrid.mirror.wanted import HIDDEN, BadEntry, MirrorError, Wanted, quoted
from pipegrid.reactor.together import together

FETCHED_AT_ONCE = 16
MAX_LIST_BYTES = 256 << 20
MAX_DIRECTORY_BYTES = 64 << 20

_INDEXES = ("dists/", "repodata/")


def is_index(path: str) -> bool:
    """Return whether this is not to be seen before the files that it names."""
    name = path.rpartition("/")[2]  # those of flat suites are anywhere
    return path.startswith(_INDEXES) or name in OWN or base_of(name) in ("Packages", "Sources")


T = TypeVar("T")


def _stored_as(name: str) -> str:
    return unicodedata.normalize("NFC", name)


_LIST = "the list of the mirror"
_CHECKED_AT_ONCE = 100_000


def _check_bytes(cap: ChkCap | LitCap, most_bytes: int, what: str) -> None:
    if cap.size > most_bytes:
        raise MirrorError(f"{what} has {cap.size} bytes, more than {most_bytes}; no mirror's has")


class FileOfEntries:
    """
    A list in a file, which may be read again and again, from its beginning; never all of it is in memory.

    Args:
        file: in the form of ``lists``; nobody else reads it meanwhile.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def __iter__(self) -> Iterator[Wanted]:
        return read_list(self._lines(), _LIST)

    def _lines(self) -> Iterator[bytes]:
        at = 0
        while True:
            self._file.seek(at)  # others may have read it since
            lines = list(islice(lines_of(self._file), LOOKED_AT_ONCE))
            at = self._file.tell()
            if not lines:
                return
            yield from lines

    def check(self) -> None:
        """
        Look at all lines.

        Raises:
            BadEntry: one makes no sense, or names a path once more.
        """
        # Eight bytes of each path, of which as many are compared at once as memory is to be had for.
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
    """What has files: a ``Grid``."""

    def get(self, cap: Any, sink: Any) -> Deferred[Any]:
        """Write a file to a binary file object."""

    def read(self, cap: Any) -> Deferred[bytes]:
        """Fetch a whole file; fires with its bytes."""


FurtherNames = Callable[[Destination, Iterable[Wanted]], Iterable[tuple[str, str]]]


class GridFetch:
    """
    Args:
        mirror: what is brought back; it needs no URL.
        grid: where from.
        cap: of the root.
        further_names: returns paths of indexes and the further name of each; called in the thread.

    Raises:
        CapError: it is not the cap of an immutable directory.
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
        Bring all of it back that is not there; returns what was removed, or would be.

        Files that could not be had are in ``report``, and then indexes stay as they were.

        Args:
            delete: remove what does not belong to it, if nothing failed.
            progress: called with the report as files come.

        Raises:
            MirrorError: the cap is not a mirror's, or the disk takes no more.
            BadEntry: its list names what may not be.
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
        missing: list[Wanted] = []
        report = self.report
        async for chunk in self._missing(entries):
            if dry_run:
                report.fetched_files += len(chunk)
                report.fetched_bytes += sum(each.size or 0 for each in chunk)
            else:
                missing += chunk
        if not dry_run:
            caps = await self._find(top, missing)
            await self._mirror.run(begin_manifest, self._destination)
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

    def _others(self, entries: Iterable[Wanted]) -> list[tuple[str, str]]:
        """Ask ``further_names`` for those of some files that are there now; in the thread."""
        names = self._further_names
        return [] if names is None else list(names(self._destination, entries))

    def _publish(self, entries: Iterable[Wanted]) -> None:
        """In the thread: show the indexes; by further names first."""
        for path, other in self._others(entries):
            self._destination.link(path, other)
        indexes = [each.path for each in entries if is_index(each.path)]
        self._destination.release(indexes)

    # What there should be, and what is there.

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
                f"{_LIST} could not be kept in {gettempdir()} ({os.strerror(error.errno or 0)}); make room,"
                " or name another directory in TMPDIR"
            ) from error
        return entries

    async def _missing(self, entries: Iterable[Wanted]) -> AsyncIterator[list[Wanted]]:
        """Yield what is not there, by the piece."""
        report = self.report
        folds, is_right = self._destination.folds, self._destination.is_there
        ahead = kept_first(entries, folds, is_right)
        places = HeldPlaces(folds)
        while chunk := await self._mirror.run(lambda: list(islice(ahead, LOOKED_AT_ONCE))):
            missing = []
            for each, is_there in zip(
                chunk, await self._mirror.run(self._look, chunk), strict=True
            ):
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

    def _look(self, chunk: Sequence[Wanted]) -> list[bool]:
        """Return for each whether it is there; in the thread."""
        return [self._destination.is_there(each) for each in chunk]

    # Directories.

    async def _find(self, top: dict[str, Cap], missing: Iterable[Wanted]) -> dict[str, Cap]:
        """Return the caps of files by path, of those that the directories have."""
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
        Read a directory once, in however many places it is, and keep of it what is wanted there.

        A tree of strangers may have one long directory under a thousand names.
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
        data = await self._read(cap.file, MAX_DIRECTORY_BYTES, "a directory of the mirror")
        return {child.name: child.cap for child in unpack_immutable(data)}

    async def _read(self, cap: ChkCap | LitCap, most_bytes: int, what: str) -> bytes:
        _check_bytes(cap, most_bytes, what)
        return await self._grid.read(cap)

    # Files.

    async def _keep(
        self,
        each: Wanted,
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
        try:
            fd, name = await self._mirror.run(self._destination.open_incoming, each)
        except OSError as error:
            raise self._destination.error(error, "hold the files") from error
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
            else:
                report.fail(each.path, f"its {each.algorithm} is another one")
        finally:
            await self._mirror.run(self._let_go, file, name)
        if progress is not None:
            progress(report)

    def _finish(self, each: Wanted, file: BinaryIO, name: str, staged: bool) -> bool:
        """In the thread: give it its name, if it is right."""
        try:
            file.flush()
            if hash_file(file.fileno(), each.algorithm) != each.digest:
                return False
            os.fsync(file.fileno())
            self._destination.note(file.fileno(), each)
            self._destination.publish(name, each.path, staged)
        except OSError as error:
            raise self._destination.error(error, "hold the files") from error
        return True

    def _let_go(self, file: BinaryIO, name: str) -> None:
        """In the thread: nothing is left that has no name."""
        file.close()
        self._destination.discard(name)

    async def _each(self, items: Sequence[Any], work: Callable[[Any], Awaitable[T]]) -> list[T]:
        """Do something for all, ``FETCHED_AT_ONCE`` at a time; the first error ends the others."""

        found: dict[int, T] = {}
        ahead = iter(enumerate(items))

        async def take() -> None:
            for number, item in ahead:
                found[number] = await work(item)

        running = [Deferred.fromCoroutine(take()) for _ in items[:FETCHED_AT_ONCE]]
        await together(running)
        return [found[number] for number in range(len(items))]
