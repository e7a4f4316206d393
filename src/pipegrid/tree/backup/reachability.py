"""
Which objects are reachable from the caps that a client keeps; every directory below these caps is read.

The sets of objects are in a temporary database, so that millions of objects take little memory. An immutable
directory is read once, even if many runs contain it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from enum import IntEnum
from io import BytesIO

from twisted.internet.defer import Deferred

from pipegrid.core.caps import Cap, ChkCap, DirectoryCap, LitCap, MutableCap, UnknownCap, parse_cap
from pipegrid.core.mutable.versions import Version
from pipegrid.core.text import printable
from pipegrid.errors import (
    CannotReach,
    CapError,
    CorruptionError,
    DirectoryError,
    NotEnoughSharesError,
    PipegridError,
)
from pipegrid.reactor.deferreds import gather
from pipegrid.transfer.mutable.mutable_check import MutableCheckResult
from pipegrid.tree.directory_reading import (
    Listing,
    ListingLimits,
    kind_of,
    read_listing,
    unpack,
)
from pipegrid.tree.prune_roots import Root
from pipegrid.tree.tree_grid import Grid
from pipegrid.tree.walk_order import identity_of

READS_AT_ONCE = 16
READ_BYTES = 8 << 20
"""Directories read at the same time have at most this many bytes in total; one larger one is read alone."""

_UNREAD_BYTES = 1 << 20
"""The assumed size of a mutable directory, whose real size is not known in advance."""

_SCHEMA = """
PRAGMA temp_store = FILE;
PRAGMA cache_size = -16000;
CREATE TABLE reached (storage_index BLOB PRIMARY KEY, purpose INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE entered (identity BLOB, purpose INTEGER, PRIMARY KEY (identity, purpose)) WITHOUT ROWID;
CREATE TABLE waiting (number INTEGER PRIMARY KEY, cap TEXT, bytes INTEGER, root TEXT);
CREATE TABLE candidates (storage_index BLOB PRIMARY KEY, share_bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE only_noted (storage_index BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE changeable (cap TEXT PRIMARY KEY, sequence INTEGER, root_hash BLOB, root TEXT);
"""


FORGOTTEN = "a forgotten run"
CATALOGUE = "the list of backups"
"""Names of roots, for messages. Each entry of ``CATALOGUE`` becomes a root that is named after its run."""


class Purpose(IntEnum):
    """Why a tree is walked: it is a run, is kept for another reason, or is a forgotten run."""

    RUN = 1
    KEPT = 2
    FORGOTTEN = 3


def share_bytes_of(cap: Cap) -> int:
    """
    Return the approximate size of an immutable object's shares on all servers; 0: no shares, or unknown.
    """
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    return file.size * file.total_shares // file.required_shares if isinstance(file, ChkCap) else 0


class ObjectSets:
    """The sets of objects of one prune, by storage index; call ``close`` at the end."""

    def __init__(self) -> None:
        # With an empty name, SQLite uses a temporary file if the cache is too small, and removes it.
        self._base = sqlite3.connect("", isolation_level=None)
        self._base.executescript(_SCHEMA)
        self._base.execute("BEGIN")

    def close(self) -> None:
        """Remove the temporary database of the sets."""
        self._base.close()

    def reach(self, storage_index: bytes, purpose: Purpose) -> None:
        """Record that an object was reached; the first recorded purpose stays."""
        self._base.execute("INSERT OR IGNORE INTO reached VALUES (?, ?)", (storage_index, purpose))

    def enter(self, identity: bytes, purpose: Purpose) -> bool:
        """Return whether a directory must be read for this purpose; if so, record it as read."""
        # A directory that was read for an alias or pin is read again for a forgotten run: its objects become
        # candidates, since the alias may be removed later. Conversely, a directory that was read for a
        # forgotten run is not marked as reached yet.
        same = {Purpose.RUN, purpose if purpose is Purpose.FORGOTTEN else Purpose.KEPT}
        row = self._base.execute(
            "SELECT 1 FROM entered WHERE identity = ? AND purpose IN (?, ?)", (identity, *same)
        ).fetchone()
        if row is None:
            self._base.execute("INSERT OR IGNORE INTO entered VALUES (?, ?)", (identity, purpose))
        return row is None

    def wait(self, cap: DirectoryCap, size: int, root: str) -> None:
        """Add a directory to those that must still be read."""
        self._base.execute("INSERT INTO waiting VALUES (NULL, ?, ?, ?)", (str(cap), size, root))

    def next_waiting(self) -> list[tuple[DirectoryCap, str]]:
        """
        Remove and return a few waiting directories to read at the same time, each with the name of its root.
        """
        rows = self._base.execute(
            "SELECT number, cap, bytes, root FROM waiting ORDER BY number DESC LIMIT ?",
            (READS_AT_ONCE,),
        ).fetchall()
        found: list[tuple[DirectoryCap, str]] = []
        total = 0
        for number, text, size, root in rows:
            total += size
            if found and total > READ_BYTES:
                break
            cap = parse_cap(text)
            assert isinstance(cap, DirectoryCap)
            found.append((cap, root))
            self._base.execute("DELETE FROM waiting WHERE number = ?", (number,))
        return found

    def add_candidates(self, candidates: Iterable[tuple[bytes, int]]) -> None:
        """Add candidates, each as its storage index and the bytes of its shares, or 0 if unknown."""
        self._base.executemany(
            "INSERT INTO candidates VALUES (?, ?) ON CONFLICT (storage_index) DO UPDATE "
            "SET share_bytes = max(share_bytes, excluded.share_bytes)",
            candidates,
        )

    def add_noted(self, indexes: Iterable[bytes]) -> None:
        """Add the storage indexes in ``candidates`` of ``prune_records``."""
        for index in indexes:
            self.add_candidates([(index, 0)])
            self._base.execute("INSERT OR IGNORE INTO only_noted VALUES (?)", (index,))

    def add_stored(self, stored: Iterable[tuple[bytes, int]]) -> None:
        """
        Add the objects in the database of stored objects; the arguments are those of ``add_candidates``.
        """
        for index, share_bytes in stored:
            self.add_candidates([(index, share_bytes)])
            self._base.execute("DELETE FROM only_noted WHERE storage_index = ?", (index,))

    def is_unreached(self, storage_index: bytes) -> bool:
        """Return whether an object is a candidate that was not reached."""
        found = self._base.execute(
            "SELECT 1 FROM candidates WHERE storage_index = ?1 AND NOT EXISTS "
            "(SELECT 1 FROM reached WHERE storage_index = ?1)",
            (storage_index,),
        ).fetchone()
        return found is not None

    def unreached(self) -> Iterator[list[bytes]]:
        """Yield all candidates that were not reached, in ascending order, at most a thousand at a time."""
        after = b""
        while True:
            rows = self._base.execute(
                "SELECT storage_index FROM candidates WHERE storage_index > ? AND storage_index NOT IN "
                "(SELECT storage_index FROM reached) ORDER BY storage_index LIMIT 1000",
                (after,),
            ).fetchall()
            if not rows:
                return
            yield [index for (index,) in rows]
            after = rows[-1][0]

    def totals(self) -> tuple[int, int]:
        """Return the number of candidates that were not reached, and the known bytes of their shares."""
        return self._sums("NOT IN (SELECT storage_index FROM reached)")

    def kept_totals(self) -> tuple[int, int]:
        """
        Return the number of candidates that were reached, but not from a run, and the bytes of their shares.
        """
        return self._sums(
            f"IN (SELECT storage_index FROM reached WHERE purpose != {Purpose.RUN:d})"
        )

    def _sums(self, where: str) -> tuple[int, int]:
        count, size = self._base.execute(
            "SELECT count(*), coalesce(sum(share_bytes), 0) FROM candidates "
            f"WHERE storage_index {where}"
        ).fetchone()
        return count, size

    def still_noted(self) -> Iterator[bytes]:
        """
        Yield the candidates that must stay recorded: those that no run reaches, since an alias or pin that
        still reaches them may be removed; and those known only from ``prune_records``.

        The latter may be objects of a killed run that a listed run contains: if another client forgets that
        run, no other record has them.
        """
        rows = self._base.execute(
            "SELECT storage_index FROM candidates WHERE storage_index NOT IN "
            "(SELECT storage_index FROM reached WHERE purpose = ?) OR storage_index IN only_noted",
            (Purpose.RUN,),
        )
        for (index,) in rows:
            yield index

    def released(self, indexes: Iterable[bytes]) -> None:
        """Remove candidates for which no server has a lease."""
        self._base.executemany(
            "DELETE FROM candidates WHERE storage_index = ?", ((index,) for index in indexes)
        )

    def note_version(self, cap: DirectoryCap, version: Version, root: str) -> None:
        """Record the version of a mutable directory that was read."""
        self._base.execute(
            "INSERT OR REPLACE INTO changeable VALUES (?, ?, ?, ?)",
            (str(cap), version.sequence_number, version.root_hash, root),
        )

    def versions(self) -> list[tuple[DirectoryCap, int, bytes, str]]:
        """
        Return each mutable directory that was read, with its sequence number, root hash, and the name of its
        root.
        """
        found = []
        for text, *rest in self._base.execute("SELECT * FROM changeable"):
            cap = parse_cap(text)
            assert isinstance(cap, DirectoryCap)
            found.append((cap, *rest))
        return found


class Reachability:
    """
    Walks trees, and records the objects that are reached.

    Args:
        sets: records the objects.
    """

    def __init__(self, grid: Grid, sets: ObjectSets) -> None:
        self._grid = grid
        self._sets = sets
        self._all_read = True

    async def mark(self, roots: Iterable[Root], purpose: Purpose) -> None:
        """
        Record some roots and everything below them as reached.

        Raises:
            CannotReach: a directory cannot be read, or a cap is of an unknown kind.
        """
        for root in roots:
            self._meet(root.cap, purpose, root.name)
        await self._read_all(purpose)

    async def collect(self, caps: Iterable[DirectoryCap]) -> bool:
        """
        Record the immutable objects of forgotten runs as candidates.

        Returns:
            False if a directory could not be read now but may be read later. A directory that is lost or
                damaged does not count. (The caller has checked that all servers answer.)
        """
        self._all_read = True
        for cap in caps:
            self._meet(cap, Purpose.FORGOTTEN, FORGOTTEN)
        await self._read_all(Purpose.FORGOTTEN)
        return self._all_read

    async def mark_changes(self) -> bool:
        """
        Find the mutable directories that have changed since they were read; read them again, and mark their
        objects. Return whether any directory has changed.

        Raises:
            CannotReach: a directory cannot be read.
        """
        changed = False
        versions = self._sets.versions()
        for start in range(0, len(versions), READS_AT_ONCE):
            some = versions[start : start + READS_AT_ONCE]
            looks = [Deferred.fromCoroutine(self._newest(cap, root)) for cap, *_, root in some]
            for (cap, *before, root), newest in zip(some, await gather(looks), strict=True):
                if _place(newest) != tuple(before):
                    changed = True
                    self._meet_entries(await self._read(cap, root), Purpose.KEPT, root)
        await self._read_all(Purpose.KEPT)
        return changed

    async def _read_all(self, purpose: Purpose) -> None:
        read = self._read_forgotten if purpose is Purpose.FORGOTTEN else self._read
        while batch := self._sets.next_waiting():
            listings = await gather([Deferred.fromCoroutine(read(*each)) for each in batch])
            for (_, root), listing in zip(batch, listings, strict=True):
                self._meet_entries(listing, purpose, root)

    async def _read_forgotten(self, cap: DirectoryCap, root: str) -> Listing:
        try:
            return await read_listing(self._grid, cap)
        except PipegridError as error:
            lost = (NotEnoughSharesError, CorruptionError, DirectoryError, CapError)
            self._all_read = self._all_read and isinstance(error, lost)
            return Listing((), 0)

    def _meet_entries(self, listing: Listing, purpose: Purpose, root: str) -> None:
        for entry in listing.entries:
            name = f"the run {printable(entry.name)}" if root == CATALOGUE else root
            for cap in {entry.cap, entry.write_cap} - {None}:
                self._meet(cap, purpose, name)

    def _meet(self, cap: Cap | None, purpose: Purpose, root: str) -> None:
        if cap is None or isinstance(cap, UnknownCap):
            if purpose is Purpose.FORGOTTEN:
                return
            raise CannotReach(
                f"{root} contains a cap of a kind that this version does not know, so what it reaches is not "
                "known; nothing was released"
            )
        file = cap.file if isinstance(cap, DirectoryCap) else cap
        index = file.storage_index
        if purpose is Purpose.FORGOTTEN:
            if not isinstance(file, (ChkCap, LitCap)):
                return  # no backup has stored a mutable object
            if index is not None:
                self._sets.add_candidates([(index, share_bytes_of(cap))])
        elif index is not None:
            self._sets.reach(index, purpose)
        if isinstance(cap, DirectoryCap):
            self._enter(cap, purpose, root)

    def _enter(self, cap: DirectoryCap, purpose: Purpose, root: str) -> None:
        file = cap.file
        if isinstance(file, LitCap):  # the cap contains the directory: no shares
            self._meet_entries(self._unpacked(cap, file.data, root), purpose, root)
            return
        if kind_of(cap) != "directory":
            raise CannotReach(
                f"{root} contains a directory's verify cap, so what that directory reaches is not known; "
                "nothing was released: unlink it, or put its read cap there"
            )
        identity = identity_of(cap)
        assert identity is not None
        if self._sets.enter(identity, purpose):
            size = file.size if isinstance(file, ChkCap) else _UNREAD_BYTES
            self._sets.wait(cap, size, root)

    async def _read(self, cap: DirectoryCap, root: str) -> Listing:
        try:
            if isinstance(cap.file, MutableCap):
                return await self._read_newest(cap, root)
            return await read_listing(self._grid, cap)
        except CannotReach:
            raise
        except PipegridError as error:
            raise self._unreadable(root, str(error)) from error

    async def _read_newest(self, cap: DirectoryCap, root: str) -> Listing:
        """
        Read the newest version of a mutable directory; raise CannotReach if a server may have a newer one.
        """
        newest = await self._newest(cap, root)
        seen: list[Version] = []
        sink = BytesIO()
        length = ListingLimits().directory_bytes + 1
        await self._grid.get(cap.file, sink, length=length, seen=seen.append)
        read = max(seen, key=_place)
        if _place(seen[-1]) != _place(read) or _place(read) < _place(newest):
            raise self._unreadable(root, "it changes, or servers show an older version of it")
        self._sets.note_version(cap, read, root)
        return self._unpacked(cap, sink.getvalue(), root)

    async def _newest(self, cap: DirectoryCap, root: str) -> Version:
        """Return the newest version of a mutable directory that any server has."""
        try:
            found = await self._grid.check(cap)
        except PipegridError as error:
            raise self._unreadable(root, str(error)) from error
        assert isinstance(found, MutableCheckResult)
        if found.unreachable:
            raise self._unreadable(root, f"{', '.join(found.unreachable)} did not answer")
        if found.version is None or found.newer_unrecoverable or found.rivals or found.seen:
            raise self._unreadable(root, "its newest version cannot be read; see 'pipegrid check'")
        return found.version

    def _unpacked(self, cap: DirectoryCap, data: bytes, root: str) -> Listing:
        try:
            return unpack(cap, data)
        except DirectoryError as error:
            if root == FORGOTTEN:
                return Listing((), 0)
            raise self._unreadable(root, str(error)) from error

    def _unreadable(self, root: str, reason: str) -> CannotReach:
        return CannotReach(
            f"{root} cannot be read as a whole, so what it reaches is not known, and nothing was released: "
            f"{reason}"
        )


def _place(version: Version) -> tuple[int, bytes]:
    return version.sequence_number, version.root_hash
