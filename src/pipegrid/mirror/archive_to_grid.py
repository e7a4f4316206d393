"""Storing a mirrored archive in a storage grid."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from pipegrid.core.caps import Cap, DirectoryCap, parse_cap
from pipegrid.core.packed_directory import (
    PackedChild,
    directory_cap,
    pack_immutable,
)
from pipegrid.disk.atomic_write import replace_file
from pipegrid.disk.safe_open import read_file
from pipegrid.errors import CapError
from pipegrid.mirror.archive_file import (
    HIDDEN,
    ArchiveFile,
    MirrorError,
    quoted,
)
from pipegrid.mirror.debian_index_selection import base_of
from pipegrid.mirror.debian_release_files import OWN
from pipegrid.mirror.file_list_format import list_line
from pipegrid.mirror.manifest import read_manifest
from pipegrid.mirror.mirror_api import Mirror

# Storing a mirror's files in a storage grid: one cap from which all of them can be restored.
#
# The files are stored as a tree of immutable directories with the same paths as in the mirror, which any
# client of the grid can walk. The root also has a file ``HIDDEN``: the list of the mirror's files and their
# hashes, each release file after the indexes that it names. With the list, a restore can verify every file,
# and publish the indexes in this order.
#
# The mirror records the caps of stored files by hash, so the next run stores only new files. A record is
# written when its group of files is stored. Records are used only for the grid that they name, and only while
# that grid has the root directory which was stored last: a client may use other servers, and servers may lose
# everything.

STORED_AT_ONCE = 512
"""Maximum number of files that are stored and recorded together."""

NOTES = f"{HIDDEN}/caps"
GRID_CAP = f"{HIDDEN}/grid-cap"
MAX_NOTE_BYTES = 4096
_NOTE = re.compile(rb"([0-9a-f]{64,128}) (URI:[!-~]+)\n")


class StoresArchives(Protocol):
    """The part of ``Grid`` that storing a mirror uses."""

    def put_many(self, sources: Sequence[Any]) -> Deferred[list[Any]]:
        """
        Store paths or bytes; fires with a list that has, for each of them, an object with a ``cap`` or a
        ``Failure``.
        """

    def check(self, cap: Cap) -> Deferred[Any]:
        """Count the shares of a file; fires with an object with an attribute ``recoverable``."""


class GridStore:
    """
    Stores a mirror in a grid.

    Args:
        mirror: a mirror whose last run was complete.
        grid: where to store it.
        grid_name: identifies the grid; caps recorded for another grid are not used.
        again: also store files that were stored before, which renews their leases.
    """

    def __init__(
        self, mirror: Mirror, grid: StoresArchives, grid_name: str, again: bool = False
    ) -> None:
        self._mirror = mirror
        self._grid = grid
        self._root = mirror.destination.path
        self._notes = Notes(os.path.join(self._root, NOTES), grid_name)
        self._again = again
        self.stored_files = 0

    async def store(self) -> DirectoryCap:
        """
        Store all files of the last complete run; return the root's cap, which is also written to
        ``GRID_CAP``.

        Raises:
            MirrorError: a file cannot be stored, or records cannot be written. Earlier groups of files are
                recorded.
        """
        run = self._mirror.run
        await run(self._notes.open, self._again or not await self._is_kept())
        try:
            tree: dict[str, Any] = {}
            lines: list[bytes] = []
            entries = read_manifest(self._mirror.destination)
            while chunk := await run(list, islice(entries, STORED_AT_ONCE)):
                lines.extend(map(list_line, chunk))
                for each, cap in zip(chunk, await self._files(chunk), strict=True):
                    _hang(tree, each.path, cap)
            (listed,) = await self._put([(b"".join(lines), "its list")])
            tree[HIDDEN] = listed
            root = await self._directories(tree)
            await run(replace_file, Path(self._root, GRID_CAP), f"{root}\n".encode("ascii"))
        except OSError as error:
            raise self._mirror.destination.error(error, "record the files in the grid") from error
        finally:
            await run(self._notes.close)
        return root

    async def _is_kept(self) -> bool:
        """Return whether the grid still has the root that was stored last; True if no root was recorded."""
        path = os.path.join(self._root, GRID_CAP)
        try:
            text = await self._mirror.run(read_file, path, MAX_NOTE_BYTES)
            cap = parse_cap(text.decode("ascii").strip())
        except (OSError, ValueError, CapError):
            return True
        if not isinstance(cap, DirectoryCap):
            return True
        found = await self._grid.check(cap)
        return bool(found.recoverable)

    async def _files(self, chunk: Sequence[ArchiveFile]) -> list[Cap]:
        """Store those of the files that have no recorded cap; return the caps of all."""
        digests = [each.digest.hex() for each in chunk]
        sources = [(os.path.join(self._root, each.path), each.path) for each in chunk]
        self.stored_files += await self._store_new(digests, sources)
        return [self._known(digest) for digest in digests]

    async def _store_new(self, digests: Sequence[str], sources: Sequence[tuple[Any, str]]) -> int:
        """
        Store the sources whose hashes have no recorded cap, and record their caps; return how many were
        stored.
        """
        missing = {
            digest: each
            for digest, each in zip(digests, sources, strict=True)
            if self._notes.find(digest) is None
        }
        caps = await self._put(list(missing.values()))
        await self._mirror.run(self._notes.add, zip(missing, caps, strict=True))
        return len(caps)

    def _known(self, digest: str) -> Cap:
        cap = self._notes.find(digest)
        assert cap is not None
        return cap

    async def _put(self, sources: Sequence[tuple[Any, str]]) -> list[Cap]:
        """Store some sources; each has a name for error messages. Return their caps."""
        if not sources:
            return []
        outcomes = await self._grid.put_many([source for source, _ in sources])
        for outcome, (_, name) in zip(outcomes, sources, strict=True):
            if isinstance(outcome, Failure):
                raise MirrorError(
                    f"{quoted(name)} could not be stored in the grid: {outcome.value}; run it again, and it "
                    "resumes"
                ) from outcome.value
        return [outcome.cap for outcome in outcomes]

    async def _directories(self, tree: dict[str, Any]) -> DirectoryCap:
        """
        Store the directories of a tree, the deepest first, those of one depth together; return the root's
        cap.
        """
        levels: list[list[tuple[dict[str, Any], str, dict[str, Any]]]] = []
        level = [({"": tree}, "", tree)]
        while level:
            levels.append(level)
            level = [
                (directory, name, child)
                for _, _, directory in level
                for name, child in directory.items()
                if isinstance(child, dict)
            ]
        holder = levels[0][0][0]
        for level in reversed(levels):
            for start in range(0, len(level), STORED_AT_ONCE):
                part = level[start : start + STORED_AT_ONCE]
                packed = [
                    pack_immutable(PackedChild(name, cap) for name, cap in directory.items())
                    for _, _, directory in part
                ]
                caps = await self._packed(packed)
                for (parent, name, _), cap in zip(part, caps, strict=True):
                    parent[name] = directory_cap(cap)
        root: DirectoryCap = holder[""]
        return root

    async def _packed(self, packed: Sequence[bytes]) -> list[Cap]:
        digests = [sha256(each).hexdigest() for each in packed]
        await self._store_new(digests, [(each, "a directory") for each in packed])
        return [self._known(digest) for digest in digests]


class Notes:
    """
    The recorded cap for each hash, one per line of a file. All methods but ``find`` are for the destination's
    thread.

    Args:
        grid_name: records for another grid are dropped.
    """

    def __init__(self, path: str, grid_name: str) -> None:
        self._path = path
        self._first = b"# %s\n" % grid_name.encode("utf-8", "backslashreplace").replace(b"\n", b" ")
        self._caps: dict[str, str] = {}
        self._fd = -1

    def open(self, from_scratch: bool = False) -> None:
        """
        Open the file, and read the existing records; skip damaged lines (an interrupted write damages the
        last one). ``from_scratch``: remove the existing records instead.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, 0o600)
        with open(os.dup(self._fd), "rb") as file:
            file.seek(0)
            if not from_scratch and file.readline(MAX_NOTE_BYTES) == self._first:
                for line in iter(lambda: file.readline(MAX_NOTE_BYTES), b""):
                    match = _NOTE.fullmatch(line)
                    if match is not None:
                        self._caps[match[1].decode("ascii")] = match[2].decode("ascii")
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    os.write(self._fd, b"\n")
                return
        os.ftruncate(self._fd, 0)
        os.write(self._fd, self._first)

    def find(self, digest: str) -> Cap | None:
        """Return the cap of the file with this hash, None if unknown."""
        text = self._caps.get(digest)
        if text is not None:
            with suppress(CapError):
                return parse_cap(text)
        return None

    def add(self, caps: Iterable[tuple[str, Cap]]) -> None:
        """Record the caps of some hashes, durably. Raises OSError."""
        new = {digest: str(cap) for digest, cap in caps}
        self._caps.update(new)
        data = "".join(f"{digest} {cap}\n" for digest, cap in new.items()).encode("ascii")
        while data:
            data = data[os.write(self._fd, data) :]
        os.fsync(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _hang(tree: dict[str, Any], path: str, cap: Cap) -> None:
    *above, name = path.split("/")
    for part in above:
        tree = tree.setdefault(part, {})
    tree[name] = cap


_INDEXES = ("dists/", "repodata/")


def is_index(path: str) -> bool:
    """
    Return whether a path is that of an index, which clients must not see before the files that it names.
    """
    name = path.rpartition("/")[2]  # indexes of flat suites may be in any directory
    return path.startswith(_INDEXES) or name in OWN or base_of(name) in ("Packages", "Sources")
